"""Faults found in private training elsewhere, one test each: none of them here."""

import math

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, pld
from torch import nn
from torch.utils.data import TensorDataset

import qclip
from qclip import accounting, schedules
from qclip.training.sampling import PoissonSampler
from shards import every


def training(*, size=300, **changes):
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"batch_size": 100, "steps": 5, "noise_multiplier": 1.0, "delta": 1e-4, "seed": 0} | changes
    return qclip.make_private(model, optimizer, data, loss=nn.CrossEntropyLoss(), **settings)


def finish(run):
    for batch in run.loader:
        run.step(batch)
    return run


@pytest.mark.parametrize("threshold", every(2, [qclip.PrivateQuantile(0.5), qclip.HistogramQuantile(0.5)]))
def test_adaptive_thresholds_count_every_physical_batch(threshold):
    """Elsewhere: only the last of a logical batch's chunks was counted, and the threshold ran to a multiple."""
    whole = finish(training(threshold=threshold, steps=20, noise_multiplier=0))
    cut = finish(training(threshold=threshold, steps=20, noise_multiplier=0, physical_batch_size=9))
    assert np.array([r.tau for r in cut.history]) == pytest.approx(np.array([r.tau for r in whole.history]), rel=1e-4)


def test_the_threshold_stays_within_a_logical_batch_and_scales_its_noise(recorder):
    """Elsewhere: C drifted from chunk to chunk while the noise used the last value."""
    run = finish(training(threshold=qclip.GeometricQuantile(0.5), physical_batch_size=9))
    gradients = recorder.values[::2]
    assert [value.group_bounds for value in gradients] == [record.tau for record in run.history]
    z = run.noise_multipliers.gradient
    assert [stds[0] for stds in recorder.stds[::2]] == pytest.approx([z * r.tau[0] for r in run.history])


def test_the_threshold_is_in_the_checkpoint(tmp_path):
    """Elsewhere: 4.98 became 1.0 after loading."""
    run = training(threshold=qclip.PrivateQuantile(0.5), steps=12)
    for batch in run.loader:
        run.step(batch)
        if len(run.history) == 6:
            break
    run.save(tmp_path / "run.pt")
    again = training(threshold=qclip.PrivateQuantile(0.5), steps=12, seed=1)
    again.load(tmp_path / "run.pt")
    assert finish(again).history == finish(run).history


def test_an_empty_batch_is_a_step(monkeypatch):
    """Elsewhere: a crash, or a threshold that stays exactly where it was, which tells that nobody was there."""
    monkeypatch.setattr(PoissonSampler, "draw", lambda self, step: np.arange(0))
    history = finish(training(threshold=qclip.PrivateQuantile(0.5))).history
    assert len({record.tau for record in history}) == len(history) == 5


def test_counts_are_divided_by_the_expected_batch_size(monkeypatch):
    """Elsewhere: by the size that was drawn, which is not public."""
    monkeypatch.setattr(PoissonSampler, "draw", lambda self, step: np.arange(30))
    run = training(threshold=qclip.GeometricQuantile(0.5, initial=1e3), noise_multiplier=0, steps=1)
    # All 30 are unclipped: (30 (1 - 1/2)) / 100 + 1/2.
    assert finish(run).history[0].noisy_unclipped == pytest.approx((0.65,))


def test_the_counts_are_paid_for():
    """Elsewhere: epsilon was reported as if the counts were free, or as two samplings of the same batch."""
    run = training(threshold=qclip.GeometricQuantile(0.5, noise_share=0.3), noise_multiplier=0.8)
    gradient, counts = run.noise_multipliers
    assert gradient > 0.8
    assert accounting.merge(gradient, counts) == pytest.approx(0.8)
    finish(run)
    free = pld.PLDAccountant().compose(PoissonSampledDpEvent(1 / 3, GaussianDpEvent(gradient)), 5)
    apart = free.compose(PoissonSampledDpEvent(1 / 3, GaussianDpEvent(counts)), 5)
    assert run.epsilon(1e-5) > apart.get_epsilon(1e-5)


def test_groups_pay_for_each_of_their_counts(recorder):
    run = finish(training(threshold=qclip.GeometricQuantile(0.5), groups="per-layer"))
    counts = recorder.values[1::2]
    assert {value.group_bounds for value in counts} == {(math.sqrt(2) / 2,)}
    assert recorder.stds[1][0] == pytest.approx(run.noise_multipliers.counts * math.sqrt(2) / 2)


def test_the_expected_batch_size_is_what_was_given():
    """Elsewhere: int(N q), a function of the data."""
    run = training(size=301, batch_size=100)
    assert run.plan.batch_size == 100
    assert run.plan.sample_rate == 100 / 301


def test_a_scheduled_threshold_moves_the_clip_and_the_noise_together(recorder):
    """Elsewhere: a scheduler changed the noise and not the clip."""
    schedule = schedules.polynomial(1.0, -0.5)
    finish(training(threshold=qclip.Constant(schedule)))
    taus = [schedule(step) for step in range(5)]
    assert [value.group_bounds[0] for value in recorder.values] == taus
    assert [stds[0] for stds in recorder.stds] == pytest.approx(taus)


def test_one_number_makes_it_adaptive():
    """Elsewhere: five required arguments without defaults."""
    assert finish(training(threshold=qclip.PrivateQuantile(0.5))).history
