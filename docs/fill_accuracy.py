"""Put the tables of `qclip experiment accuracy` into docs/accuracy.md.

    python docs/fill_accuracy.py out/accuracy      # a folder with a folder for each data set, each with its table.md

A table takes the place of what is between <!-- NAME --> and <!-- end of NAME -->, where NAME is that of its folder.
"""

import re
import runpy
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("accuracy.md")


def filled(page: str, name: str, table: str) -> str:
    """Return the page with this table in its place; refuse a page that has no place for it."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    place = re.compile(f"{re.escape(start)}\n.*?{re.escape(end)}", re.DOTALL)
    if not place.search(page):
        raise SystemExit(f"{PAGE.name} has no place for {name!r}; write a section with the lines {start} and {end}")
    return place.sub(lambda _: f"{start}\n\n{table.strip()}\n\n{end}", page)


def main(folder: Path) -> None:
    """Fill the page from every table below the folder."""
    wrapped = runpy.run_path(str(PAGE.with_name("wrap.py")))["wrapped"]
    page = PAGE.read_text(encoding="utf-8")
    for path in sorted(folder.glob("*/table.md")):
        page = filled(page, path.parent.name, path.read_text(encoding="utf-8"))
    PAGE.write_text(wrapped(page), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
