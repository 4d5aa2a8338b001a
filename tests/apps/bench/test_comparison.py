"""The comparison: one row for each case and mode, Opacus only where it is installed."""

import importlib.util
import warnings

import pytest
import torch

from qclip.apps.bench import comparison, measure, modes
from qclip.apps.bench.cases import CASES
from qclip.apps.bench.precision import PRECISIONS
from qclip.apps.bench.workload import workload
from shards import every

CPU = torch.device("cpu")
EAGER = ["plain", "qclip", "qclip per-layer"]


@pytest.fixture
def without_opacus(monkeypatch):
    """As on a machine where it is not installed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == "opacus" else found(name, *args)
    )


def assert_sound(found, expected, baseline="plain"):
    assert found.failures == ()
    assert [row.mode for row in found.rows] == expected
    base = next(row for row in found.rows if row.mode == baseline)
    for row in found.rows:
        assert row.parameters == 8
        assert row.ms_low <= row.ms <= row.ms_high
        assert row.ms > 0
        assert row.peak_bytes > 0
        assert row.reserved_bytes is None
        assert row.compile_seconds > 0
        assert row.ratio_time == pytest.approx(row.ms / base.ms)
        assert row.ratio_memory == pytest.approx(row.peak_bytes / base.peak_bytes)


def test_eager_modes(tiny):
    said = []
    assert_sound(comparison.compare(cases=["tiny"], modes=EAGER, rounds=2, say=said.append), EAGER)
    assert said == [*(f"preparing tiny, {mode}" for mode in EAGER), "timing tiny"]


def test_with_opacus(tiny):
    pytest.importorskip("opacus")
    peers = ["plain", "opacus hooks", "opacus ghost"]
    assert_sound(comparison.compare(cases=["tiny"], modes=peers, rounds=1), peers)


@pytest.mark.parametrize("dtype", every(2, ["bfloat16", "autocast"]))
def test_other_precisions(tiny_tokens, dtype):
    found = comparison.compare(cases=["tokens"], modes=EAGER, dtype=dtype, rounds=1)
    assert [row.dtype for row in found.rows] == [dtype] * len(EAGER)


@pytest.mark.slow
def test_compiled_is_the_baseline(tiny):
    names = ["plain", "compiled", "qclip compiled"]
    assert_sound(comparison.compare(cases=["tiny"], modes=names, rounds=1), names, baseline="compiled")


def test_a_mode_that_raises_is_reported_and_the_others_go_on(tiny, monkeypatch):
    def broken(work):
        raise NotImplementedError("no rule for this\nmore")

    monkeypatch.setitem(modes.MODES, "qclip", modes.Mode("qclip", broken))
    found = comparison.compare(cases=["tiny"], modes=EAGER, rounds=1)
    assert [row.mode for row in found.rows] == ["plain", "qclip per-layer"]
    assert found.failures == ("tiny, qclip: NotImplementedError: no rule for this",)


def test_without_a_baseline_there_are_no_ratios(tiny, monkeypatch):
    def broken(work):
        raise RuntimeError

    monkeypatch.setitem(modes.MODES, "plain", modes.Mode("plain", broken))
    found = comparison.compare(cases=["tiny"], modes=["qclip"], rounds=1)
    assert [(row.mode, row.ratio_time, row.ratio_memory) for row in found.rows] == [("qclip", None, None)]
    assert found.failures == ("tiny, plain: RuntimeError: ",)


def test_a_step_that_was_not_compiled_has_no_row(tiny, monkeypatch):
    def fallen_back(work):
        warnings.warn("not compiled, runs eager: a reason", stacklevel=1)

    monkeypatch.setitem(modes.MODES, "qclip compiled", modes.Mode("qclip compiled", fallen_back))
    found = comparison.compare(cases=["tiny"], modes=["qclip compiled"], rounds=1)
    assert found.failures == ("tiny, qclip compiled: UserWarning: not compiled, runs eager: a reason",)


def ready(name, peak, reserved=None):
    return comparison._Ready(name, lambda: None, peak, reserved, 8, 0.0)


def test_the_faster_compiled_step_is_the_baseline():
    prepared = [ready("plain", 1, 10), ready("compiled", 2, 20), ready("compiled graphs", 3, 40), ready("qclip", 4, 60)]
    times = {"plain": [1.0], "compiled": [3.0], "compiled graphs": [2.0], "qclip": [5.0]}
    rows = comparison._rows(CASES["mlp"], prepared, times, PRECISIONS["float32"])
    assert [row.ratio_time for row in rows] == [0.5, 1.5, 1.0, 2.5]
    assert [row.ratio_memory for row in rows] == [0.25, 0.5, 1.0, 1.5]


def test_modes_of_a_machine(without_opacus):
    names = [mode.name for mode in modes.chosen((), CASES["mlp"], CPU)]
    assert names == ["plain", "compiled", "qclip", "qclip compiled", "qclip per-layer", "qclip per-layer compiled"]
    gpu = [mode.name for mode in modes.chosen((), CASES["wrn"], torch.device("cuda"))]
    assert {"compiled graphs", "qclip compiled graphs", "qclip low-memory"} < {*gpu}
    assert [mode.name for mode in modes.chosen(["qclip"], CASES["mlp"], CPU)] == ["plain", "qclip"]
    assert "opacus" not in comparison.describe("cpu")


def test_modes_that_cannot_run_are_refused(without_opacus, tiny):
    with pytest.raises(ValueError, match=r"mode = 'compiled graphs' cannot run .*: it needs cuda"):
        comparison.compare(cases=["tiny"], modes=["compiled graphs"])
    with pytest.raises(ValueError, match=r"mode = 'opacus ghost' cannot run .*: it needs opacus"):
        comparison.compare(cases=["tiny"], modes=["opacus ghost"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cases": ["mpl"]}, "case = 'mpl' must be one of 'transformer'"),
        ({"modes": ["fast"]}, "mode = 'fast' must be one of 'plain'"),
        ({"dtype": "half"}, "dtype = 'half' must be one of 'float32'"),
        ({"device": "meta"}, "device = 'meta' must be cpu or cuda"),
        ({"rounds": 0}, "rounds = 0 must be >= 1"),
    ],
    ids=["case", "mode", "dtype", "device", "rounds"],
)
def test_unknown_names_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        comparison.compare(**arguments)


@pytest.mark.parametrize("name", EAGER)
def test_every_step_moves_the_parameters(name, tiny):
    work = workload(tiny, PRECISIONS["float32"], CPU)
    before = [p.detach().clone() for p in work.model.parameters()]
    modes.MODES[name].make(work)()
    assert all(not torch.equal(p, old) for p, old in zip(work.model.parameters(), before, strict=True))


def test_private_steps_are_clipped_noisy_means(tiny, monkeypatch):
    monkeypatch.setattr(modes, "NOISE_MULTIPLIER", 0.0)
    work = workload(tiny, PRECISIONS["float32"], CPU)
    modes.qclip(work)()
    norm = torch.cat([p.grad.flatten() for p in work.model.parameters()]).norm()
    assert 0 < norm <= modes.CLIP_NORM  # a sum of 4 clipped gradients over 4
    noisy = workload(tiny, PRECISIONS["float32"], CPU)
    monkeypatch.setattr(modes, "NOISE_MULTIPLIER", 1e6)
    modes.qclip(noisy)()
    assert torch.cat([p.grad.flatten() for p in noisy.model.parameters()]).norm() > 1e3


def test_peak_is_what_a_step_has_in_use():
    assert 4_000_000 <= measure.peak_bytes(lambda: torch.ones(1_000_000).sum(), CPU) < 4_100_000


def test_modes_take_turns():
    called = []
    times = measure.take_turns({"a": lambda: called.append("a"), "b": lambda: called.append("b")}, CPU, 3)
    assert called == ["a", "b"] * 3
    assert [len(each) for each in times.values()] == [3, 3]
