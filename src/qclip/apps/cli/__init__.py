"""The ``qclip`` command: one file per subcommand."""

import sys
from collections.abc import Sequence
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape

from qclip import __version__
from qclip.apps.cli.bench import Bench
from qclip.apps.cli.experiment import Experiment
from qclip.apps.cli.plan import Plan
from qclip.apps.cli.report import Report
from qclip.apps.cli.reproduce import Reproduce
from qclip.apps.cli.train import Train

Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Reproduce, tyro.conf.subcommand("reproduce")]
    | Annotated[Plan, tyro.conf.subcommand("plan")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Experiment, tyro.conf.subcommand("experiment")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run it; returns the exit status."""
    if list(sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        print(f"qclip {__version__}")
        return 0
    command = tyro.cli(
        Command,
        args=arguments,
        prog="qclip",
        description="Private training, clipped at a quantile of gradient norms; plans, reports, the paper's claims.",
        config=(tyro.conf.OmitArgPrefixes,),
    )
    console = Console()
    try:
        return command.run(console)
    except (ValueError, OSError) as error:
        Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        return 2
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped; what was finished is in the output folder")
        return 130
