"""The same threshold whatever the data: given, or scheduled."""

from dataclasses import dataclass

from qclip import _validate as check
from qclip._validate import Floats
from qclip.schedules import Schedule
from qclip.thresholds.threshold import Answer, Conditions, Question, RawAccess, Threshold, at, check_ahead


@dataclass(frozen=True)
class Constant(Threshold[int]):
    """Clip every group at ``tau``: a number, or a schedule (a function of the step). The state is the number of groups.

    >>> Constant(2.0).clip_norms(3, step=0)
    (2.0, 2.0, 2.0)
    """

    tau: Schedule | float

    def __post_init__(self) -> None:
        self._tau(0)  # refuses a bad first value before any work is done

    @property
    def raw_access(self) -> RawAccess:
        """It never looks at the data."""
        return "none"

    @property
    def noise_share(self) -> float:
        """Nothing is asked, nothing is paid."""
        return 0.0

    def check(self, conditions: Conditions) -> None:
        """Refuse a schedule that leaves the positive numbers."""
        check_ahead(self._tau, conditions.num_steps)

    def start(self, num_groups: int) -> int:
        """The number of groups."""
        return num_groups

    def clip_norms(self, state: int, step: int, raw_norms: Floats | None = None) -> tuple[float, ...]:
        """The given value, once for each group."""
        return (self._tau(step),) * state

    def ask(self, state: int, step: int) -> Question:
        """Nothing."""
        return Question()

    def unclipped(self, state: int, step: int, answer: Answer) -> tuple[float, ...]:
        """It does not ask."""
        return ()

    def update(self, state: int, step: int, answer: Answer) -> int:
        """Unchanged."""
        return state

    def _tau(self, step: int) -> float:
        return check.positive("tau", at(self.tau, step), "it is the largest norm a clipped gradient may have")
