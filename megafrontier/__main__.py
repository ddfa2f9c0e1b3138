"""`python -m megafrontier` is the `megafrontier` command."""

import sys

from megafrontier.cli import main

sys.exit(main())
