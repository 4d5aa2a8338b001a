import json
import subprocess
import sys

import pytest

from made_runs import made_run
from qclip.apps.cli import main


def run(capsys, *arguments):
    status = main(["report", *map(str, arguments)])
    output = capsys.readouterr()
    return status, output.out, output.err


def test_one_run_gets_its_report(capsys, tmp_path):
    status, out, err = run(capsys, made_run(tmp_path))
    assert (status, err) == (0, "")
    assert (tmp_path / "report.html").exists()
    for shown in ("PrivateQuantile", "3.163", "0.39", "report.html"):
        assert shown in out


def test_several_are_compared(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [made_run(tmp_path / "low"), made_run(tmp_path / "high", noise_multiplier=7.5)]
    status, out, _ = run(capsys, *runs)
    assert status == 0
    assert (tmp_path / "comparison.html").exists()
    assert not (tmp_path / "low" / "report.html").exists()
    assert "7.5" in out
    assert "the same for all: task digits" in out


def test_a_table_is_as_wide_as_it_must_be(capsys, tmp_path):
    name = "a-name-that-is-far-too-long-for-a-terminal-of-eighty-columns-and-then-some"
    _, out, _ = run(capsys, made_run(tmp_path / name), made_run(tmp_path / "b"), "--out", tmp_path / "page.html")
    assert name in out


def test_a_broken_run_is_named_and_the_others_compared(capsys, tmp_path):
    runs = [made_run(tmp_path / "a"), tmp_path / "nothing", made_run(tmp_path / "c")]
    status, out, err = run(capsys, *runs, "--out", tmp_path / "page.html")
    assert status == 1
    assert "nothing" in err.replace("\n", "")
    assert "a  " in out
    assert "nothing" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_to_report(capsys, tmp_path, count):
    missing = [tmp_path / f"missing{index}" for index in range(count)]
    status, out, err = run(capsys, *missing, "--out", tmp_path / "page.html")
    assert (status, out) == (2, "")
    assert all(path.name in err.replace("\n", "") for path in missing)
    assert not (tmp_path / "page.html").exists()


def test_no_folder_is_refused(capsys):
    status, _, err = run(capsys)
    assert status == 2
    assert "no folder of a run was given" in err


def test_json(capsys, tmp_path):
    page = tmp_path / "page.html"
    status, out, _ = run(capsys, made_run(tmp_path / "a"), tmp_path / "nothing", "--json", "--out", page)
    found = json.loads(out)
    assert status == 1
    assert found["page"] == str(page)
    assert [each["run"] for each in found["runs"]] == ["a"]
    assert [each["run"] for each in found["broken"]] == ["nothing"]


def test_without_matplotlib_there_is_a_table_and_a_remedy(tmp_path):
    runs = [str(made_run(tmp_path / "a")), str(made_run(tmp_path / "b"))]
    code = "import sys; sys.modules['matplotlib'] = None; from qclip.apps.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "report", *runs, "--out", str(tmp_path / "page.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "0.39" in done.stdout
    assert "matplotlib is not installed; pip install 'qclip[" in done.stderr
    assert "Traceback" not in done.stderr
