"""The TensorBoard log: every logical step once, released values only."""

from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from qclip.integrations.tensorboard import TensorBoardLog
from qclip.thresholds import Constant
from qclip.training.make import make_private


class Recorder:
    """A writer that keeps what it is given: {tag: {step: value}}."""

    def __init__(self):
        self.scalars = defaultdict(dict)

    def add_scalar(self, tag, scalar_value, global_step):
        assert global_step not in self.scalars[tag], "written twice"
        self.scalars[tag][global_step] = float(scalar_value)


def make(**changes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = TensorDataset(torch.randn(60, 4), torch.randint(3, (60,)))
    settings = {"batch_size": 12, "epochs": 2, "noise_multiplier": 0, "physical_batch_size": 5}
    return make_private(model, optimizer, data, loss=nn.CrossEntropyLoss(), seed=0, **settings | changes)


def run(training, log):
    for _ in range(2):
        for batch in training.loader:
            training.step(*batch)
            log.write()


def test_every_logical_step_is_written_once():
    training, writer = make(noise_multiplier=1.0, delta=1e-4), Recorder()
    run(training, TensorBoardLog(training, writer))
    assert set(writer.scalars) == {"qclip/tau", "qclip/noisy_unclipped", "qclip/step_size", "qclip/epsilon"}
    assert len(training.history) == 10
    for record in training.history:
        assert writer.scalars["qclip/tau"][record.step] == record.tau[0]
        assert writer.scalars["qclip/noisy_unclipped"][record.step] == record.noisy_unclipped[0]
        assert writer.scalars["qclip/step_size"][record.step] == 0.5
    epsilons = list(writer.scalars["qclip/epsilon"].values())
    assert len(epsilons) == 10
    assert epsilons == sorted(epsilons)
    assert 0 < epsilons[0] < epsilons[-1]
    assert training.epsilon() <= epsilons[-1] == pytest.approx(training.epsilon(), rel=1e-6)


def test_each_group_has_its_own_curve():
    training, writer = make(groups="per-layer"), Recorder()
    run(training, TensorBoardLog(training, writer))
    last = training.history[-1]
    assert len(last.tau) == 2
    assert training.groups == ("0", "2")
    for k, group in enumerate(training.groups):
        assert writer.scalars[f"qclip/tau/{group}"][9] == last.tau[k]
        assert writer.scalars[f"qclip/noisy_unclipped/{group}"][9] == last.noisy_unclipped[k]


def test_a_constant_has_no_counts():
    training, writer = make(threshold=Constant(1.0)), Recorder()
    run(training, TensorBoardLog(training, writer))
    assert set(writer.scalars) == {"qclip/tau", "qclip/step_size", "qclip/epsilon"}


def test_a_late_call_writes_what_it_missed():
    training, writer = make(), Recorder()
    log = TensorBoardLog(training, writer)
    for batch in training.loader:
        training.step(*batch)
    log.write()
    assert list(writer.scalars["qclip/tau"]) == [0, 1, 2, 3, 4]
    assert list(writer.scalars["qclip/epsilon"]) == [0, 1, 2, 3, 4]
    second = Recorder()
    TensorBoardLog(training, second).write()
    assert not second.scalars  # what was done before the log was made is not its own


def test_the_raw_loss_is_written_only_when_asked_for_by_name():
    training, writer = make(), Recorder()
    log = TensorBoardLog(training, writer)
    raw_loss = training.step(*next(iter(training.loader)))
    with pytest.raises(ValueError, match="raw_loss=True"):
        log.write(raw_loss=raw_loss)
    assert not writer.scalars


def test_a_log_of_losses_writes_the_rest_without_them():
    training, writer = make(), Recorder()
    run(training, TensorBoardLog(training, writer, raw_loss=True))
    assert len(writer.scalars["qclip/tau"]) == 10
    assert "qclip/raw_loss" not in writer.scalars


def test_the_raw_loss_is_a_mean_over_the_physical_batches():
    training, writer = make(), Recorder()
    log = TensorBoardLog(training, writer, raw_loss=True)
    expected, parts = {}, []
    for batch in training.loader:
        raw_loss = training.step(*batch)
        log.write(raw_loss=raw_loss)
        parts.append(raw_loss.item())
        if training.updated:
            expected[training.history[-1].step] = sum(parts) / len(parts)
            parts.clear()
    assert len(expected) == 5
    assert writer.scalars["qclip/raw_loss"] == pytest.approx(expected)


def test_a_real_writer_takes_it(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    training = make()
    with SummaryWriter(tmp_path) as writer:
        run(training, TensorBoardLog(training, writer))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == [
        "qclip/tau", "qclip/noisy_unclipped", "qclip/step_size", "qclip/epsilon"
    ]  # fmt: skip
    taus = events.Scalars("qclip/tau")
    assert [event.step for event in taus] == list(range(10))
    assert [event.value for event in taus] == pytest.approx([record.tau[0] for record in training.history])
