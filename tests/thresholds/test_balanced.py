"""The balanced threshold: it finds the minimum of its objective, follows it, and stays where noise says nothing.

Simulations vectorise over runs, which are the groups of one state. Norms are not drawn one by one: under Poisson
sampling the number in each bin is a Poisson variable. Error rates are from 80 runs of each setting.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from qclip import accounting
from qclip.thresholds import Answer, BalancedThreshold, Conditions, Count

GRID = np.exp(np.linspace(-10, 16, 20_001))


@dataclass(frozen=True)
class RareClass:
    """Short norms, and a few about 30 times as long."""

    fraction: float

    def cdf(self, x):
        return (1 - self.fraction) * stats.lognorm(0.5).cdf(x) + self.fraction * stats.lognorm(0.2, scale=30).cdf(x)


LAWS = {
    "log-normal": stats.lognorm(1.0),
    "Pareto": stats.pareto(1.5),
    "narrow log-normal": stats.lognorm(0.25),
    "1 % long": RareClass(0.01),
    "2 % long": RareClass(0.02),
}
LOG_NORMAL = LAWS["log-normal"]


def weighted(noise_power):
    return min(noise_power * (0.1 + 0.9 * noise_power / (noise_power + 0.1)), 0.3)


@dataclass(frozen=True)
class Setting:
    """The public constants of a run."""

    batch_size: int
    noise_multiplier: float
    dim: int

    @property
    def split(self):
        conditions = Conditions(self.batch_size, 1000, self.noise_multiplier, (self.dim,))
        return accounting.split(self.noise_multiplier, BalancedThreshold().share(conditions))

    @property
    def noise_power(self):
        return self.dim * (self.split.gradient / self.batch_size) ** 2

    @property
    def weighted_power(self):
        """As the class documents it: weighted by the noise itself, not below the noise on a fraction, at most 0.3."""
        fraction_noise = self.split.counts * math.sqrt(20) / 2 / self.batch_size
        return max(weighted(self.noise_power), min(fraction_noise**2, 0.3), 1e-5)


USUAL, LITTLE_NOISE, MUCH_NOISE = Setting(256, 1.0, 10_000), Setting(1024, 1.0, 2000), Setting(256, 4.0, 10_000)
SETTINGS = {"usual": USUAL, "little noise": LITTLE_NOISE, "much noise": MUCH_NOISE}


def mean_excess(law):
    """R on the grid: the integral of the fraction beyond."""
    beyond = 1 - law.cdf(GRID)
    pieces = np.diff(GRID) * (beyond[1:] + beyond[:-1]) / 2
    return np.append(np.cumsum(pieces[::-1])[::-1], 0.0)


def cost(law, power):
    return power * GRID**2 + mean_excess(law) ** 2


def best(law, power):
    return float(GRID[np.argmin(cost(law, power))])


def simulate(law, setting, starts, steps, *, path=None, seed=0):
    """The taus, [steps, runs], of runs that begin at these values; log norms are moved by ``path``."""
    B, split, rng, runs = setting.batch_size, setting.split, np.random.default_rng(seed), len(starts)
    threshold = BalancedThreshold()
    state = tuple(group for start in starts for group in replace(threshold, initial=start).start(1))
    public: dict[str, Any] = {"noise_power": (setting.noise_power,) * runs}
    taus = np.empty((steps, runs))
    for step in range(steps):
        taus[step] = threshold.clip_norms(state, step)
        count = threshold.ask(state, step).count
        std = split.counts * Count(count.radii[:1], count.centre).l2_bound / B
        scale = 1.0 if path is None else math.exp(path[step])
        fractions = np.diff(law.cdf(np.array(count.radii) / scale), axis=1, prepend=0).clip(0)  # but for rounding
        counts = rng.poisson(B * fractions)
        centred = counts - count.centre * counts.sum(1, keepdims=True)
        bins = centred / B + count.centre + std * rng.standard_normal(counts.shape)
        answer = Answer(tuple(map(tuple, bins.tolist())), bins_std=std, batch_size=B, **public)
        state = threshold.update(state, step, answer)
    return taus


def exact(threshold, state, law, *, noise_power=0.0, std=0.0):
    """The answer of an infinite batch without noise."""
    (radii,) = threshold.ask(state, 0).count.radii
    bins = tuple(np.diff(law.cdf(np.array(radii)), prepend=0).tolist())
    return Answer((bins,), bins_std=std, noise_power=(noise_power,))


def settled(law, steps=150, threshold=BalancedThreshold(), **public):  # noqa: B008 - immutable
    state = threshold.start(1)
    for step in range(steps):
        state = threshold.update(state, step, exact(threshold, state, law, **public))
    return threshold.clip_norms(state, steps)[0]


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_it_finds_the_minimum_of_its_objective_from_both_sides(law, setting):
    # Over 80 runs the mean of log(tau / best) lies between -0.31 and 0.10, with a standard deviation of at most 0.21
    # between runs; the mean cost is at most 1.12 times the least, with 0.17 between runs. For the mean of 8 runs, all
    # bounds are more than 4 standard deviations away.
    power = setting.weighted_power
    target = best(law, power)
    taus = simulate(law, setting, [0.01 * target] * 4 + [100 * target] * 4, 200)[100:]
    distance = np.log(taus / target)
    assert -0.5 < distance.mean() < 0.3
    assert abs(distance.mean(0)).max() < 1.2
    costs = np.interp(taus, GRID, cost(law, power)) / cost(law, power).min()
    assert costs.mean() < 1.4


@pytest.mark.parametrize(
    ("law", "noise_power"),
    [(LOG_NORMAL, 0.1), (LOG_NORMAL, 0.003), (LAWS["Pareto"], 0.5), (RareClass(0.02), 0.01)],
    ids=["usual", "little noise", "heavy tail", "rare class"],
)
def test_without_sampling_and_noise_on_the_counts_it_stands_at_the_minimum(law, noise_power):
    """What is left are straight lines between the radii, and the tail beyond the last one."""
    found = settled(law, noise_power=noise_power)
    assert found == pytest.approx(best(law, weighted(noise_power)), rel=0.12)


def test_more_noise_lowers_it():
    by_noise = [settled(LOG_NORMAL, noise_power=power) for power in (1e-4, 1e-3, 1e-2, 0.1, 1.0)]
    assert all(np.diff(by_noise) < -0.1)


def test_a_rare_class_keeps_it_up():
    """Where there is little noise, its bias is worth more."""
    without = settled(stats.lognorm(0.5), noise_power=0.003)
    assert settled(RareClass(0.02), noise_power=0.003) > 4 * without


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_without_noise_it_clips_next_to_nothing_and_does_not_run_away(law):
    """The size of a batch varies all the same; it must not be read as norms beyond the longest."""
    target = best(law, 1e-5)
    taus = simulate(law, Setting(256, 0.0, 1000), [0.1] * 6, 250)[50:]
    # Measured in 30 runs: at most 0.6 in log tau, for Pareto norms; 0.2 for the others.
    assert abs(np.log(taus / target)).max() < 1
    assert np.interp(target, GRID, mean_excess(law)) < 0.005 * target


@pytest.mark.parametrize("batch_size", [64, 128, 300])
def test_a_batch_of_another_size_has_no_longer_norms(batch_size):
    """All norms are 1; 256 examples were expected."""
    threshold = BalancedThreshold(initial=2.0)
    state = threshold.start(1)
    (radii,) = threshold.ask(state, 0).count.radii
    bins = tuple((np.histogram(np.ones(batch_size), (0, *radii))[0] / 256).tolist())
    answer = Answer((bins,), batch_size=256, noise_power=(0.0,))
    assert threshold.clipped_length(threshold.update(state, 0, answer)) == (0.0,)
    assert threshold.unclipped(state, 0, answer) == (1.0,)


@pytest.mark.parametrize("std", [0.001, 0.01, 0.1])
def test_the_noise_of_the_whole_sum_is_removed_as_far_as_it_is_noise(std):
    """Fractions beyond tau vary least: by no more than those of bins that are added up, or made to add up to 1."""
    threshold, rng, B, runs = BalancedThreshold(initial=5.0), np.random.default_rng(0), 256, 4000
    state = threshold.start(runs)
    radii = np.array(threshold.ask(state, 0).count.radii)
    within = rng.poisson(B * np.diff((radii[0] >= 2).astype(float), prepend=0), radii.shape) / B  # all norms are 2
    bins = within + std * rng.standard_normal(radii.shape)
    told = threshold.unclipped(state, 0, Answer(tuple(map(tuple, bins.tolist())), bins_std=std, batch_size=B))
    beyond = bins[:, radii[0] > 5.0]
    plain, to_one = beyond.sum(1), beyond.sum(1) - (bins.sum(1) - 1) * beyond.shape[1] / 20
    # 4000 draws know a standard deviation up to 1.1 %: 5 % fails less than one time in 1e5.
    assert np.std(told) < 1.05 * min(plain.std(), to_one.std())
    assert np.mean(told) == pytest.approx(1, abs=5 * np.std(told) / math.sqrt(runs))


def test_where_all_is_noise_it_stays_at_three_quarters_of_the_mean_norm():
    for law in (LAWS["narrow log-normal"], stats.lognorm(0.01)):
        assert settled(law, noise_power=1e4) == pytest.approx(0.77 * mean_excess(law)[0], rel=0.06)
        assert settled(law, 1000, noise_power=1e4) == pytest.approx(settled(law, noise_power=1e4), rel=1e-3)
    # The noise on a fraction is the whole batch: log tau has a standard deviation of 0.3 around log 0.5 of the mean,
    # and the mean of 8 runs one of 0.08. In 64 runs tau was between 0.24 and 2.7 of the mean.
    setting = Setting(64, 4.0, 10**7)
    assert setting.noise_power > 1e4
    taus = simulate(LOG_NORMAL, setting, [1.0] * 8, 400)[100:] / mean_excess(LOG_NORMAL)[0]
    assert 0.35 < np.exp(np.log(taus).mean()) < 0.75
    assert taus.min() > 0.1
    assert taus.max() < 5


def test_norms_that_drift_are_followed():
    """By 1 % a step, 100 steps up and 100 down."""
    path = np.cumsum(np.where(np.arange(300) // 100 % 2 == 0, 0.01, -0.01))
    for setting in SETTINGS.values():
        target = best(LOG_NORMAL, setting.weighted_power)
        taus = simulate(LOG_NORMAL, setting, [target] * 4, 300, path=path)[50:]
        distance = np.log(taus / target) - path[50:, None]
        # Measured in 16 runs: 0.26, 0.32 and 0.35, at most 0.45 in one run; the lag at the ends of a drift is 0.5.
        assert np.sqrt(np.square(distance).mean()) < 0.45


@pytest.mark.parametrize(
    ("jump", "setting", "steps"),
    [(100.0, USUAL, 60), (0.01, USUAL, 120), (100.0, LITTLE_NOISE, 50), (0.01, LITTLE_NOISE, 340)],
    ids=["up", "down", "up, little noise", "down, little noise"],
)
def test_norms_that_jump_are_found_again(jump, setting, steps):
    """What was long before a jump down has to be forgotten first, which takes longest where little noise is added."""
    target = best(LOG_NORMAL, setting.weighted_power)
    path = np.where(np.arange(60 + steps + 20) < 60, 0.0, math.log(jump))
    taus = simulate(LOG_NORMAL, setting, [target] * 4, len(path), path=path)
    # 16 runs of 16 were within 0.5 in log tau after 35, 86 and 36 steps, and 24 of 24 after 301.
    assert abs(np.log(taus[60 + steps :] / target) - math.log(jump)).max() < 0.7


@pytest.mark.parametrize(
    ("law", "tau"),
    [(LOG_NORMAL, 0.3), (LOG_NORMAL, 1.0), (LOG_NORMAL, 3.0), (RareClass(0.02), 1.5), (RareClass(0.02), 15.0)],
    ids=lambda value: str(value) if isinstance(value, float) else "",
)
def test_it_tells_the_length_that_clipping_takes_away(law, tau):
    threshold = BalancedThreshold(initial=tau)
    state = threshold.start(1)
    answer = exact(threshold, state, law)
    (length,) = threshold.clipped_length(threshold.update(state, 0, answer))
    true = float(np.interp(tau, GRID, mean_excess(law))) / tau
    # Straight lines between radii that differ by 49 % are off by up to a tenth of the length.
    assert length == pytest.approx(true, rel=0.12)
    assert threshold.unclipped(state, 0, answer) == pytest.approx((law.cdf(tau),), abs=1e-9)


def test_norms_out_of_reach_count_as_so_long():
    """Eight places above tau, a factor of 25, and one place more."""
    threshold = BalancedThreshold(initial=1.0)
    state = threshold.start(1)
    (length,) = threshold.clipped_length(
        threshold.update(state, 0, exact(threshold, state, stats.lognorm(0.1, scale=1e6)))
    )
    assert length == pytest.approx(math.expm1(0.4 * 9), rel=1e-6)


def test_noise_alone_takes_nothing_away():
    """Every norm is within tau; fractions beyond it are noise, of which one in six counts at each radius."""
    threshold, rng, std = BalancedThreshold(initial=10.0), np.random.default_rng(0), 0.002
    state = threshold.start(100)
    radii = np.array(threshold.ask(state, 0).count.radii)
    lengths = []
    for step in range(30):
        bins = np.diff(stats.lognorm(0.2).cdf(radii), axis=1, prepend=0) + std * rng.standard_normal(radii.shape)
        answer = Answer(tuple(map(tuple, bins.tolist())), bins_std=std, noise_power=(0.01,) * 100)
        updated = threshold.update(state, step, answer)
        lengths.append(threshold.clipped_length(updated))
        # Only the histogram moves, so that all 100 runs keep one tau.
        state = tuple(
            group | {"tau": 10.0, "lowest": before["lowest"]} for group, before in zip(updated, state, strict=True)
        )
    assert np.mean(lengths[0]) > 3 * np.mean(lengths[-1])
    assert np.mean(lengths[-1]) < 0.002


def test_a_model_of_six_parameters_does_not_run_away():
    setting = Setting(500, 1.0, 6)
    for law in (LOG_NORMAL, LAWS["narrow log-normal"], RareClass(0.01)):
        target = best(law, setting.weighted_power)
        distance = abs(np.log(simulate(law, setting, [0.1] * 40, 80)[20:] / target))
        # In 100 runs at most 1.0 for the log-normals and 1.6 with 1 % of long norms, whose class is missed at first.
        assert distance.max() < math.log(8)
        assert np.median(distance) < 0.5


def noise_on_a_fraction(threshold, conditions):
    counts = accounting.split(conditions.noise_multiplier, threshold.share(conditions)).counts
    groups = len(conditions.dims)
    bound = threshold.ask(threshold.start(groups), 0).count.l2_bound
    return counts * bound * math.sqrt(20) / 2 / conditions.batch_size


def accepted(threshold, conditions):
    try:
        threshold.check(conditions)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("dim", [6, 600, 10**6])
@pytest.mark.parametrize("groups", [1, 4, 30])
def test_the_histogram_pays_what_it_needs(dim, groups):
    threshold = BalancedThreshold()
    given = [Conditions(B, 100, 1.0, (dim,) * groups) for B in (*range(2, 80), 256, 1024, 10**5)]
    runs = [conditions for conditions in given if accepted(threshold, conditions)]
    assert runs == given[-len(runs) :]  # all batches from some size on
    shares = [threshold.share(conditions) for conditions in runs]
    usual = max(0.01, min(0.1, 50 / (dim * groups)))
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == usual
    assert max(shares) <= 0.25
    assert all(noise_on_a_fraction(threshold, conditions) <= 1 + 1e-6 for conditions in runs)
    needed = [conditions for conditions in runs if threshold.share(conditions) > usual]
    assert needed  # some pay more than usual, and exactly what brings the noise down to the batch
    assert all(noise_on_a_fraction(threshold, conditions) == pytest.approx(1, rel=1e-6) for conditions in needed)
    for conditions in given[: -len(runs)]:
        dearest = replace(threshold, noise_share=0.25)
        assert noise_on_a_fraction(dearest, conditions) > 1


def test_the_share_grows_with_noise_and_groups():
    threshold = BalancedThreshold()
    by_noise = [threshold.share(Conditions(64, 100, z, (10**6,))) for z in (0.0, 1.0, 4.0, 10.0, 14.0)]
    assert by_noise[:3] == [0.01] * 3
    assert 0.01 < by_noise[3] < by_noise[4] < 0.25
    by_groups = [threshold.share(Conditions(64, 100, 4.0, (10**5,) * groups)) for groups in (1, 8, 12, 14)]
    assert by_groups == sorted(by_groups)
    assert by_groups[0] < by_groups[-1]
    assert replace(threshold, noise_share=0.5).share(Conditions(64, 100, 14.0, (10**6,))) == 0.5


def test_noise_that_drowns_it_is_refused():
    with pytest.raises(
        ValueError, match=r"noise on the unclipped fraction .* \(batch size 3, noise multiplier 1, groups 1\); "
    ):
        BalancedThreshold().check(Conditions(3, 100, 1.0, (10_000,)))
    BalancedThreshold().check(Conditions(4, 100, 1.0, (10_000,)))
    BalancedThreshold().check(Conditions(1, 100, 0.0, (10_000,)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noise_share": 0}, "noise_share = 0 must be > 0"),
        ({"tau_max": 1e25}, r"tau_max = 1e\+25 must be in"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        BalancedThreshold(**arguments)


def test_every_finite_norm_is_in_a_bin_and_tau_is_a_radius():
    threshold = BalancedThreshold(initial=0.123)
    count = threshold.ask(threshold.start(2), 0).count
    assert len(count.radii[0]) == 20
    assert 0.123 in count.radii[0]
    assert count.radii[0][-1] == 1e30
    assert count.centre == 0
    assert count.l2_bound == pytest.approx(math.sqrt(2))


def test_groups_do_not_know_of_each_other():
    threshold = BalancedThreshold()
    (left,), (right,) = (replace(threshold, initial=tau).start(1) for tau in (0.5, 50.0))
    answers = [
        exact(threshold, (group,), LOG_NORMAL, noise_power=power) for group, power in ((left, 0.1), (right, 1e-3))
    ]
    both = Answer(tuple(answer.noisy_bins[0] for answer in answers), noise_power=(0.1, 1e-3))
    alone = [threshold.update((group,), 0, answer)[0] for group, answer in zip((left, right), answers, strict=True)]
    assert threshold.update((left, right), 0, both) == tuple(alone)
