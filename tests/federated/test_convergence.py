"""From far off, the threshold finds the median of the clients' norms."""

from dataclasses import replace

import pytest
import torch

from federated import rounds
from qclip.federated.aggregator import MEDIAN
from qclip.thresholds import HistogramQuantile, PrivateQuantile, SlackQuantile

ROUNDS, SEEDS = 20, 20


def tau_after(threshold, initial, seed, *, cohort_size=100):
    """Tau after some rounds of clients whose norms have median 1 and a spread of 0.5 in log, at noise multiplier 1."""
    like = {"w": torch.zeros(50)}
    aggregator = rounds.aggregator(
        replace(threshold, initial=initial),
        like=like, num_clients=10 * cohort_size, cohort_size=cohort_size, rounds=ROUNDS + 1, noise_multiplier=1.0,
        seed=seed,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1000 + seed)
    for _ in range(ROUNDS):
        drawn = len(aggregator.sample())
        direction = torch.randn(drawn, 50, generator=generator)
        norms = (0.5 * torch.randn(drawn, 1, generator=generator)).exp()
        aggregator.aggregate_stacked({"w": direction / direction.norm(dim=1, keepdim=True) * norms})
    return aggregator.clip_norms[0]


def test_the_median_is_found_from_far_off():
    """Three seeds of the slow test below; all of its 40 runs were within 15 %."""
    for seed in range(3):
        for initial in (0.01, 100.0):
            assert abs(tau_after(MEDIAN, initial, seed) - 1) <= 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    "threshold",
    [MEDIAN, PrivateQuantile(0.5), HistogramQuantile(0.5, noise_share=0.05), SlackQuantile(0.5)],
    ids=["default", "PrivateQuantile", "HistogramQuantile", "SlackQuantile"],
)
@pytest.mark.parametrize("initial", [0.01, 100.0])
def test_within_a_fifth_after_twenty_rounds_in_eighteen_of_twenty_seeds(threshold, initial):
    taus = [tau_after(threshold, initial, seed) for seed in range(SEEDS)]
    print(f"\n{threshold} from {initial}: {min(taus):.2f} to {max(taus):.2f}")
    assert sum(abs(tau - 1) <= 0.2 for tau in taus) >= 18
