"""The clipped fractions that certificates read: unbiased, with the noise and the reach that they state."""

import numpy as np
import pytest

from qclip.thresholds import (
    Answer,
    BalancedThreshold,
    Constant,
    ExactQuantile,
    GeometricQuantile,
    HistogramQuantile,
    PrivateQuantile,
    RollingQuantile,
    SlackQuantile,
)

STD, B = 0.02, 50
COUNTING = [
    BalancedThreshold(initial=1.0), GeometricQuantile(0.7, initial=1.0),
    GeometricQuantile(0.7, initial=1.0, centre=0.2),
    HistogramQuantile(0.7, initial=1.0), PrivateQuantile(0.7, initial=1.0), SlackQuantile(0.7, initial=1.0),
]  # fmt: skip


def ask(threshold, norms, bins_std=STD, noise=None):
    """The counted fraction after a step with these examples, as a run would answer it."""
    state = threshold.start(1)
    question, bins, within, within_std = threshold.ask(state, 0), (), (), ()
    if question.count is not None:
        (radii,), centre = question.count.radii, question.count.centre
        counts = np.histogram(norms, (0.0, *radii))[0] - centre * len(norms)
        bins = (tuple((counts / B + centre + (0.0 if noise is None else noise[: len(counts)])).tolist()),)
    if question.slack is not None:
        shift = 0.0 if noise is None else noise[0]
        within = (tuple(float(np.mean(norms <= r)) * len(norms) / B + shift for r in question.slack.radii[0]),)
        within_std = (tuple(bins_std for _ in question.slack.radii[0]),)
    answer = Answer(bins, within, bins_std=bins_std, within_std=within_std, batch_size=B)
    (found,) = threshold.counted(state, 0, answer)
    return found


def bound_of(threshold, norms):
    """What each norm is counted as, without noise: clipped or not, or the part that the end of its bin loses."""
    if isinstance(threshold, SlackQuantile):
        return norms > 0.95
    if isinstance(threshold, BalancedThreshold | HistogramQuantile):
        (ends,) = threshold.ask(threshold.start(1), 0).count.radii
        return 1 - np.minimum(1, 1.0 / np.array([*ends[:-1], np.inf])[np.searchsorted(ends, norms)])
    return norms > 1.0


@pytest.mark.parametrize("threshold", COUNTING, ids=lambda threshold: type(threshold).__name__)
def test_it_is_unbiased_with_the_stated_noise_and_reach(threshold):
    rng = np.random.default_rng(0)
    population = np.exp(rng.normal(size=400))
    draws = [population[rng.random(400) < B / 400] for _ in range(4000)]
    found = [ask(threshold, norms, noise=rng.normal(scale=STD, size=40)) for norms in draws]
    exact = np.mean(bound_of(threshold, population))
    assert exact >= np.mean(1 - np.minimum(1, 1.0 / population))  # 1 - E min(1, tau/||g||)
    values = np.array([each.clipped for each in found])
    assert abs(values.mean() - exact) < 4.5 * values.std() / len(values) ** 0.5  # 1 in 10^5
    quiet = np.array([ask(threshold, norms).clipped for norms in draws])
    assert (values - quiet).std() == pytest.approx(found[0].noise, rel=0.05)  # 4.5 standard errors
    # One more example, of any norm, moves it by at most the reach.
    norms = draws[0]
    moved = [
        ask(threshold, np.append(norms, new)).clipped - quiet[0] for new in (1e-9, 0.5, 0.97, 1.0001, 3.0, 1e9, 1e25)
    ]
    assert max(map(abs, moved)) * B <= found[0].reach + 1e-9
    assert max(map(abs, moved)) * B >= 0.9 * found[0].reach


def test_the_quantile_of_the_whole_data_is_known():
    answer = Answer(raw_norms=np.array([[1.0], [2.0]]), clip_norms=(1.5,))
    (found,) = ExactQuantile(0.7, over="dataset").counted((1.0,), 0, answer)
    assert (found.clipped, found.noise, found.reach) == (pytest.approx(0.3), 0, 0)


@pytest.mark.parametrize("threshold", [Constant(1.0), ExactQuantile(0.7), RollingQuantile(0.7)])
def test_others_count_nothing(threshold):
    answer = Answer(raw_norms=np.array([[1.0], [2.0]]), clip_norms=(1.5,))
    assert threshold.counted(threshold.start(1), 0, answer) == ()
