"""Private training with compile: the same run, to rounding, by compiled steps.

Most runs replace torch's compiler and run the traced graph as it is; one goes through it.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from engine.driven import as_traced
from qclip.engine.compiled import driver
from qclip.engine.compiled.driver import Compiled
from qclip.thresholds import Constant, ExactQuantile, HistogramQuantile, PrivateQuantile, SlackQuantile
from qclip.training import sampling
from qclip.training.make import make_private
from shards import every

THRESHOLDS = {
    "constant": Constant(0.3),
    "private": PrivateQuantile(0.5),
    "histogram": HistogramQuantile(0.5),
    "slack": SlackQuantile(0.5, initial=1.0),
}
Z = 0.5
"""Small enough for the slack's limits at this batch size."""


@pytest.fixture
def traced(monkeypatch):
    """The traced graph runs as it is."""
    monkeypatch.setattr("qclip.engine.compiled.driver.compile_graph", as_traced)


@pytest.fixture
def steps(monkeypatch):
    """The size of the batch of every compiled step that is run for a result."""
    found = []
    run = Compiled._run

    def counted(self, step, model, batch, counted, thresholds, keep):
        found.append(len(counted))
        return run(self, step, model, batch, counted, thresholds, keep)

    monkeypatch.setattr(Compiled, "_run", counted)
    return found


def network(*middle):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *middle, nn.Linear(8, 3))


def dataset(rows=None, size=250):
    generator = torch.Generator().manual_seed(3)
    shape = (size, 4) if rows is None else (size, rows, 4)
    y = torch.randint(3, shape[:-1], generator=generator)
    return TensorDataset(torch.randn(shape, generator=generator), y)


def make(*, model=None, source=None, **changes):
    model = model or network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    settings = {
        "batch_size": 100, "steps": 4, "noise_multiplier": Z, "delta": 1e-4, "seed": 5, "loss": nn.CrossEntropyLoss(),
        "accountant": "rdp",
    } | changes  # fmt: skip
    if "per_example_loss" in changes:
        del settings["loss"]
    return make_private(model, optimizer, source or dataset(), **settings), model, optimizer


def fused(training, model, optimizer):
    return [training.step(batch).item() for batch in training.loader]


def inside(training, model, optimizer):
    """The ordinary loop, with the batch going through the model in the loss."""
    losses = []
    for batch in training.loader:
        loss = training.loss(batch)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def outside(training, model, optimizer):
    for x, y in training.loader:
        training.loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def parameters(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def assert_same_run(one, two):
    (a, model_a, _), (b, model_b, _) = one, two
    torch.testing.assert_close(parameters(model_a), parameters(model_b), rtol=1e-4, atol=1e-5)
    assert a.epsilon() == b.epsilon()
    assert len(a.history) == len(b.history) == a.num_steps
    for mine, other in zip(a.history, b.history, strict=True):
        assert mine.tau == pytest.approx(other.tau, rel=1e-4)
        assert mine.noisy_unclipped == pytest.approx(other.noisy_unclipped, abs=1e-6)
        assert mine.step_size == pytest.approx(other.step_size)


def both(door=fused, eager_door=None, **settings):
    """The same run without and with compile."""
    eager, compiled = make(**settings), make(compile=True, **settings)
    (eager_door or door)(*eager)
    door(*compiled)
    return eager, compiled


TURNS = [
    (name, groups)
    for i, name in enumerate(THRESHOLDS)
    for groups in (["flat", "per-layer"], ["per-layer", "flat"])[i % 2]
]


@pytest.mark.parametrize(("name", "groups"), every(4, TURNS))
def test_the_run_is_the_same(name, groups, traced, steps):
    assert_same_run(*both(threshold=THRESHOLDS[name], groups=groups))
    assert len(set(steps)) == 1
    assert len(steps) >= 4


@pytest.mark.parametrize("door", [fused, inside])
def test_both_doors(door, traced, steps):
    assert_same_run(*both(door, rescale_to_unit_norm=True, step_size=lambda step: 0.1 / (1 + step)))
    assert steps


def test_the_raw_loss_is_that_of_the_eager_run(traced):
    eager, compiled = make(physical_batch_size=40), make(physical_batch_size=40, compile=True)
    assert fused(*compiled) == pytest.approx(fused(*eager), rel=1e-5)
    assert inside(*make(physical_batch_size=40, compile=True)) == pytest.approx(fused(*make(physical_batch_size=40)))


@pytest.mark.smoke
def test_through_the_compiler(steps):
    assert_same_run(*both(threshold=PrivateQuantile(0.5)))
    assert len(set(steps)) == 1


@pytest.mark.parametrize("mode", every(4, ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]))
def test_modes_are_those_of_the_compiler(mode, monkeypatch):
    """But for CUDA graphs, which are recorded here."""
    asked = []

    def compile(graph, inputs, options):
        asked.append(options)
        return graph

    monkeypatch.setattr("qclip.engine.compiled.driver.compile_graph", compile)
    fused(*make(compile=mode))
    (options,) = asked
    assert bool(options.get("max_autotune")) == mode.startswith("max-autotune")
    assert not options.get("triton.cudagraphs")


def test_an_unknown_mode_is_refused():
    for mode in ("fastest", "graphs", "", None, 1):
        with pytest.raises(ValueError, match="compile"):
            make(compile=mode)


def test_physical_batches_fill_the_slots(traced, steps):
    assert_same_run(*both(physical_batch_size=30))
    assert set(steps) == {30}


def test_without_a_size_padding_is_kept_low(traced, steps):
    training, *rest = make(compile=True)
    fused(training, *rest)
    assert set(steps) == {sampling.fixed_size("poisson", 250, 100)}


def test_batches_of_one_size(traced, steps):
    assert_same_run(*both(sampling="uniform", noise_multiplier=0.0))
    assert set(steps) == {100}


def test_several_rows_for_each_example(traced, steps):
    assert_same_run(*both(source=dataset(rows=2), rows_per_example=2))
    assert steps


def test_a_loss_of_model_and_batch(traced, steps):
    def collate(examples):
        return {"x": torch.stack([x for x, _ in examples]), "y": torch.stack([y for _, y in examples])}

    def losses(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    source = DataLoader(dataset(), collate_fn=collate, batch_size=3)
    assert_same_run(*both(source=source, per_example_loss=losses))
    assert_same_run(*both(inside, source=source, per_example_loss=losses))
    assert steps


def test_a_threshold_that_looks_at_the_batch_runs_eager(traced, steps):
    with pytest.warns(UserWarning, match="not compiled, runs eager: the threshold looks at") as caught:
        assert_same_run(*both(threshold=ExactQuantile(0.5)))
    assert len([warning for warning in caught if "runs eager" in str(warning.message)]) == 1
    assert not steps


def test_a_threshold_that_looks_at_the_whole_data_set_is_compiled(traced, steps):
    assert_same_run(*both(threshold=ExactQuantile(0.5, over="dataset")))
    assert steps


def test_the_model_called_outside_runs_eager(traced, steps):
    with pytest.warns(UserWarning, match="not compiled, runs eager: the model was called outside") as caught:
        assert_same_run(*both(outside))
    assert len(caught) == 1
    assert not steps


def test_examples_that_are_not_finite(traced, steps):
    """In any physical batch of a step, first or last, and in the one that fills up."""
    source = dataset()
    source.tensors[0][::9] = torch.nan
    source.tensors[0][5] = torch.inf
    for size in (None, 30, 7):
        assert_same_run(*both(source=source, physical_batch_size=size))
    assert steps


def test_draws_without_examples(traced):
    """Batches of one example on average: some steps have none, and noise alone moves the parameters."""
    assert_same_run(*both(source=dataset(size=30), batch_size=1, steps=8, threshold=Constant(1.0)))


def test_a_model_without_finite_gradients_is_refused(traced):
    model = network()
    with torch.no_grad():
        model[0].weight.fill_(torch.nan)
    training, *rest = make(model=model, compile=True)
    with (
        pytest.warns(UserWarning, match="could not attribute rows to examples"),
        pytest.warns(UserWarning, match="proven at every step.* no example has a finite gradient"),
        pytest.raises(ValueError, match="not finite for any example"),
    ):
        fused(training, *rest)
    assert len(training.history) == 0


def test_dropout_trains(traced, steps):
    torch.manual_seed(2)
    training, model, optimizer = make(model=network(nn.Dropout(0.5)), compile=True)
    before = parameters(model)
    fused(training, model, optimizer)
    assert steps
    assert training.finished
    assert not torch.equal(before, parameters(model))


def unbroken_and_resumed(built, stop, path):
    """The run that is ``built``, whole, and again: saved after so many physical batches, and loaded without a seed."""
    whole = built(seed=5)
    fused(*whole)
    training, *_ = built(seed=5)
    for used, batch in enumerate(training.loader, 1):
        training.step(batch)
        if used == stop:
            break
    training.save(path)
    second = built()
    second[0].load(path)
    fused(*second)
    return whole, second


@pytest.mark.parametrize("stop", every(4, [3, 1, 8, 5]))
def test_a_resumed_run_is_the_run_that_would_have_been(stop, traced, tmp_path):
    """Bit for bit, dropout included, wherever it stops: between logical batches or inside one."""

    def built(seed=None):
        torch.manual_seed(7)
        return make(model=network(nn.Dropout(0.3)), compile=True, physical_batch_size=40, seed=seed)

    whole, second = unbroken_and_resumed(built, stop, tmp_path / "run.pt")
    assert torch.equal(parameters(whole[1]), parameters(second[1]))
    assert whole[0].history == second[0].history


def test_a_run_may_go_on_with_compile_or_without(traced, tmp_path):
    training, *_ = first = make(physical_batch_size=40)
    fused(*make(physical_batch_size=40))
    for batch in training.loader:
        training.step(batch)
        if len(training.history) == 2:
            break
    training.save(tmp_path / "run.pt")
    second = make(physical_batch_size=40, compile=True)
    second[0].load(tmp_path / "run.pt")
    fused(*second)
    fused(*first)
    assert_same_run(first, second)


def test_no_global_stream_is_touched(traced):
    before = torch.get_rng_state()
    fused(*make(compile=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_one_graph_serves_the_run(traced, monkeypatch):
    traces = []
    trace = driver.trace
    monkeypatch.setattr(driver, "trace", lambda *args: traces.append(args) or trace(*args))
    fused(*make(compile=True, steps=20))
    assert len(traces) == 1


def test_a_long_compilation_is_announced(traced, monkeypatch):
    announced = []
    monkeypatch.setattr("qclip.training.make.working", lambda what: announced.append(what) or nullcontext())
    fused(*make(compile=True))
    assert announced == ["compiling the private step"]
