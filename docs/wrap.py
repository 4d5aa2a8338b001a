"""Wrap the prose of the Markdown pages at 100 columns.

    python docs/wrap.py            # rewrites the pages
    python docs/wrap.py --check    # lists the pages that are not wrapped, and fails if there is one

Tables, code, headings, images and displayed formulas keep their lines. General formatters escape the formulas of
docs/theory.md, so the pages have this one.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
WIDTH = 100

_LIST_ITEM = re.compile(r" *([-*+]|\d+[.)]) +(?=\S)")
_KEPT = re.compile(r"\s*(\||#|\$\$|!\[|<)| {4}")
# A word may hold spaces inside inline code, an inline formula or an image.
_WORD = re.compile(r"(?:(`+)(?:(?!`).)+\1|\$[^$]+\$|!\[[^\]]*\]\([^)]*\)|\S)+")
# At the start of a line these words would open a list, a heading, a quotation, a table or a formula.
_OPENS_A_BLOCK = re.compile(r"([-*+]|\d+[.)]|=+|-+)$|[#>|<]|\$\$|```|~~~")


def wrapped(page: str) -> str:
    """Return the page with its paragraphs and list items wrapped."""
    lines: list[str] = []
    paragraph: list[str] = []
    in_fence = False

    def flush() -> None:
        if paragraph:
            lines.extend(_fill(paragraph))
            paragraph.clear()

    for line in page.splitlines():
        is_fence = line.lstrip().startswith(("```", "~~~"))
        continues = paragraph and line.startswith("  ")
        if in_fence or is_fence or not line.strip() or (_KEPT.match(line) and not continues):
            flush()
            lines.append(line)
            in_fence ^= is_fence
        else:
            if _LIST_ITEM.match(line):
                flush()
            paragraph.append(line)
    flush()
    return "\n".join(lines) + "\n"


def _fill(paragraph: list[str]) -> list[str]:
    text = " ".join(paragraph)
    item = _LIST_ITEM.match(text)
    first = item.group() if item else text[: len(text) - len(text.lstrip())]
    words: list[str] = []
    for match in _WORD.finditer(text, len(first)):
        if words and _OPENS_A_BLOCK.match(match.group()):
            words[-1] += " " + match.group()
        else:
            words.append(match.group())
    lines = [first + words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) <= WIDTH:
            lines[-1] += " " + word
        else:
            lines.append(" " * len(first) + word)
    return lines


def main() -> int:
    """Wrap all pages, or check them; return the exit status."""
    ragged = [page for page in PAGES if wrapped(page.read_text(encoding="utf-8")) != page.read_text(encoding="utf-8")]
    for page in ragged:
        if "--check" in sys.argv[1:]:
            print(f"{page.relative_to(ROOT)} is not wrapped at {WIDTH} columns: run `make format`")
        else:
            page.write_text(wrapped(page.read_text(encoding="utf-8")), encoding="utf-8")
    return int(bool(ragged) and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
