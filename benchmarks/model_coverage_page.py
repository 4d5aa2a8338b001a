"""The table of `coverage`: what is exact, slow, refused, or could not be built, and why."""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final


@dataclass(frozen=True)
class Row:
    """What was found about a class of models."""

    name: str
    config: str
    status: str
    """exact, differs, refused, unbuilt (no tiny model could be run), failed, crashed or late."""
    reason: str = ""
    """Why it was refused, could not be built, or is slow."""
    mixes: float | None = None
    """For refused classes: the relative difference between an example's gradient alone and in the batch."""
    sum_error: float = 0.0
    norm_error: float = 0.0
    proofs: int = 0
    calls: int = 0
    said: str = ""
    """The warnings about proofs, and about examples that are run one at a time."""
    first: float = 0.0
    """Process time of the first call, in plain steps."""
    fifth: float = 0.0
    new_length: float = 0.0
    """Process time of a first call on texts of another length; 0 where that does not apply."""
    seen_length: float = 0.0
    plain: float = 0.0
    """Process seconds of a plain forward and backward pass."""
    parameters: int = 0

    def with_reason(self, reason: str) -> "Row":
        """Return the row with a reason."""
        return replace(self, reason=reason)

    def __str__(self) -> str:
        if self.status in ("exact", "differs"):
            errors = f"sums {self.sum_error:.1e}, norms {self.norm_error:.1e}"
            said = ", one at a time" if self.is_alone else ", said" if self.said else ""
            times = f"first call {self.first:.0f}, fifth {self.fifth:.1f} plain steps"
            return f"{self.name}: {self.status}, {errors}; {times}; {self.proofs} proofs{said}"
        mixes = "" if self.mixes is None else f" (examples differ by {self.mixes:.1e})"
        return f"{self.name}: {self.status}{mixes}: {self.reason.splitlines()[0] if self.reason else ''}"

    @property
    def is_alone(self) -> bool:
        """Whether examples are run one at a time."""
        return ALONE in self.said

    @property
    def is_slow(self) -> bool:
        """Whether an exact class costs many plain steps at every step."""
        return self.status == "exact" and (self.fifth > SLOW or "proven at every step" in self.said)

    @property
    def needless(self) -> bool:
        """Whether a refused class looks as if its examples did not mix."""
        return self.mixes is not None and self.mixes < MIXING and not re.search(STATE, self.reason)


ALONE: Final = "one at a time"
"""What a warning says of examples that are run so."""
SLOW: Final = 20.0
"""A call that takes more than so many plain steps is slow."""
MIXING: Final = 1e-3
"""The least difference between an example's gradient alone and in a batch that is more than rounding."""
STATE: Final = "keeps what the data did|changed in the forward pass|wrote raw gradients"
"""What is refused whether or not examples mix."""
_HEAD: Final = """# Coverage

Every class of models that transformers' auto classes know, made tiny and clipped in training mode on a padded batch of
{size} examples: `make coverage` measures them ([CONTRIBUTING](../CONTRIBUTING.md)) and writes this page. *Exact* means
that all clipped sums and every norm equal autograd's, one example at a time, with the same random numbers, up to a
relative error of {exact:g}. Steps are counted in the process time of a plain forward and backward pass of the same tiny
model: what is measured is overhead, not arithmetic. A sweep goes on where it stopped, and rows that a change concerns
are measured again: rows may be of different commits, and single rows are off where the machine was busy.

transformers {transformers}, torch {torch}, {date}.
"""


def page(rows: Sequence[Row], left_out: Sequence[str] = (), note: str = "", **about: Any) -> str:
    """Return the page, in Markdown.

    Args:
        rows: What was found.
        left_out: The classes that were not run.
        note: What to say of these.
        about: What the head of the page says: size, exact, transformers, torch, date.
    """
    by_status: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.name):
        by_status.setdefault(row.status, []).append(row)
    exact, refused = by_status.get("exact", []), by_status.get("refused", [])
    slow, needless = [row for row in exact if row.is_slow], [row for row in refused if row.needless]
    alone = [row for row in exact if row.is_alone and not row.is_slow]
    rightly = [row for row in refused if not row.needless]
    unmeasured = [row for name in ("unbuilt", "failed", "crashed", "late") for row in by_status.get(name, [])]
    groups = {
        "exact": [row for row in exact if not row.is_slow and not row.is_alone],
        "exact, one example at a time": alone,
        f"exact, and more than {SLOW:g} plain steps in the fifth call, or a proof at every step": slow,
        "differ from autograd": by_status.get("differs", []),
        "refused, though examples do not seem to mix": needless,
        "refused": rightly,
        "not measured": unmeasured,
        "not run": left_out,
    }
    sections = [
        _HEAD.format(**about),
        _table(("outcome", "classes"), [(name, len(found)) for name, found in groups.items()]),
        "## Time",
        _times(exact),
        "## Slow",
        _table(("class", "fifth call", "why"), [(row.name, f"{row.fifth:.0f}", _why_slow(row)) for row in slow]),
        "## One example at a time",
        "As many forward and backward passes as a batch has examples, with a warning that says why.",
        ", ".join(f"{row.name} ({row.fifth:.1f})" for row in alone) + "." if alone else "None.",
        "## Different from autograd",
        _table(("class", "sums", "norms"),
               [(row.name, f"{row.sum_error:.1e}", f"{row.norm_error:.1e}") for row in by_status.get("differs", [])]),
        "## Refused, though examples do not seem to mix",
        "In evaluation mode an example has the same gradient alone and in the batch.",
        _by_reason(needless),
        "## Refused",
        _by_reason(rightly),
        "## Not measured",
        "No tiny model was found, another package is needed, or torch itself cannot train it.",
        _by_reason(unmeasured),
        "## Not run",
        note if left_out else "",
        ", ".join(left_out) + "." if left_out else "None.",
        "## Exact",
        ", ".join(row.name for row in exact if row not in slow and row not in alone) + ".",
    ]  # fmt: skip
    return "\n\n".join(section.strip() for section in sections if section.strip()) + "\n"


def _times(exact: Sequence[Row]) -> str:
    measures = {
        "first call": [row.first for row in exact],
        "fifth call": [row.fifth for row in exact],
        "fifth call, proven once": [row.fifth for row in exact if not row.is_slow],
        "first call at another length": [row.new_length for row in exact if row.new_length],
        "third call at that length": [row.seen_length for row in exact if row.seen_length],
    }
    lines = []
    for name, values in measures.items():
        if len(values) > 1:
            low, *_, high = statistics.quantiles(values, n=10)
            middle = statistics.median(values)
            lines.append((name, len(values), f"{middle:.1f}", f"{low:.1f} to {high:.1f}", f"{max(values):.0f}"))
    return _table(("plain steps", "classes", "median", "10 to 90 %", "most"), lines)


def _why_slow(row: Row) -> str:
    if row.proofs >= row.calls:
        return "proven at every step" + (": " + _cell(row.said) if row.said else ", in silence")
    return _cell(row.reason) or f"{row.proofs} proofs in {row.calls} calls"


def _by_reason(rows: Sequence[Row]) -> str:
    """Return a table of reasons, each with its classes; names of parameters in reasons are left out."""
    classes: dict[str, list[str]] = {}
    for row in rows:
        reason = row.reason.splitlines()[0] if row.reason.strip() else row.status
        reason = re.sub(r"'[\w.]+'(, '[\w.]+')*", "...", re.sub(r"\b(\w+\.){2,}\w+|\d+", "...", reason))
        classes.setdefault(_cell(reason, 160), []).append(row.name)
    order = sorted(classes, key=lambda reason: -len(classes[reason]))
    lines = [(reason, f"{len(classes[reason])}: " + ", ".join(classes[reason])) for reason in order]
    return _table(("reason", "classes"), lines)


def _cell(text: str, most: int = 240) -> str:
    text = " ".join(text.replace("|", "/").replace("`", "").split())
    return text if len(text) <= most else text[: most - 4] + " ..."


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return "None."
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
