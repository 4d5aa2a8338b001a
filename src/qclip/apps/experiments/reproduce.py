"""The run of all claims, with its output: claims.json, figures and one self-contained report."""

import json
import platform
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from html import escape
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from qclip import _validate as check
from qclip._files import replace_text
from qclip.apps.experiments import (
    additions,
    balance,
    certificates,
    error_feedback,
    figure1,
    fixed_clip,
    floors,
    lemmas,
    lower_bound,
    privacy,
    rates,
    remarks,
    theorem1,
    theorem2,
    time_varying,
    two_point,
)
from qclip.apps.experiments.claim import Claim, Effort, Outcome
from qclip.apps.experiments.formulas import FORMULAS
from qclip.apps.report import page
from qclip.apps.report.style import save

CLAIMS: tuple[Claim, ...] = (
    lemmas.lemma1_threshold,
    lemmas.lemma1_bias,
    lemmas.lemma1_proof_step,
    lemmas.lemma2_recursion,
    theorem1.theorem1_constant,
    theorem1.theorem1_varying,
    theorem1.corollary_bias_floor,
    theorem1.corollary_beta_tradeoff,
    theorem1.term2_direction,
    rates.schedule_rate_q2,
    rates.schedule_rate_q15,
    rates.schedule_removes_bias,
    rates.log_factor,
    time_varying.time_varying_log,
    remarks.threshold_rises_with_p,
    fixed_clip.fixed_clip_fixed_point,
    fixed_clip.fixed_clip_growing_threshold,
    fixed_clip.fixed_clip_lambda,
    fixed_clip.fixed_clip_vs_quantile,
    fixed_clip.one_sided_noise,
    two_point.two_point_printed,
    two_point.two_point_actual,
    remarks.half_clipped,
    privacy.sigma_dp_convention,
    privacy.exact_quantile_not_private,
    theorem2.theorem2_printed,
    theorem2.theorem2_corrected,
    remarks.batches_shrink_noise,
    remarks.smaller_p_smaller_steps,
    remarks.s_from_the_accountant,
    privacy.noise_floor,
    theorem2.sharp_theorem,
    floors.bias_floor_attained,
    rates.sharp_rate_q2,
    rates.sharp_rate_q15,
    additions.inexact_quantile,
    additions.certificate,
    certificates.certificate_any_start,
    certificates.one_run_coverage,
    certificates.momentum_same_floor,
    balance.balance_without_moments,
    lower_bound.lower_bound_probes,
    error_feedback.error_feedback,
    additions.group_noise_allocation,
    figure1.figure1,
)

COLORS = {"holds": "green", "erratum": "yellow", "fails": "red"}


@dataclass(frozen=True)
class ClaimResult:
    """A claim with its outcome, its time and its figure."""

    claim: Claim
    outcome: Outcome
    seconds: float
    figure: Path | None

    def as_json(self) -> dict:
        """Return the entry of claims.json."""
        return {
            "id": self.claim.id,
            "claim": self.claim.statement,
            "equation": self.claim.equation,
            "how": self.claim.how,
            "expected": self.outcome.expected,
            "measured": self.outcome.measured,
            "error": self.outcome.error,
            "verdict": self.outcome.verdict,
            "seconds": round(self.seconds, 2),
            "figure": f"figures/{self.figure.name}" if self.figure else None,
            "values": self.outcome.values,
        }


def select(only: Sequence[str]) -> list[Claim]:
    """Return the claims with these ids, or all of them, in the order of the report."""
    claims = {claim.id: claim for claim in CLAIMS}
    for name in only:
        if name not in claims:
            near = get_close_matches(name, claims, n=3, cutoff=0.3)
            remedy = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(claims)}"
            raise check.refuse("--only", name, "the id of a claim", remedy)
    return [claim for claim in CLAIMS if not only or claim.id in only]


def reproduce(
    out: Path,
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    data_dir: Path | None = None,
    console: Console | None = None,
) -> list[ClaimResult]:
    """Run the claims and write ``claims.json``, ``figures/`` and ``report.html``.

    ``claims.json`` is rewritten after every claim, so an interrupted run leaves its results.

    Args:
        out: Folder to write to.
        quick: Whether to run smaller experiments.
        only: Ids of claims; all claims when left out.
        data_dir: Folder of the data sets of `figure1`; without it, digits stand in.
        console: Where to print the progress.

    Raises:
        Refusal: An id is unknown.
    """
    console = console or Console()
    chosen = select(only)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    effort = Effort(quick=quick, data_dir=data_dir)
    rows: list[ClaimResult] = []
    text = TextColumn("{task.description}")
    columns = (SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress, _finally_report(rows, out, quick):
        task = progress.add_task("", total=len(chosen))
        for claim in chosen:
            progress.update(task, description=f"{claim.id:32}")
            rows.append(_run(claim, effort, out))
            replace_text(out / "claims.json", json.dumps([row.as_json() for row in rows], indent=1))
            progress.advance(task)
            verdict = rows[-1].outcome.verdict
            console.print(f"[{COLORS[verdict]}]{verdict:8}[/] {claim.id:32} {rows[-1].seconds:6.1f} s")
            if verdict == "fails":
                console.print(f"  {rows[-1].outcome.measured}", highlight=False, markup=False)
    return rows


@contextmanager
def _finally_report(rows: list[ClaimResult], out: Path, quick: bool) -> Iterator[None]:
    """Write the report at the end of the block, also after an error: an interrupted run shows its results."""
    try:
        yield
    finally:
        (out / "report.html").write_text(_report(rows, quick), encoding="utf-8")


def _run(claim: Claim, effort: Effort, out: Path) -> ClaimResult:
    started = time.perf_counter()
    try:
        outcome = claim.run(effort)
    except Exception as error:
        # A claim that raises has failed; the others still run.
        outcome = Outcome("an outcome", f"{type(error).__name__}: {error}", printed=False)
    path = None
    if outcome.draw is not None:
        path = out / "figures" / f"{claim.id}.png"
        save(outcome.draw(), path)
    return ClaimResult(claim, outcome, time.perf_counter() - started, path)


def summary(rows: list[ClaimResult]) -> Table:
    """Return a table of the number of claims with each verdict."""
    counts = Counter[str](row.outcome.verdict for row in rows)
    table = Table(title=None, show_header=False, box=None)
    for verdict, color in COLORS.items():
        if counts[verdict]:
            table.add_row(f"[{color}]{verdict}[/]", str(counts[verdict]))
    return table


def _report(rows: list[ClaimResult], quick: bool) -> str:
    counts = Counter[str](row.outcome.verdict for row in rows)
    verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in COLORS if counts[verdict])
    packages = ", ".join(f"{name} {version(name)}" for name in ("qclip", "numpy", "scipy", "numba") if find_spec(name))
    kind, seconds = "Quick" if quick else "Full", sum(row.seconds for row in rows)
    facts = f"{kind} run of {seconds:.0f} s on Python {platform.python_version()}, {packages}."
    body = [
        "<h1>The paper, executed</h1>",
        f'<p class="lead">Every claim of “On the Convergence of DP-SGD with Adaptive Clipping”, and of this project’s '
        f"corrections and additions: {verdicts}. A verdict is computed from a measurement or, for a statement about a "
        f"formula, from its evaluation. <b>erratum</b> means that the printed text fails and our correction holds.</p>",
        f'<p class="facts">{escape(facts)}</p>',
        page.table(
            ("verdict", "how", "claim", "where", "seconds"),
            (
                (
                    page.tag(row.outcome.verdict),
                    row.claim.how,
                    f'<a href="#{row.claim.id}"><code>{row.claim.id}</code></a><br>'
                    f"{escape(page.symbols(row.claim.statement))}",
                    escape(row.claim.equation),
                    f"{row.seconds:.1f}",
                )
                for row in rows
            ),
        ),
    ]
    for row in rows:
        body += [
            f'<h2 id="{row.claim.id}">{page.tag(row.outcome.verdict)} <code>{row.claim.id}</code></h2>',
            f"<p>{escape(page.symbols(row.claim.statement))}.</p>",
            page.formula(FORMULAS[row.claim.id]) if row.claim.id in FORMULAS else "",
            page.definitions(
                [
                    ("where", row.claim.equation),
                    ("expected", page.symbols(row.outcome.expected)),
                    (row.claim.how, page.symbols(row.outcome.measured)),
                    ("error", row.outcome.error),
                    ("took", f"{row.seconds:.1f} s"),
                ]
            ),
            page.image(row.figure, row.claim.id) if row.figure else "",
        ]
    return page.page("qclip reproduce", body)
