"""Other routers for moep.py and moduleformer.py, one idea per file: docs/routers.md."""
