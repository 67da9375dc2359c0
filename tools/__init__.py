"""Tools, run from the repository's root: python -m tools.compare, tools.check, ..."""
