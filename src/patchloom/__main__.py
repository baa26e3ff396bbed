"""``python -m patchloom``."""

import sys

from patchloom.cli import main
from patchloom.system.signals import stop_with_parent

stop_with_parent()
sys.exit(main())
