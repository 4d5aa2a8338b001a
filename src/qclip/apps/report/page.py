"""Self-contained HTML pages: no script, no font and no image outside the file."""

import base64
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from latex2mathml.converter import convert

OPERATORS = {"||": "‖", "grad f": "∇f", "<=": "≤", "->": "→", "^2": "²", "sqrt ": "√"}
GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "Gamma": "Γ", "delta": "δ", "epsilon": "ε", "eps": "ε", "theta": "θ",
    "kappa": "κ", "lambda": "λ", "nu": "ν", "xi": "ξ", "rho": "ρ", "sigma": "σ", "tau": "τ", "psi": "ψ", "omega": "ω",
}  # fmt: skip

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2329; max-width: 62rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; }
p.lead, p.facts { color: #55606b; } p.facts { font-size: .85rem; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid #e3e7eb; vertical-align: top; }
div.scroll { overflow-x: auto; margin: .5rem 0; } table.narrow { width: auto; }
th { font-weight: 600; color: #55606b; } .number { text-align: right; font-variant-numeric: tabular-nums; }
dl { display: grid; grid-template-columns: 7rem 1fr; gap: .15rem .8rem; margin: .6rem 0; }
dt { color: #55606b; } dd { margin: 0; }
code { font-size: .88em; background: #f2f4f6; padding: 0 .25em; border-radius: 3px; }
img { max-width: 100%; margin: .4rem 0; border: 1px solid #eef0f2; }
div.formula { overflow: auto hidden; margin: .5rem 0; padding: .2rem 0; } div.formula math { font-size: 1.1rem; }
a { color: #2563a8; text-decoration: none; }
.tag { display: inline-block; border-radius: 3px; padding: 0 .5em; font-size: .82rem; font-weight: 600; color: #fff; }
.holds { background: #26774a; } .erratum { background: #a65d15; } .fails { background: #c23b3b; }
p a, td a, li a { text-decoration: underline; } dd { overflow-wrap: anywhere; }
@media (max-width: 40rem) { main dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; }
  .picture img { max-width: none; } }
@media screen and (prefers-color-scheme: dark) { html { background: #fff; filter: invert(.9) hue-rotate(180deg); } }
"""
"""A dark page is the negative of the light one, pictures included, with the hues turned back."""


def page(title: str, body: Iterable[str]) -> str:
    """Return a whole document around the given fragments."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return (
        f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head>'
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def formula(tex: str) -> str:
    """Return a formula as MathML, which browsers draw themselves."""
    return f'<div class="formula">{convert(tex, display="block")}</div>'


def symbols(text: str) -> str:
    """Return plain text with the names of Greek letters and operators as symbols.

    >>> symbols("||grad f||^2 <= sigma^2 psi_q(p) / p^2, as gamma -> 0")
    '‖∇f‖² ≤ σ² ψ_q(p) / p², as γ → 0'
    """
    for name, symbol in OPERATORS.items():
        text = text.replace(name, symbol)
    return re.sub(r"(?<![A-Za-z-])(" + "|".join(GREEK) + r")(?![A-Za-z-])", lambda found: GREEK[found[0]], text)


def tag(verdict: str, color: str = "") -> str:
    """Return a verdict as a tag, in its own colour or in that of another verdict."""
    return f'<span class="tag {escape(color or verdict)}">{escape(verdict)}</span>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, narrow: bool = False) -> str:
    """Return a table of HTML fragments, which scrolls where the page is too narrow for it.

    Cells that begin with a digit align right, and so does the header of a column of them.

    Args:
        header: The names of the columns, as text.
        rows: The cells, as HTML.
        narrow: Whether the table is only as wide as its content.
    """
    rows = [list(row) for row in rows]
    columns = [[row[k] for row in rows if row[k]] for k in range(len(header))]
    numeric = [bool(column) and all(map(_is_number, column)) for column in columns]
    head = "".join(
        f'<th scope="col"{_class(right)}>{escape(cell)}</th>' for cell, right in zip(header, numeric, strict=True)
    )
    lines = "".join("<tr>" + "".join(f"<td{_class(_is_number(x))}>{x}</td>" for x in row) + "</tr>" for row in rows)
    kind = ' class="narrow"' if narrow else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit()


def _class(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def caption(*sentences: str) -> str:
    """Return the caption of a figure, from sentences in HTML; empty ones are left out."""
    return f'<p class="caption">{" ".join(filter(None, sentences))}</p>'


def image(path: Path, alternative: str) -> str:
    """Return a PNG image embedded in the page; on a narrow page it scrolls rather than shrinks."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<div class="scroll picture"><img alt="{escape(alternative)}" src="data:image/png;base64,{data}"></div>'


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a list of terms and texts, escaped; pairs without a text are left out."""
    return "<dl>" + "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in pairs if text) + "</dl>"
