"""The quantile of a rolling buffer of norms from earlier steps (Merad and Gaïffas). Not private."""

from dataclasses import KW_ONLY, dataclass

import numpy as np

from qclip import _validate as check
from qclip._validate import Floats
from qclip.schedules import Schedule
from qclip.thresholds._motion import check_range, level
from qclip.thresholds.exact_quantile import raw_quantile, raw_unclipped
from qclip.thresholds.threshold import Answer, Conditions, Grid, Question, RawAccess, Threshold, check_ahead


@dataclass(frozen=True)
class RollingQuantile(Threshold[Grid]):
    """Clip each group at the ``p``-quantile of a buffer of gradient norms. The run's epsilon is infinite.

    The state is the buffer: the last ``window`` norms of past steps for each group. The norms of the step itself (of
    its first physical batch) are read only while the buffer is empty. A gradient that is not finite has the largest
    norm.

    Args:
        p: Fraction of examples left unclipped, a number or a schedule.
        window: Number of norms to keep; more is steadier and slower.
        initial: Tau where there are no norms at all.
        tau_min: Lower bound of tau.
        tau_max: Upper bound of tau.
    """

    p: Schedule | float
    window: int = 1000
    _: KW_ONLY
    initial: float = 0.1
    tau_min: float = 1e-6
    tau_max: float = 1e6

    def __post_init__(self) -> None:
        level(self.p, 0)
        check.count("window", self.window, "it is the number of norms to keep")
        check_range(self.initial, self.tau_min, self.tau_max)

    @property
    def raw_access(self) -> RawAccess:
        """The raw norms of the step's first physical batch, and those of earlier steps."""
        return "physical_batch"

    @property
    def noise_share(self) -> float:
        """0: nothing is counted."""
        return 0.0

    def check(self, conditions: Conditions) -> None:
        """Refuse a schedule that leaves (0, 1)."""
        check_ahead(lambda step: level(self.p, step), conditions.num_steps)

    def start(self, num_groups: int) -> Grid:
        """Return an empty buffer for each group."""
        return ((),) * num_groups

    def clip_norms(self, state: Grid, step: int, raw_norms: Floats | None = None) -> tuple[float, ...]:
        """Return the quantile of the buffer, or of ``raw_norms`` while the buffer is empty."""
        buffer = np.array(state).T if state[0] else raw_norms
        if buffer is None or len(buffer) == 0:
            return (float(self.initial),) * len(state)
        return raw_quantile(buffer, level(self.p, step), self.tau_min, self.tau_max)

    def ask(self, state: Grid, step: int) -> Question:
        """Return an empty question: the raw norms are enough."""
        return Question()

    def unclipped(self, state: Grid, step: int, answer: Answer) -> tuple[float, ...]:
        """Return the raw fraction of the batch; empty for a batch without examples."""
        clip_norms = tuple(answer.clip_norms) or self.clip_norms(state, step, answer.raw_norms)
        return raw_unclipped(answer.raw_norms, clip_norms)

    def update(self, state: Grid, step: int, answer: Answer) -> Grid:
        """Return the buffer with the step's norms at its end."""
        if answer.raw_norms is None:
            return state
        columns = np.asarray(answer.raw_norms, dtype=np.float64).T.tolist()
        return tuple((*old, *new)[-self.window :] for old, new in zip(state, columns, strict=True))
