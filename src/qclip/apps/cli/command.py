"""The parser of the command line, and what happens to the errors of its subcommands."""

from collections.abc import Sequence
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape

from qclip.apps.cli.audit import AuditCommand
from qclip.apps.cli.bench import BenchCommand
from qclip.apps.cli.experiment import ExperimentCommand
from qclip.apps.cli.plan import PlanCommand
from qclip.apps.cli.predict import PredictCommand
from qclip.apps.cli.report import ReportCommand
from qclip.apps.cli.reproduce import ReproduceCommand
from qclip.apps.cli.train import TrainCommand

Command = (
    Annotated[TrainCommand, tyro.conf.subcommand("train")]
    | Annotated[PredictCommand, tyro.conf.subcommand("predict")]
    | Annotated[ReproduceCommand, tyro.conf.subcommand("reproduce")]
    | Annotated[PlanCommand, tyro.conf.subcommand("plan")]
    | Annotated[ReportCommand, tyro.conf.subcommand("report")]
    | Annotated[ExperimentCommand, tyro.conf.subcommand("experiment")]
    | Annotated[AuditCommand, tyro.conf.subcommand("audit")]
    | Annotated[BenchCommand, tyro.conf.subcommand("bench")]
)


_APPENDED = ("--case", "--mode", "--only")
"""Options whose values add up."""


def run(arguments: Sequence[str]) -> int:
    """Parse the arguments, run the subcommand and return the exit status."""
    if (repeated := _repeated(arguments)) is not None:
        message = f"{repeated} was given more than once; give all its values after one {repeated}"
        Console(stderr=True).print(f"[red]error:[/] {escape(message)}", highlight=False)
        return 2
    command = tyro.cli(
        Command,
        args=arguments,
        prog="qclip",
        description="Private training, clipped at a quantile of gradient norms; plans, reports and the paper's claims.",
        config=(tyro.conf.OmitArgPrefixes,),
    )
    errors = Console(stderr=True)
    try:
        return command.run(Console())
    except (ValueError, OSError, ModuleNotFoundError) as error:
        errors.print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        return 2
    except KeyboardInterrupt:
        errors.print("stopped; finished results are in the output folder")
        return 130


def _repeated(arguments: Sequence[str]) -> str | None:
    """Return an option that was given twice: of its values, the parser would keep the last ones in silence."""
    options = [word.partition("=")[0].replace("_", "-") for word in arguments if word.startswith("--")]
    single = [option for option in options if option not in _APPENDED]
    return next((option for k, option in enumerate(single) if option in single[:k]), None)
