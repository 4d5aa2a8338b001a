"""The benchmark runs: one row for each case and mode, Opacus only where it is installed."""

import importlib.util

import pytest

from qclip import bench

OURS = ["plain", "qclip", "qclip per-layer"]


@pytest.fixture
def without_opacus(monkeypatch):
    """As on a machine where it is not installed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == "opacus" else found(name, *args)
    )


def assert_sound(rows, modes):
    assert [row.mode for row in rows] == modes
    assert {row.case for row in rows} == {"mlp"}
    assert {row.parameters for row in rows} == {784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10}
    for row in rows:
        assert row.ms > 0
        assert row.peak_bytes > 0
        assert row.ratio_time == pytest.approx(row.ms / rows[0].ms)
        assert row.ratio_memory == pytest.approx(row.peak_bytes / rows[0].peak_bytes)
    assert rows[0].ratio_time == rows[0].ratio_memory == 1


@pytest.mark.usefixtures("without_opacus")
def test_without_opacus():
    said = []
    assert_sound(bench.run(rounds=1, cases=["mlp"], say=said.append), OURS)
    assert said == ["measuring mlp"]
    assert "opacus" not in bench.describe("cpu")


def test_with_opacus():
    pytest.importorskip("opacus")
    assert_sound(bench.run(rounds=1, cases=["mlp"]), [*OURS, "opacus hooks", "opacus ghost"])


def test_an_unknown_case_is_refused():
    with pytest.raises(ValueError, match="case = 'mpl' must be one of 'transformer'"):
        bench.run(rounds=1, cases=["mpl"])


def test_a_device_that_cannot_be_measured_is_refused():
    with pytest.raises(ValueError, match="device = 'meta' must be cpu or cuda"):
        bench.run("meta", rounds=1)


@pytest.mark.parametrize("case", bench.CASES, ids=lambda case: case.name)
def test_every_case_has_one_loss_per_example(case):
    inputs = case.inputs()[:2]
    losses = case.losses(case.model()(inputs), case.targets(inputs))
    assert losses.shape == (2,)
    assert losses.requires_grad
