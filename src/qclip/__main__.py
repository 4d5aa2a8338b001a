"""``python -m qclip``."""

import sys

from qclip.apps.cli import main

sys.exit(main())
