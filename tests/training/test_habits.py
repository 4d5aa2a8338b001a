"""Habits of ordinary PyTorch loops and of other libraries: they work, or the error says what to write instead."""

import time
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import qclip
from qclip.training import progress
from qclip.training.foreign_names import MEANINGS


def model():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def data(size=60):
    return TensorDataset(torch.randn(size, 4), torch.randint(3, (size,)))


def make(dataset=None, *, rate=0.1, **changes):
    """Return a run, its model and its optimizer."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    settings = {"loss": nn.CrossEntropyLoss(), "batch_size": 12, "epochs": 2, "noise_multiplier": 1.0, "delta": 1e-4}
    settings = {name: value for name, value in (settings | {"seed": 0} | changes).items() if value is not ...}
    return qclip.make_private(net, optimizer, dataset or data(), **settings), net, optimizer


# The loader


def test_the_length_of_the_loader_is_the_number_of_batches_of_a_pass():
    training, _, _ = make()
    assert len(training.loader) == training.steps_per_epoch == 5
    assert [sum(1 for batch in training.loader if training.step(*batch) is not None) for _ in range(2)] == [5, 5]
    assert len(make(epochs=..., steps=7)[0].loader) == 7


def test_the_length_is_known_wherever_a_step_is_one_physical_batch():
    assert len(make(physical_batch_size=60)[0].loader) == 5
    uniform = {"sampling": "uniform", "noise_multiplier": 0}
    assert len(make(**uniform, physical_batch_size=12)[0].loader) == 5
    with pytest.raises(TypeError):
        len(make(**uniform, physical_batch_size=11)[0].loader)


def test_where_the_number_of_batches_is_random_there_is_no_length_but_a_list():
    training, _, _ = make(physical_batch_size=4)
    with pytest.raises(TypeError, match=r"physical_batch_size = 4: .* random.*training\.steps_per_epoch.*tqdm\(total="):
        len(training.loader)
    assert len(list(training.loader)) > 5


def test_a_scheduler_takes_its_number_of_steps_from_the_loader():
    training, _, optimizer = make()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, epochs=2, steps_per_epoch=len(training.loader))
    rates = []
    for _ in range(2):
        for batch in training.loader:
            training.step(*batch)
            rates.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
    assert len(rates) == 10
    assert rates[0] == pytest.approx(1.0 / 25)
    assert rates[-1] == pytest.approx(1.0 / 25 / 1e4)


def test_the_loader_has_the_properties_of_a_data_loader():
    source = DataLoader(data(), batch_size=20, num_workers=2)
    loader = make(source)[0].loader
    assert (loader.dataset, loader.batch_size, loader.num_workers) == (source.dataset, 12, 2)
    assert make(source.dataset)[0].loader.num_workers == 0


def test_the_batch_size_is_by_default_that_of_the_data_loader():
    training, _, _ = make(DataLoader(data(), batch_size=20, shuffle=True), batch_size=...)
    assert training.plan.batch_size == 20
    with pytest.raises(qclip.Refusal, match=r"batch_size is missing: pass .* batch_size=256"):
        make(batch_size=...)
    with pytest.raises(qclip.Refusal, match=r"that of the DataLoader is 1, as where it is left out"):
        make(DataLoader(data()), batch_size=...)
    alone = make(DataLoader(data()), batch_size=1, threshold=qclip.Constant(1.0))[0]
    assert alone.plan.batch_size == 1


# Schedulers and physical batches


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_scheduler_in_each_physical_batch_is_noticed_once(as_tensor):
    training, _, optimizer = make(physical_batch_size=4, rate=torch.tensor(0.1) if as_tensor else 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def loop():
        for batch in training.loader:
            training.step(*batch)
            optimizer.step()  # what torch's schedulers wait for; without a gradient it does nothing
            scheduler.step()

    with pytest.warns(UserWarning, match=r"between two physical batches.*when training\.updated is True") as caught:
        loop()
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_a_scheduler_in_each_logical_batch_is_not():
    training, net, optimizer = make(physical_batch_size=4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in training.loader:
            training.loss(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if training.updated:
                scheduler.step()
    assert len(training.history) == 5


# The loss


def a_loss(**changes):
    training, net, optimizer = make(**changes)
    x, y = next(iter(training.loader))
    return training.loss(net(x), y), F.cross_entropy(net(x), y), optimizer


def test_a_loss_can_be_looked_at_like_a_tensor():
    loss, expected, _ = a_loss()
    assert torch.equal(loss.detach(), expected.detach())
    assert not loss.detach().requires_grad
    assert float(loss) == loss.item() == expected.item()
    assert f"{loss:.3f}" == f"{expected.item():.3f}"
    assert f"{loss}" == repr(loss) == f"PrivateLoss({expected.item():.6g})"


REFUSED = {
    "total += loss": (lambda loss: 0.0 + loss, r"^0\.0 cannot be added .*loss\.item\(\)"),
    "sum of losses": (lambda loss: sum([loss]), r"^0 cannot be added .*loss\.item\(\)"),
    "mean of losses": (lambda loss: np.mean([loss, loss]), r"cannot be added .*loss\.item\(\)"),
    "loss + penalty": (lambda loss: loss + torch.ones(()), r"^a Tensor cannot be added .*weight_decay.*criterion"),
    "penalty + loss": (lambda loss: torch.ones(()) + loss, r"^a Tensor cannot be added .*weight_decay.*criterion"),
    "loss - number": (lambda loss: loss - 1, r"subtracted"),
    "loss / 4": (lambda loss: loss / 4, r"divided by 4.*physical_batch_size"),
    "loss * 0.5": (lambda loss: loss * 0.5, r"multiplied by 0\.5: put the factor into the criterion"),
    "2 * loss": (lambda loss: 2 * loss, r"multiplied by 2"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_arithmetic_with_a_loss_is_refused_with_a_remedy(what):
    compute, message = REFUSED[what]
    with pytest.raises(qclip.Refusal, match=message):
        compute(a_loss()[0])


def test_a_division_by_one_is_the_same_loss():
    loss, _, optimizer = a_loss()
    (loss / 1).backward()
    optimizer.step()
    assert loss / 1.0 is loss


def test_methods_of_tensors_that_a_loss_does_not_have_are_named():
    with pytest.raises(AttributeError, match=r"no 'mean', only backward\(\), item\(\) and detach\(\)"):
        a_loss()[0].mean()


def test_gradients_do_not_accumulate_over_logical_batches():
    training, net, _ = make()
    batches = iter(training.loader)
    x, y = next(batches)
    training.loss(net(x), y).backward()
    x, y = next(batches)
    with pytest.raises(qclip.Refusal, match=r"not applied before the next batch: call optimizer\.step\(\)"):
        training.loss(net(x), y)
    assert len(training.history) == 1


# Arguments


@pytest.mark.parametrize("name", MEANINGS)
def test_names_of_other_libraries_are_refused_with_those_of_qclip(name):
    with pytest.raises(qclip.Refusal) as caught:
        make(**{name: 1.0})
    assert str(caught.value).endswith(f"{name}=: write {MEANINGS[name]}")


def test_the_arguments_that_are_named_exist():
    arguments = qclip.make_private.__annotations__
    for meaning in MEANINGS.values():
        first = meaning.split("=")[0]
        assert first in arguments or meaning.startswith(("nothing:", "the learning rate", "a larger batch_size=")), (
            first
        )
    assert not set(MEANINGS) & set(arguments)


def test_several_are_named_at_once():
    with pytest.raises(qclip.Refusal, match=r"max_grad_norm=: .*Constant\(1\.0\).*; target_delta=: write delta="):
        make(max_grad_norm=1.2, target_delta=1e-5)


def test_an_unknown_argument_is_a_type_error_with_a_guess():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'epoch'; did you mean epochs=\?"):
        make(epoch=1)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'xyz'$"):
        make(xyz=1)
    with pytest.raises(TypeError, match=r"'model', .*'dataset'|'model' and 'dataset'"):
        qclip.make_private(module=model(), optimizer=None, data_loader=data())


def test_a_loss_that_cannot_be_called_is_refused_at_once():
    with pytest.raises(qclip.Refusal, match=r"loss = 'cross_entropy' must be a function.*nn\.CrossEntropyLoss\(\)"):
        make(loss="cross_entropy")
    with pytest.raises(qclip.Refusal, match=r"loss = 'MSELoss' must be an object, not a class; .*loss=MSELoss\(\)"):
        make(loss=nn.MSELoss)
    with pytest.raises(qclip.Refusal, match=r"and neither was: loss= is a criterion"):
        make(loss=None)
    with pytest.raises(qclip.Refusal, match=r"and both were: loss= is a criterion"):
        make(per_example_loss=lambda model, batch: model(batch[0]).sum(1))


def test_a_closure_is_refused_without_its_repr():
    training, net, optimizer = make()
    x, y = next(iter(training.loader))
    training.loss(net(x), y).backward()
    with pytest.raises(qclip.Refusal, match=r"with a closure.*automatic_optimization = False") as caught:
        optimizer.step(lambda: None)
    assert "<" not in str(caught.value)


# Words in time


def test_noise_for_a_threshold_that_is_not_private_is_said_to_buy_nothing():
    with pytest.warns(UserWarning, match=r"^ExactQuantile reads raw gradient norms, so epsilon is infinite") as caught:
        make(threshold=qclip.ExactQuantile(0.5))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(threshold=qclip.ExactQuantile(0.5), noise_multiplier=0)


@pytest.fixture
def no_terminal(monkeypatch):
    monkeypatch.setattr(progress, "_terminal", lambda: None)


def test_a_call_that_takes_long_is_mentioned(no_terminal, monkeypatch, caplog):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    deadline = time.monotonic() + 20
    with progress.working("compiling"):
        while not caplog.messages and time.monotonic() < deadline:
            time.sleep(0.001)
    assert caplog.messages == ["compiling ..."]


def test_a_short_one_is_not(no_terminal, monkeypatch, caplog):
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    with progress.working("compiling"):
        pass
    time.sleep(0.1)
    assert not caplog.messages


def test_calibration_is_mentioned(monkeypatch):
    mentioned = []
    monkeypatch.setattr("qclip.training.make.working", lambda what: mentioned.append(what) or nullcontext())
    make(epsilon=5.0, noise_multiplier=None)
    make()
    assert mentioned == ["calibrating the noise to epsilon = 5.0"]
