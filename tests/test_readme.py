"""The code of README and of the pages runs, and their commands exist."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def python_blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run(code, capsys):
    exec(compile(code, "README.md", "exec"), {})
    return capsys.readouterr().out


@pytest.mark.smoke
def test_the_ten_lines_run(capsys):
    pytest.importorskip("sklearn")
    torch.manual_seed(0)
    (code,) = python_blocks(README)
    printed = run(code, capsys)
    accuracy, epsilon = map(float, re.findall(r"accuracy ([\d.]+) at epsilon ([\d.]+)", printed)[0])
    assert accuracy > 0.8
    assert epsilon <= 3


def test_the_engine_page_runs(capsys):
    (code,) = python_blocks((ROOT / "docs/engine.md").read_text())
    assert "0.weight" in run(code, capsys)


def test_the_page_of_tables_runs(capsys, tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    (code,) = python_blocks((ROOT / "docs/tables.md").read_text())
    printed = run(code, capsys)
    accuracy, epsilon = map(float, re.findall(r"accuracy ([\d.]+) at epsilon ([\d.]+)", printed)[0])
    assert accuracy > 0.6  # who knows the law reaches 0.68
    assert epsilon <= 3
    assert "('no', 'yes')" in printed


@pytest.mark.smoke
def test_the_theory_page_runs(capsys):
    (code,) = python_blocks((ROOT / "docs/theory.md").read_text())
    printed = run(code, capsys)
    measured, guaranteed = map(float, re.findall(r"measured ([\d.]+), guaranteed ([\d.]+)", printed)[0])
    assert measured <= guaranteed


def test_the_federated_page_runs(capsys):
    torch.manual_seed(0)
    code, *_ = python_blocks((ROOT / "docs/federated.md").read_text())
    epsilon, tau = map(float, re.findall(r"epsilon ([\d.]+), clip norm ([\d.]+)", run(code, capsys))[0])
    assert 0 < epsilon < 10
    assert 0 < tau < 10


def test_make_targets_named_in_the_documents_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^ {4}make ([a-z-]+)", README + (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def anchors(page):
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page", sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]), ids=lambda page: page.name
)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        if "://" not in target:
            aim = page.parent / target if target else page
            assert aim.exists(), target
            assert not anchor or anchor in anchors(aim), f"{target}#{anchor}"
