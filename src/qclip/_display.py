"""Tables, for the terminal and for notebooks."""

from collections.abc import Iterable, Sequence
from html import escape

Row = Sequence[str]


def text_table(header: Row, rows: Iterable[Row]) -> str:
    """Return a table as text, its columns aligned.

    >>> print(text_table(("name", "size"), [("weight", "2x8"), ("bias", "2")]))
    name    size
    weight  2x8
    bias    2
    """
    lines = [header, *rows]
    widths = [max(len(line[k]) for line in lines) for k in range(len(header))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def html_table(header: Row, rows: Iterable[Row], *, caption: str = "") -> str:
    """Return a table as HTML, as notebooks show it; an empty header is left out.

    >>> html_table((), [("steps", "3")])
    '<table><tr><td style="text-align: left">steps</td><td style="text-align: left">3</td></tr></table>'
    """
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    head = f"<thead><tr>{_cells('th', header)}</tr></thead>" if header else ""
    body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
    return f"<table>{title}{head}{body}</table>"


def _cells(tag: str, row: Row) -> str:
    return "".join(f'<{tag} style="text-align: left">{escape(cell)}</{tag}>' for cell in row)
