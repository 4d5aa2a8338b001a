"""The script that puts tables into the page on accuracy."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
filled = runpy.run_path(str(DOCS / "fill_accuracy.py"))["filled"]

PAGE = "# Page\n\n<!-- one -->\nold\n<!-- end of one -->\n\ntext\n\n<!-- two -->\n<!-- end of two -->\n"


def test_a_table_goes_to_its_own_place():
    once = filled(PAGE, "one", "| a \\1 |\n")
    assert once == PAGE.replace("old", "\n| a \\1 |\n")
    assert filled(once, "one", "| a \\1 |") == once
    assert "text" in filled(once, "two", "| b |")


def test_a_page_without_a_place_is_refused():
    with pytest.raises(SystemExit, match="no place for 'three'"):
        filled(PAGE, "three", "| a |")


def test_every_place_of_the_page_has_a_table():
    page = (DOCS / "accuracy.md").read_text(encoding="utf-8")
    names = [line[5:-4] for line in page.splitlines() if line.startswith("<!-- ") and "end of" not in line]
    assert names
    for name in names:
        assert "|" in page.split(f"<!-- {name} -->")[1].split(f"<!-- end of {name} -->")[0]
