"""The aggregator on a GPU: the sums of a CPU, the noise of the plan, by every path."""

import math

import pytest
import torch

pytest.importorskip("scipy")
pytest.importorskip("dp_accounting")

from federated import rounds
from gpu.device import DEVICE, moved
from qclip.thresholds import Constant

pytestmark = pytest.mark.gpu


def run(path, groups, like, place):
    """The released means and the history of two rounds without noise, odd updates among the others."""
    aggregator = rounds.aggregator(None, groups, like=like, noise_multiplier=0)
    means = []
    for number in range(2):
        updates = [place(rounds.update_of(client, number)) for client in aggregator.sample()]
        if path == "streamed":
            means.append(aggregator.aggregate(updates))
        elif path == "stacked":
            means.append(aggregator.aggregate_stacked(rounds.stacked(updates)))
        else:
            means.append(aggregator.aggregate_answered(rounds.answers_of(aggregator, updates)))
    return means, aggregator.history


@pytest.mark.parametrize("groups", rounds.GROUPS)
@pytest.mark.parametrize("path", ["streamed", "stacked", "answered"])
def test_without_noise_it_is_the_run_of_a_cpu(path, groups):
    """Also for updates that lie on the CPU, as those of remote clients do."""
    expected, history = run(path, groups, rounds.LIKE, lambda update: update)
    for place in (moved, lambda update: update):
        means, found = run(path, groups, moved(rounds.LIKE), place)
        for mean, other in zip(means, expected, strict=True):
            for name, x in mean.items():
                assert x.device.type == DEVICE.type
                torch.testing.assert_close(x.cpu(), other[name], rtol=1e-4, atol=1e-6)
        for record, other in zip(found, history, strict=True):
            assert record.tau == pytest.approx(other.tau, rel=1e-5)


def test_the_noise_is_that_of_the_plan():
    """Over 200,000 coordinates the standard deviation is within 1 %: five standard errors are 0.8 %."""
    like = {"w": torch.zeros(200_000, device=DEVICE)}
    aggregator = rounds.aggregator(Constant(0.5), like=like, noise_multiplier=1.5)
    (noise,) = aggregator.aggregate([]).values()
    assert abs(noise.std().item() / (1.5 * 0.5 / 100) - 1) < 0.01
    assert abs(noise.mean().item()) < 5 * 1.5 * 0.5 / 100 / math.sqrt(200_000)
