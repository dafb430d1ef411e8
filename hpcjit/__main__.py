"""`python -m hpcjit`."""

import sys

from hpcjit.cli import main

sys.exit(main())
