"""The same threshold whatever the data: given, or scheduled."""

from dataclasses import dataclass

from qclip import _validate as check
from qclip.schedules import Schedule
from qclip.thresholds.threshold import Count, Threshold, at


@dataclass(frozen=True)
class Constant(Threshold[int]):
    """Clip every group at ``tau``: a number, or a schedule (a function of the step). The state is the number of groups.

    >>> Constant(2.0).clip_norms(3, step=0)
    (2.0, 2.0, 2.0)
    """

    tau: Schedule | float

    def __post_init__(self) -> None:
        self.clip_norms(1, 0)  # refuses a bad first value before any work is done

    @property
    def private(self) -> bool:
        """It never looks at the data."""
        return True

    @property
    def noise_share(self) -> float:
        """Nothing is asked, nothing is paid."""
        return 0.0

    def start(self, num_groups: int) -> int:
        """The number of groups."""
        return num_groups

    def clip_norms(self, state: int, step: int) -> tuple[float, ...]:
        """The given value, once for each group."""
        tau = check.positive("tau", at(self.tau, step), "it is the largest norm a clipped gradient may have")
        return (tau,) * state

    def count(self, state: int, step: int) -> Count | None:
        """Nothing."""
        return None

    def update(self, state: int, step: int, noisy_unclipped: tuple[float, ...]) -> int:
        """Unchanged."""
        return state
