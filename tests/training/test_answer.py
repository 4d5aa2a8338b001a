"""The facts that travel with an answer: the power of the noise, and the number of parameters it is spread over."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from qclip.thresholds import BalancedThreshold, Constant, HistogramQuantile, PrivateQuantile, SlackQuantile
from qclip.training.make import make_private
from qclip.training.sums import Key

THRESHOLDS = [BalancedThreshold(), Constant(0.5), HistogramQuantile(0.5), PrivateQuantile(0.5), SlackQuantile(0.5)]
GROUPS = {"flat": {"flat": "*"}, "layers": {"first": "0.*", "second": "1.*"}}
DIMS = {"flat": (31 * 20 + 21 * 25,), "layers": (31 * 20, 21 * 25)}


def run(threshold, groups, **settings):
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(300, 30, generator=generator), torch.randn(300, 25, generator=generator))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 25))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    training = make_private(
        model, optimizer, data, loss=nn.MSELoss(), batch_size=100, steps=3, delta=1e-4, threshold=threshold, seed=1,
        groups=GROUPS[groups], **{"noise_multiplier": 0.5} | settings,
    )  # fmt: skip
    for x, y in training.loader:
        training.step(x, y)
    return training.history


@pytest.mark.parametrize("rescale", [False, True], ids=["plain", "rescaled"])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("threshold", THRESHOLDS, ids=lambda threshold: type(threshold).__name__)
def test_the_record_has_the_power_of_the_noise_on_the_gradient(recorder, threshold, groups, rescale):
    """Of the parameters alone, without the slack of unclipped examples, and whatever the gradient is divided by."""
    history = run(threshold, groups, rescale_to_unit_norm=rescale)
    per_step = len(recorder.values) // 3
    for record in history:
        raw, noisy = (rows[record.step * per_step] for rows in (recorder.values, recorder.released))
        stds = recorder.stds[record.step * per_step]
        expected = [dim * (std / 100 / tau) ** 2 for dim, std, tau in zip(DIMS[groups], stds, record.tau, strict=True)]
        assert record.noise_power == pytest.approx(expected)
        found = [0.0] * len(expected)
        for key, value in raw.tensors.items():
            if isinstance(key, Key) and key.kind == "gradient":
                noise = noisy.tensors[key] * noisy.divisor - value
                found[raw.members[key]] += (noise / 100 / record.tau[raw.members[key]]).square().sum().item()
        # Squared norms of 525 numbers or more have a relative standard deviation of at most 6 %.
        assert record.noise_power == pytest.approx(found, rel=0.35)


def test_without_noise_it_has_no_power():
    assert all(record.noise_power == (0.0,) for record in run(BalancedThreshold(), "flat", noise_multiplier=0.0))


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("threshold", THRESHOLDS, ids=lambda threshold: type(threshold).__name__)
def test_the_record_has_the_noise_power_of_the_answer(monkeypatch, threshold, groups):
    answers, update = [], type(threshold).update
    kept = lambda self, state, step, answer: answers.append(answer) or update(self, state, step, answer)  # noqa: E731
    monkeypatch.setattr(type(threshold), "update", kept)
    history = run(threshold, groups)
    assert [answer.noise_power for answer in answers] == [record.noise_power for record in history]


def test_the_record_has_the_clipped_length_where_it_is_estimated():
    for threshold in THRESHOLDS:
        lengths = [record.clipped_length for record in run(threshold, "layers", noise_multiplier=0.1)]
        if isinstance(threshold, BalancedThreshold):
            # The first tau, 0.1, is far below the norms of the second layer: nearly all of their length is clipped.
            assert all(len(row) == 2 for row in lengths)
            assert lengths[0][1] > 1
            assert lengths[-1][1] < lengths[0][1]
        else:
            assert lengths == [()] * 3
