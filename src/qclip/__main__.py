"""``python -m qclip``."""

import sys

from qclip.cli import main

sys.exit(main())
