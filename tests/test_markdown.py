"""The tool that wraps the Markdown pages leaves what they say alone."""

import re
import runpy
from pathlib import Path

import pytest

WRAP = runpy.run_path(str(Path(__file__).parents[1] / "docs/wrap.py"))
wrapped, WIDTH = WRAP["wrapped"], WRAP["WIDTH"]

KEPT = """\
# A heading of more than a hundred columns is one line, however long it is, since Markdown has no other way

| a table | has | rows of any length | since a row is a line | and a cell cannot be wrapped at all |
|---|---|---|---|---|

    an indented block of code keeps its lines, even where they are longer than a hundred columns are

```python
a_fenced_block = "keeps its lines, even where they are longer than a hundred columns, and its    spaces"
```

$$\\text{a formula on its own line} \\le \\text{keeps the line that it was written on, whatever its length is}$$
"""


def words(page):
    return re.sub(r"\s+", " ", page)


def test_code_tables_headings_and_formulas_keep_their_lines():
    assert wrapped(KEPT) == KEPT


@pytest.mark.parametrize("prefix", ["", "- ", "12. "])
def test_prose_is_wrapped_under_its_own_indent(prefix):
    lines = wrapped(prefix + "word " * 60).splitlines()
    assert max(map(len, lines)) <= WIDTH < len(lines[0]) + len(" word")
    assert all(line.startswith(" " * len(prefix) + "word") for line in lines[1:])


@pytest.mark.parametrize("whole", ["`inline code`", "$a + b$", "![an image](of.png)", "[a](link.md), and - a dash"])
def test_no_line_ends_inside_what_belongs_together(whole):
    for length in range(70, 105):
        page = wrapped("x" * length + " " + whole + " end\n")
        assert words(page) == "x" * length + " " + whole + " end "
        assert whole in page or ("dash" in whole and "\n-" not in page)


@pytest.mark.parametrize("page", WRAP["PAGES"], ids=lambda page: page.name)
def test_wrapping_changes_line_ends_only_and_does_it_once(page):
    text = page.read_text()
    once = wrapped(text)
    assert words(once) == words(text)
    assert wrapped(once) == once
