"""A threshold that does not depend on the data: a number, or a schedule."""

from dataclasses import dataclass

from qclip import _validate as check
from qclip._validate import Floats
from qclip.schedules import Schedule
from qclip.thresholds.threshold import Answer, Conditions, Question, RawAccess, Threshold, at, check_ahead


@dataclass(frozen=True)
class Constant(Threshold[int]):
    """Clip every group at ``tau``. The state is the number of groups.

    >>> Constant(2.0).clip_norms(3, step=0)
    (2.0, 2.0, 2.0)

    Args:
        tau: The threshold, a number or a schedule.
    """

    tau: Schedule | float

    def __post_init__(self) -> None:
        self._tau(0)  # refuses a bad first value before any work is done

    @property
    def raw_access(self) -> RawAccess:
        """None: tau does not depend on the data."""
        return "none"

    @property
    def noise_share(self) -> float:
        """0: nothing is counted."""
        return 0.0

    def check(self, conditions: Conditions) -> None:
        """Refuse a schedule that is not positive."""
        check_ahead(self._tau, conditions.num_steps)

    def start(self, num_groups: int) -> int:
        """Return the number of groups."""
        return num_groups

    def clip_norms(self, state: int, step: int, raw_norms: Floats | None = None) -> tuple[float, ...]:
        """Return tau, once for each group."""
        return (self._tau(step),) * state

    def ask(self, state: int, step: int) -> Question:
        """Return an empty question."""
        return Question()

    def unclipped(self, state: int, step: int, answer: Answer) -> tuple[float, ...]:
        """Return nothing: the fraction is not measured."""
        return ()

    def update(self, state: int, step: int, answer: Answer) -> int:
        """Return the state unchanged."""
        return state

    def _tau(self, step: int) -> float:
        return check.positive("tau", at(self.tau, step), "it is the largest norm a clipped gradient may have")
