"""Growth: rows, exponents and the figure."""

import itertools
import json

import pytest

import growth
from growth import Growth, GrowthRow, Shape, Sweep

SWEEP = Sweep(Shape(batch=2, layers=1, width=8, positions=4), {"batch": (2, 4), "layers": (1, 2)})


def law(modes=("plain", "qclip")):
    return Growth(
        tuple(
            GrowthRow(factor, value, mode, 3.0 * value**power)
            for factor, power in (("batch", 1), ("width", 2))
            for value in (2, 4, 8)
            for mode in modes
        )
    )


def test_the_base_is_measured_once():
    said = []
    found = growth.measure_growth(sweep=SWEEP, rounds=1, say=said.append)
    assert len(said) == 3
    rows = [(row.factor, row.value, row.mode) for row in found.rows]
    assert rows == [(f, v, m) for f, vs in SWEEP.values.items() for v in vs for m in ("plain", "qclip")]
    base = [row.ms for row in found.rows if (row.factor, row.value) in (("batch", 2), ("layers", 1))]
    assert base[:2] == base[2:]
    assert min(base) > 0


def test_exponents_of_a_power_law():
    assert law(["plain"]).exponents == pytest.approx({("batch", "plain"): 1.0, ("width", "plain"): 2.0})


@pytest.mark.parametrize("device", growth.SWEEPS)
def test_every_factor_is_doubled_from_the_least_on(device):
    sweep = growth.SWEEPS[device]
    for factor, values in sweep.values.items():
        assert [b / a for a, b in itertools.pairwise(values)] == [2, 2, 2]
        assert vars(sweep.base)[factor] in values


def test_figure():
    pytest.importorskip("matplotlib")
    drawn = growth.figure(law())
    assert [ax.get_xlabel() for ax in drawn.axes] == ["batch", "width"]
    assert all((ax.get_xscale(), ax.get_yscale()) == ("log", "log") for ax in drawn.axes)
    labels = [text.get_text() for text in drawn.axes[1].get_legend().get_texts()]
    assert labels == ["plain: 2.00", "qclip: 2.00"]


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="mode = 'fast' must be one of"):
        growth.measure_growth(modes=["fast"])


def test_the_command(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    sweep = Sweep(Shape(batch=2, layers=1, width=8, positions=4), {"batch": (2, 4)})
    monkeypatch.setitem(growth.SWEEPS, "cpu", sweep)
    path = tmp_path / "growth.png"
    growth.main(["--rounds", "1", "--out", str(path)])
    assert "exponent" in capsys.readouterr().out
    assert path.read_bytes().startswith(b"\x89PNG")
    growth.main(["--rounds", "1", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [set(row) for row in rows] == [{"factor", "value", "mode", "ms"}] * 4
