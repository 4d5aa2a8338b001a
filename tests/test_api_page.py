"""docs/api.md has every public name, as it is."""

import inspect
import runpy
from pathlib import Path

import pytest

import qclip

API = runpy.run_path(str(Path(__file__).parents[1] / "docs/make_api.py"))
PAGE = API["PAGE"].read_text(encoding="utf-8")


def test_the_page_is_as_it_would_be_written_now():
    assert API["page"]() == PAGE, "run `make api`"


@pytest.mark.parametrize("name", qclip.__all__)
def test_every_public_name_has_an_entry(name):
    value = getattr(qclip, name)
    level = "##" if inspect.ismodule(value) else "###"
    assert f"\n{level} qclip.{name}\n" in PAGE
    for inner, _ in API["public"](value) if inspect.ismodule(value) else ():
        assert f"\n### qclip.{inner}\n" in PAGE or f"\n### qclip.{name}.{inner}\n" in PAGE


def test_every_public_function_and_class_says_what_it_is():
    modules = [qclip, *(value for name in qclip.__all__ if inspect.ismodule(value := getattr(qclip, name)))]
    for module in modules:
        for name, value in API["public"](module):
            if inspect.isclass(value) or inspect.isroutine(value):
                assert API["paragraph"](value), f"{module.__name__}.{name} has no docstring"
