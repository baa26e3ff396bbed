"""``python -m patchloom``."""

import sys

from patchloom.cli import main

sys.exit(main())
