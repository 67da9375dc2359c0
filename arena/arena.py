"""Python finds this in place of the package only if that is run as a folder."""

import sys

sys.exit('arena: run it with -m, from the root of the repository: python -m arena')
