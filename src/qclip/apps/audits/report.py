"""The page of ``qclip audit``: bounds against claims, the attacker's rates, and what was found."""

import platform
from collections.abc import Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path

from matplotlib.figure import Figure

from qclip.apps.audits.suite import AUDITS, Row, trade_off
from qclip.apps.report import page
from qclip.apps.report.style import BLUE, CYCLE, GREY, ORANGE, label, new_figure, save

TITLES = {
    "replay": "Replay on neighbouring data sets",
    "canary": "A canary in every step",
    "one-run": "Many canaries in one run",
    "foreign": "Faults of other libraries",
}
LEADS = {
    "replay": "The same training on data sets that differ in one example, with identical randomness. Every raw sum "
    "is held against its bound, all releases of a step against what is accounted for, and everything public must be "
    "equal.",
    "canary": "An attacker sees the joint release of gradient, counts and slack at every step, knows all but the "
    "noise, and guesses whether an example took part. The lower bound on epsilon may not exceed the claim.",
    "one-run": "Thousands of canaries take part in one training by the toss of a coin each; the attacker guesses about "
    "those where it is surest.",
    "foreign": "Each fault is run in its library where that is installed, and otherwise restated in a few lines; it is "
    "held against the claim that its library would make.",
}


def write(rows: Sequence[Row], out: Path, seconds: float) -> Path:
    """Write figures and report.html to a folder; return the page."""
    figures = out / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, tuple[Path, str]] = {}
    if any(row.audit in ("canary", "one-run") for row in rows):
        save(bounds_figure(rows), figures / "audit-bounds.png")
        drawn["bounds"] = (figures / "audit-bounds.png", "lower bounds on epsilon against the claims, all below them")
    if any(row.curves for row in rows):
        save(rates_figure(rows), figures / "audit-rates.png")
        drawn["rates"] = (figures / "audit-rates.png", "true positives at each rate of false positives, and the most")
    path = out / "report.html"
    path.write_text(_page(rows, drawn, seconds), encoding="utf-8")
    return path


def bounds_figure(rows: Sequence[Row]) -> Figure:
    """Draw the lower bounds of each audit against the claims."""
    figure, (ax,) = new_figure()
    most = max(row.epsilon or 0 for row in rows if row.audit in ("canary", "one-run"))
    ax.plot([0, most], [0, most], color=GREY, linewidth=1, label="the claim")
    kinds = (("canary", "many runs", "o", BLUE), ("one-run", "one run", "s", ORANGE))
    for audit, name, marker, color in kinds:
        points = [
            (row.epsilon, row.lower_bound)
            for row in rows
            if row.audit == audit and row.subject.startswith("balanced") and row.lower_bound is not None
        ]
        if points:
            x, y = zip(*points, strict=True)
            ax.plot(x, y, marker=marker, color=color, linewidth=1.4, label=name)
    label(ax, "epsilon that is claimed", "lower bound on epsilon, 95 %")
    return figure


def rates_figure(rows: Sequence[Row]) -> Figure:
    """Draw the attacker's true positives against its false positives, beside the most that the claim allows."""
    figure, (ax,) = new_figure()
    shown = [row for row in rows if row.curves and row.subject.startswith("balanced")]
    for color, row in zip(CYCLE, shown, strict=False):
        rates = trade_off(row)
        ax.plot(rates["at"], rates["allowed"], color=color, linewidth=0.9, linestyle="--")
        ax.plot(rates["false_positives"], rates["true_positives"], color=color, label=f"epsilon {row.epsilon:g}")
    ax.set_xscale("log")
    ax.set_xlim(1e-3, 1)
    label(ax, "false positives", "true positives", "dashed: the most that the claim allows")
    return figure


def _page(rows: Sequence[Row], drawn: dict[str, tuple[Path, str]], seconds: float) -> str:
    bad = sum(row.verdict in ("fails", "missed") for row in rows)
    packages = ", ".join(f"{name} {version(name)}" for name in ("qclip", "torch", "dp-accounting"))
    verdict = (
        "No audit exceeds its claim, and every fault is caught." if not bad else f"{bad} of {len(rows)} rows fail."
    )
    body = [
        "<h1>Audit</h1>",
        f'<p class="lead">{escape(verdict)} Bounds hold with a confidence of 95 % each.</p>',
        f'<p class="facts">{escape(f"{seconds:.0f} s on Python {platform.python_version()}, {packages}.")}</p>',
    ]
    for audit in AUDITS:
        chosen = [row for row in rows if row.audit == audit]
        if not chosen:
            continue
        body += [f"<h2>{TITLES[audit]}</h2>", f"<p>{escape(LEADS[audit])}</p>"]
        for figure in {"canary": ("bounds", "rates")}.get(audit, ()):
            if figure in drawn:
                body.append(page.image(*drawn[figure]))
        cells = [
            (
                page.tag(row.verdict, "holds" if row.verdict in ("holds", "caught") else "fails"),
                escape(row.subject),
                "" if row.epsilon is None else f"{row.epsilon:.3g}",
                "" if row.lower_bound is None else f"{row.lower_bound:.2f}",
                escape(row.found).replace("\n", "<br>"),
            )
            for row in chosen
        ]
        body.append(page.table(("verdict", "subject", "claimed", "at least", "found"), cells))
    return page.page("qclip audit", body)
