"""Python finds this in place of the real plumbing only if a tool is run as a file."""

import sys
from pathlib import Path

name = Path(sys.argv[0]).stem
sys.exit(f'{name}.py: run it from the root of the repository: python -m tools.{name}')
