"""Smaller tools, run from the repository's root: python -m tools.bench, tools.exact_answer, ..."""
