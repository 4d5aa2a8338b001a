"""Every fault can still be planted, and names tests and audits that exist; `make mutants` runs them."""

import ast
from functools import cache

import pytest

from audit.holes import HOLES, SOUND
from mutants import run
from mutants.catalogue import MUTANTS
from mutants.mutant import ROOT, Edit, copied

ALL = [mutant for mutants in MUTANTS.values() for mutant in mutants]
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")


@cache
def functions(file):
    """The tests of a file, those that are marked slow left out."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {f.name for f in found if "pytest.mark.slow" not in map(ast.unparse, f.decorator_list)}


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return copied(tmp_path_factory.mktemp("sources"))


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_it_can_be_planted_and_names_what_must_notice_it(mutant, package):
    before = {edit.file: (package / edit.file).read_text(encoding="utf-8") for edit in mutant.edits}
    try:
        mutant.plant(package)
        for file, text in before.items():
            planted = (package / file).read_text(encoding="utf-8")
            assert planted != text
            ast.parse(planted)
    finally:
        for file, text in before.items():
            (package / file).write_text(text, encoding="utf-8")
    assert mutant.tests or mutant.replay or mutant.audit
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert name in functions(file), test
    assert mutant.replay in {"", *HOLES, *SOUND}
    assert mutant.audit in ("", "white box")


def test_names_are_unique_and_on_the_page():
    names = [mutant.name for mutant in ALL]
    assert len(set(names)) == len(names) >= 30
    assert [name for name in names if f"| {name} |" not in PAGE] == []
    assert f"Caught / planted: {len(names)} / {len(names)}." in PAGE


def test_every_hole_of_the_review_is_reopened():
    names = " ".join(mutant.name for mutant in ALL)
    assert all(f"hole {number}:" in names for number in range(1, 10))


def test_a_text_that_is_gone_or_there_twice_is_refused(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    for old in ("x = 1\n", "y"):
        with pytest.raises(ValueError, match="not once"):
            Edit("a.py", old, "").applied(tmp_path)


def test_the_table_counts_what_survives():
    first, second, *others = ALL
    outcomes = [run.Outcome(first, (), ("a test",)), *(run.Outcome(m, ("f.py::test_x",), ()) for m in others)]
    text = run.table({outcome.mutant.name: run.words(outcome) for outcome in outcomes})
    assert f"| {second.name} | **not run** |" in text
    assert run.table(run.earlier(text)) == text
    assert f"| {first.name} | **survives** (a test) |" in text
    assert f"| {others[0].name} | `test_x` |" in text
    assert f"Caught / planted: {len(others)} / {len(ALL)}." in text
