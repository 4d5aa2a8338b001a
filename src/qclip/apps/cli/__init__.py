"""The ``qclip`` command: one module per subcommand."""

import sys
from collections.abc import Sequence

from qclip import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status; 2 where the packages of the command line are missing.

    Args:
        arguments: The words after ``qclip``; those of the process when None.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given == ["--version"]:
        print(f"qclip {__version__}")
        return 0
    try:
        from qclip.apps.cli.command import run
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in ("rich", "tyro"):
            raise
        print(f"error: {missing.name} is not installed; pip install 'qclip[cli]'", file=sys.stderr)
        return 2
    return run(given)
