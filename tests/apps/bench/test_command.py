"""``qclip bench``: the table, the JSON, the figure."""

import json

import pytest

from qclip.apps.bench import comparison, growth
from qclip.apps.bench.growth import Shape, Sweep
from qclip.apps.cli import main

KEYS = {
    "case", "mode", "dtype", "ms", "ms_low", "ms_high", "peak_bytes", "reserved_bytes", "ratio_time", "ratio_memory",
    "parameters", "compile_seconds",
}  # fmt: skip
QUICK = ["bench", "--case", "tiny", "--mode", "plain", "--mode", "qclip", "--rounds", "1"]


def test_json(tiny, capsys):
    assert main([*QUICK, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["mode"] for row in rows] == ["plain", "qclip"]
    assert all(set(row) == KEYS for row in rows)


def test_table(tiny, capsys):
    assert main([*QUICK, "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "bfloat16" in out
    assert "tiny" in out
    assert "qclip" in out


def test_failures_are_shown_and_kept_out_of_the_json(tiny, capsys, monkeypatch):
    def broken(mode, *rest):
        raise RuntimeError("[no] rule")

    monkeypatch.setattr(comparison, "_prepare", broken)
    assert main(QUICK) == 0
    assert "no row for tiny, qclip: RuntimeError: [no] rule" in capsys.readouterr().out
    assert main([*QUICK, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == []
    assert "no row for tiny, plain" in captured.err


def test_growth(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    sweep = Sweep(Shape(batch=2, layers=1, width=8, positions=4), {"batch": (2, 4)})
    monkeypatch.setitem(growth.SWEEPS, "cpu", sweep)
    path = tmp_path / "growth.png"
    assert main(["bench", "--growth", "--rounds", "1", "--out", str(path)]) == 0
    assert "exponent" in capsys.readouterr().out
    assert path.read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "--growth", "--rounds", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [set(row) for row in rows] == [{"factor", "value", "mode", "ms"}] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "tiney"], "case = 'tiney' must be one of"),
        (["--growth", "--large"], "exclude each other"),
        (["--out", "x.png"], "only --growth draws a figure"),
        (["--large"], "device = 'cpu' must be cuda"),
    ],
    ids=["case", "two tasks", "out", "large on a CPU"],
)
def test_refusals(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
