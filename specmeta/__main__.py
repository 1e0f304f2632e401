"""``python -m specmeta``: the command line of `specmeta.cli`."""

import sys

from specmeta.cli import main

sys.exit(main())
