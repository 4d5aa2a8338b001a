"""``qclip bench``: the table and the JSON."""

import json

import pytest

from qclip.apps.bench import comparison
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "tiney"], "case = 'tiney' must be one of"),
        (["--mode", "plane"], "mode = 'plane' must be one of"),
    ],
    ids=["case", "mode"],
)
def test_refusals(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
