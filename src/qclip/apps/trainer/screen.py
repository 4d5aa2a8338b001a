"""The display of a run: a live progress bar on a terminal, a line per epoch everywhere."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Screen:
    """A display of steps and scores.

    The training loss is raw: it is shown on a terminal, and left out where the output may go to a file.

    Args:
        console: Where to print.
        num_steps: Steps planned.
        done: Steps done before.
        epochs: Epochs planned.
    """

    def __init__(self, console: Console, num_steps: int, done: int, epochs: int) -> None:
        self.console = console
        self._num_steps, self._epochs = num_steps, epochs
        self._progress = Progress(
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[values]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._bar = self._progress.add_task("steps", total=num_steps, completed=done, values="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def step(self, line: Mapping[str, Any], raw_loss: float) -> None:
        """Show a step."""
        values = f"{_state(line)}  raw_loss (not private) {raw_loss:.3g}"
        self._progress.update(self._bar, completed=line["step"] + 1, values=values)

    def score(self, line: Mapping[str, Any]) -> None:
        """Show a held-out score."""
        scores = "  ".join(f"{name} {value:.4g}" for name, value in line["held_out"].items())
        place = f"epoch {line['epoch']}/{self._epochs}  step {line['step']}/{self._num_steps}"
        self.console.print(
            f"{place}  held-out {scores}  epsilon {_number(line['epsilon'])}", highlight=False, soft_wrap=True
        )

    def warn(self, text: str) -> None:
        """Show a warning that depends on raw values, on a terminal only."""
        if self.console.is_terminal:
            self.console.print(text, highlight=False)


def _state(line: Mapping[str, Any]) -> str:
    unclipped = line["noisy_unclipped"]
    shown = f"  unclipped {sum(unclipped) / len(unclipped):.2f}" if unclipped else ""
    lost = " (lost)" if line["lost"] else ""
    return f"tau {span(line['tau'])}{lost}{shown}  epsilon {_number(line['epsilon'])}"


def span(values: Sequence[float]) -> str:
    """Format one value, or the range of several.

    >>> span([0.5]), span([0.25, 1.0, 0.5])
    ('0.5', '0.25 to 1')
    """
    low, high = min(values), max(values)
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def _number(epsilon: float | None) -> str:
    return "infinite" if epsilon is None or epsilon == float("inf") else f"{epsilon:.3g}"
