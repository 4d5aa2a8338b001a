"""Private training on a GPU: the CPU's run where there is no noise, resumed runs, steps that neither wait nor grow."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

pytest.importorskip("scipy")
pytest.importorskip("dp_accounting")

from engine.driven import as_traced
from gpu.device import DEVICE, ON_GPU, cuda_only
from qclip.thresholds import Constant, PrivateQuantile
from qclip.training.data_fingerprint import DataFingerprint
from qclip.training.noise import NoiseSource
from training.test_compile import (
    assert_same_run,
    dataset,
    fused,
    inside,
    make,
    network,
    parameters,
    unbroken_and_resumed,
)

pytestmark = pytest.mark.gpu

EITHER = pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])


@pytest.fixture(autouse=True)
def _compiler(monkeypatch):
    """The traced graph runs as it is where there is no GPU."""
    if not ON_GPU:
        monkeypatch.setattr("qclip.engine.compiled.driver.compile_graph", as_traced)


def on_device(*middle, **settings):
    return make(model=network(*middle).to(DEVICE), **settings)


@EITHER
def test_without_noise_it_is_the_run_of_a_cpu(compile):
    """Sampling does not depend on the device."""
    settings = {"noise_multiplier": 0.0, "threshold": Constant(0.3), "physical_batch_size": 40}
    here, there = on_device(compile=compile, **settings), make(**settings)
    fused(*here)
    fused(*there)
    torch.testing.assert_close(parameters(here[1]).cpu(), parameters(there[1]), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("door", "groups"), [(fused, "per-layer"), (inside, "flat")])
def test_compiled_it_is_the_eager_run(door, groups):
    """With the same noise, which the same kernel draws."""
    settings = {"threshold": PrivateQuantile(0.5), "groups": groups, "physical_batch_size": 40}
    eager, compiled = on_device(**settings), on_device(compile=True, **settings)
    fused(*eager)
    door(*compiled)
    assert_same_run(eager, compiled)


@EITHER
def test_the_same_seed_is_the_same_run(compile):
    settings = {"physical_batch_size": 40, "threshold": PrivateQuantile(0.5)}
    first, second = (on_device(seed=5, compile=compile, **settings) for _ in range(2))
    other = on_device(seed=6, **settings)
    for run in (first, second, other):
        fused(*run)
    torch.testing.assert_close(parameters(first[1]), parameters(second[1]), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(parameters(first[1]), parameters(other[1]))


@pytest.mark.parametrize(
    ("stop", "compile"),
    [
        pytest.param(3, False, id="between-eager"),
        pytest.param(5, False, id="eager"),
        pytest.param(5, True, id="compiled"),
    ],
)
def test_a_resumed_run_is_the_run_that_would_have_been(stop, compile, tmp_path):
    """Noise and dropout included, between logical batches and inside one."""

    def built(seed=None):
        torch.manual_seed(7)
        return on_device(nn.Dropout(0.3), compile=compile, physical_batch_size=40, seed=seed)

    whole, second = unbroken_and_resumed(built, stop, tmp_path / "run.pt")
    torch.testing.assert_close(parameters(second[1]), parameters(whole[1]), rtol=1e-5, atol=1e-6)
    for mine, other in zip(second[0].history, whole[0].history, strict=True):
        assert mine.tau == pytest.approx(other.tau)


def test_data_on_the_device_are_the_data_of_the_cpu(monkeypatch):
    """Whole and in part, hashed in pieces; and the device's generators stay where they are."""
    monkeypatch.setattr("qclip.training.data_fingerprint._CHUNK", 1000)
    there = TensorDataset(*(tensor.to(DEVICE) for tensor in dataset().tensors))
    torch.manual_seed(0)
    expected = torch.rand(3, device=DEVICE)
    torch.manual_seed(0)
    for wrap in (lambda data: data, lambda data: Subset(data, range(0, len(data), 3))):
        here, moved = (DataFingerprint(wrap(data)).under(np.random.SeedSequence(1)) for data in (dataset(), there))
        assert here == moved
        assert set(here) == {"rows", "items"}
    assert torch.equal(torch.rand(3, device=DEVICE), expected)


def test_a_resumed_run_without_its_noise_is_another(tmp_path):
    """The test above can fail."""
    first, second = (on_device(seed=seed, physical_batch_size=40) for seed in (5, None))
    for batch in first[0].loader:
        first[0].step(batch)
        if first[0].updated:
            break
    first[0].save(tmp_path / "run.pt")
    second[0].load(tmp_path / "run.pt")
    second[0]._noise = NoiseSource(1)
    fused(*first)
    fused(*second)
    assert not torch.allclose(parameters(first[1]), parameters(second[1]), rtol=1e-5, atol=1e-6)


@cuda_only("torch's detector of waiting")
def test_nothing_waits_before_the_end_of_a_logical_batch():
    """Where torch warns of waiting, it is at the last physical batch or at a proof: the 1st, 2nd and 16th use."""
    training, *_ = on_device(compile=True, physical_batch_size=10, threshold=PrivateQuantile(0.5), steps=5)
    waited, ended = [], 0
    for used, batch in enumerate(training.loader):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                training.step(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        stops = [str(each.message) for each in caught if "called a synchronizing" in str(each.message)]
        ended += bool(training.updated and stops)
        if used > 20 and not training.updated:
            waited += [(used, stop) for stop in stops]
    assert not waited
    assert ended > 0  # the detector works: noise waits for the sums


@cuda_only("memory of a GPU")
@EITHER
def test_memory_does_not_grow(compile):
    training, *_ = on_device(compile=compile, physical_batch_size=25, threshold=PrivateQuantile(0.5), steps=30)
    held = []
    for batch in training.loader:
        training.step(batch)
        if training.updated:
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
    assert len(held) == 30
    assert max(held[10:]) <= max(held[5:10]) + 2**16


@EITHER
def test_examples_that_are_not_finite(compile):
    """They count as clipped, in any physical batch: the run goes on, and is that of a CPU."""
    source = dataset()
    source.tensors[0][::9] = torch.nan
    source.tensors[0][5] = torch.inf
    settings = {"source": source, "physical_batch_size": 30, "threshold": Constant(0.3)}
    there, here = make(**settings, noise_multiplier=0.0), on_device(**settings, compile=compile, noise_multiplier=0.0)
    fused(*there)
    fused(*here)
    torch.testing.assert_close(parameters(here[1]).cpu(), parameters(there[1]), rtol=1e-3, atol=1e-4)
