"""A quantile tracked by free counts alone, in the slack of unclipped examples."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import TypedDict

from qclip import _validate as check
from qclip._validate import Floats
from qclip.schedules import Schedule
from qclip.thresholds._motion import (
    NORMAL,
    RESTART,
    check_range,
    clamp,
    facts,
    level,
    moved,
    plausible,
    pursue,
    usual_slope,
)
from qclip.thresholds.threshold import Answer, Conditions, Counted, Question, RawAccess, Slack, Threshold, check_ahead

INNER_RADIUS = 0.8
MEMORY = 0.03
"""Rate at which the average fractions forget; they start as plain means."""


class SlackGroup(TypedDict):
    """The state of a group."""

    tau: float
    velocity: float
    inner: float
    """The average fraction of norms within 0.8 tau."""
    outer: float
    """The average fraction of norms within outer_radius tau."""
    seen: int
    """The number of steps in the averages."""


State = tuple[SlackGroup, ...]
"""One entry per group."""


@dataclass(frozen=True)
class SlackQuantile(Threshold[State]):
    """Clip each group near the ``p``-quantile of its own gradient norms, at no privacy cost.

    - Two counts below tau are released in the slack of unclipped examples (docs/theory.md, section 11), for free.
    - Their averages give the slope of the distribution function and the fraction between the outer radius and tau, as
      if the log norms were normal there. On other distributions the fraction is off by up to about 0.01.
    - It needs large batches or little noise, and `check` refuses other runs. `PrivateQuantile` needs neither, for 1 %
      of noise.

    Args:
        p: Fraction of examples left unclipped, a number or a schedule.
        initial: Tau at the first step. It crosses a factor of 100 in 15 to 26 steps.
        outer_radius: Radius of the outer count, relative to tau. Nearer to 1 there is less to extrapolate, and more
            noise: 0.98 instead of 0.95 reduces the error from 0.01 to 0.004, and suits batch sizes over 256 times the
            noise multiplier.
        tau_min: Lower bound of tau.
        tau_max: Upper bound of tau.
    """

    p: Schedule | float
    _: KW_ONLY
    initial: float = 0.1
    outer_radius: float = 0.95
    tau_min: float = 1e-6
    tau_max: float = 1e6

    def __post_init__(self) -> None:
        level(self.p, 0)
        check.between("outer_radius", self.outer_radius, INNER_RADIUS, 0.999, "0.95, or 0.98 where noise is small")
        check_range(self.initial, self.tau_min, self.tau_max)

    @property
    def raw_access(self) -> RawAccess:
        """None: tau depends on noisy counts only."""
        return "none"

    @property
    def noise_share(self) -> float:
        """0: the slack is free."""
        return 0.0

    def check(self, conditions: Conditions) -> None:
        """Refuse a schedule that leaves (0, 1), and batches too small for the noise.

        The standard deviation of the outer fraction (noise and sampling, in the group where it is largest) may be up to
        0.2 sqrt(p (1 - p)) per step: 0.1 at p = 0.5, 0.06 at p = 0.9.
        """
        B = conditions.batch_size
        noise = float(max(conditions.group_multipliers)) / math.sqrt(1 - self.outer_radius**2) / B

        def refuse_noise(step: int) -> float:
            p = level(self.p, step)
            std, most = math.hypot(math.sqrt(p / B), noise), 0.2 * math.sqrt(p * (1 - p))
            if std > most:
                raise check.Refusal(
                    f"the free count has a standard deviation of {std:.3f}, above {most:.2g} ({facts(conditions, p)}); "
                    "take a larger batch, PrivateQuantile, fewer groups, or p nearer 0.5"
                )
            return p

        check_ahead(refuse_noise, conditions.num_steps)

    def start(self, num_groups: int) -> State:
        """Return the initial tau of each group, at rest."""
        group = SlackGroup(tau=float(self.initial), velocity=0.0, inner=0.0, outer=0.0, seen=0)
        return tuple(group.copy() for _ in range(num_groups))

    def clip_norms(self, state: State, step: int, raw_norms: Floats | None = None) -> tuple[float, ...]:
        """Return the tau of each group."""
        return tuple(group["tau"] for group in state)

    def ask(self, state: State, step: int) -> Question:
        """Count the norms within two radii below tau, for free."""
        taus = self.clip_norms(state, step)
        return Question(slack=Slack(tuple((INNER_RADIUS * tau, self.outer_radius * tau) for tau in taus)))

    def unclipped(self, state: State, step: int, answer: Answer) -> tuple[float, ...]:
        """Return the fraction counted within the outer radius plus the extrapolated fraction above it."""
        counted = zip(self._averaged(state, answer), answer.noisy_within, strict=True)
        return tuple(outer + self._above(group) for group, (_, outer) in counted)

    def counted(self, state: State, step: int, answer: Answer) -> tuple[Counted, ...]:
        """Return the fraction beyond the outer radius: at least that beyond tau, and counted without extrapolation."""
        outer = zip(answer.noisy_within, answer.within_std, strict=True)
        return tuple(Counted(1 - within, std, reach=1.0) for (_, within), (_, std) in outer)

    def update(self, state: State, step: int, answer: Answer) -> State:
        """Move each group's tau towards its quantile."""
        p = level(self.p, step)
        stds = (math.hypot(std, math.sqrt(p / answer.batch_size)) for _, std in answer.within_std)
        readings = zip(self._averaged(state, answer), self.unclipped(state, step, answer), stds, strict=True)
        return tuple(self._next(group, p, fraction, std) for group, fraction, std in readings)

    def _averaged(self, state: State, answer: Answer) -> list[SlackGroup]:
        """Return the state with this step's counts in its averages."""
        sampling = 1 / math.sqrt(answer.batch_size)
        averaged = []
        for group, fractions, stds in zip(state, answer.noisy_within, answer.within_std, strict=True):
            inner, outer = (plausible(*pair) for pair in zip(fractions, (std + sampling for std in stds), strict=True))
            seen = group["seen"] + 1
            rate = max(MEMORY, 1 / seen)
            inner = group["inner"] + rate * (inner - group["inner"])
            outer = group["outer"] + rate * (outer - group["outer"])
            averaged.append(
                SlackGroup(tau=group["tau"], velocity=group["velocity"], inner=inner, outer=outer, seen=seen)
            )
        return averaged

    def _above(self, group: SlackGroup) -> float:
        """Return the fraction of norms between the outer radius and tau, if log norms are normal there."""
        inner, outer = (NORMAL.inv_cdf(clamp(group[key], 0.02, 0.98)) for key in ("inner", "outer"))
        steps = math.log(1 / self.outer_radius) / math.log(self.outer_radius / INNER_RADIUS)
        return max(0.0, NORMAL.cdf(outer + (outer - inner) * steps) - group["outer"])

    def _next(self, group: SlackGroup, p: float, fraction: float, std: float) -> SlackGroup:
        rise = group["outer"] + self._above(group) - group["inner"]
        slope = max(rise / math.log(1 / INNER_RADIUS), usual_slope(p) / 4)
        error = plausible(fraction, std) - p
        change, velocity, lost = pursue(group["velocity"], error, slope, std, p, group["seen"])
        tau = moved(group["tau"], change, self.tau_min, self.tau_max)
        seen = min(group["seen"], RESTART) if lost else group["seen"]
        return SlackGroup(tau=tau, velocity=velocity, inner=group["inner"], outer=group["outer"], seen=seen)
