"""The report of one run: a page for readers who have not read the paper."""

from collections.abc import Iterator
from html import escape
from pathlib import Path

import numpy as np

from qclip.apps.report import figures, page, privacy, results, words
from qclip.apps.report.figures import picture
from qclip.apps.report.page import caption
from qclip.apps.report.record import Record, read
from qclip.apps.run_folder import RunFolder

STYLE = """<style>
.headline { display: flex; flex-wrap: wrap; gap: 2.6rem; margin: 1.2rem 0; }
.headline div { color: #55606b; font-size: .85rem; } .headline b { display: block; color: #1d2329; font-size: 1.7rem; }
p.note { border-left: 3px solid #d9822b; padding: .1rem .8rem; background: #fdf6ee; }
dl { grid-template-columns: 12rem 1fr; } p.caption { max-width: 50rem; margin: .2rem 0 .4rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
table.wide { font-size: .8rem; } .wide th, .wide td { padding: .3rem .4rem; }
summary { color: #2563a8; cursor: pointer; } pre { background: #f2f4f6; padding: .6rem .8rem; white-space: pre-wrap; }
</style>"""

SHADED = "Shaded: the steps at which the threshold counts as lost."

WEIGHTED_MEAN = r"\frac{\sum_t \gamma_t a_t \Vert\nabla f(x_t)\Vert^2}{\sum_t \gamma_t a_t}"
PLAIN_MEAN = r"\frac{\sum_t \gamma_t \Vert\nabla f(x_t)\Vert^2}{\sum_t \gamma_t}"
"""What a certificate bounds."""

TERMS = {
    "optimisation": "the remaining distance from the start; shrinks with more and larger steps",
    "variance": "the noise of sampling and of privacy; shrinks with larger batches and smaller steps",
    "bias": "the bias of clipping; shrinks when fewer examples are clipped",
    "total": "the sum: it holds on average over runs",
}


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the report of a run and return its path.

    Args:
        folder: The folder of the run.
        out: File of the page; report.html in the folder when left out.

    Raises:
        Refusal: ``metrics.jsonl`` or summary.json is missing or broken; the message names it.
    """
    record = read(folder)
    path = RunFolder(Path(folder)).report_file if out is None else out
    path.parent.mkdir(parents=True, exist_ok=True)
    title = f"{record.folder.resolve().name}: a qclip run"
    path.write_text(page.page(title, [STYLE, *_body(record)]), encoding="utf-8")
    return path


def _body(record: Record) -> Iterator[str]:
    summary = record.summary
    yield f"<h1>Training on {escape(summary.task)}</h1>"
    yield f'<p class="lead">{escape(summary.description)}</p>'
    yield _headline(record)
    yield from (f'<p class="note">{note}</p>' for note in _notes(record))
    yield from results.section(record)
    yield from privacy.section(record)
    if len(record.steps):
        yield from _threshold(record)
        yield from _unclipped(record)
        yield from _costs(record)
        yield from _learning_rate(record)
        yield from _epsilon(record)
    yield from _certificate(record)
    yield from _facts(record)


def _headline(record: Record) -> str:
    named = list(dict.fromkeys([*record.metrics[:1], *(name for name in record.metrics if name == "auc")]))
    cards = [(words.number(record.last(metric)), f"held-out {escape(metric)}") for metric in named]
    delta = words.number(record.summary.delta)
    cards.append((f"ε = {words.epsilon(record.epsilon)}", f"spent, at δ = {delta}" if record.private else "no privacy"))
    if len(record.steps):
        p = words.quantile(record)
        lost = ", lost" if record.summary.lost_threshold else ""
        kind = escape(words.threshold(record)) + (f", p = {p}" if p else "") + lost
        cards.append((words.taus(record), f"last threshold ({kind})"))
    shown = "".join(f"<div><b>{value}</b>{text}</div>" for value, text in cards)
    return f'<div class="headline">{shown}</div>'


def _notes(record: Record) -> Iterator[str]:
    if lost := record.summary.lost_threshold:
        yield (
            f"{escape(lost[:1].upper() + lost[1:])}. <b>Read the scores with care:</b> such a run may have learnt "
            "only which class is the most frequent, and an accuracy does not show it."
        )
    if not record.finished:
        yield f"This run is not finished: {words.steps(record)} steps are done. Epsilon covers these steps."
    if not record.private:
        yield (
            "This run is <b>not private</b>: it added no noise, or its threshold read raw gradient norms. "
            "Do not release the model where the data must stay secret."
        )
    elif record.summary.seeded:
        yield "The random numbers came from a given seed: anyone who knows the seed can subtract the noise."


def _threshold(record: Record) -> Iterator[str]:
    count = len(record.groups)
    yield "<h2>The threshold</h2>"
    yield caption(
        "A per-example gradient longer than the threshold is scaled down to it, which bounds the influence of each",
        "example. The noise is proportional to the threshold: a high one drowns the gradient in noise, a low one",
        "distorts it.",
        words.aim(record),
        f"Each of the {count} groups of parameters has its own." if count > 1 else "",
        "The axis is logarithmic.",
        SHADED if record.lost.any() else "",
    )
    yield picture(figures.threshold_path(record), f"threshold against steps: {words.course(record.taus)}")
    if count > 1:
        yield _groups(record)


def _groups(record: Record) -> str:
    ends = zip(record.groups, record.taus[0], record.taus[-1], strict=True)
    rows = (
        (str(index), escape(name), words.number(float(first), 3), words.number(float(last), 3))
        for index, (name, first, last) in enumerate(ends, start=1)
    )
    table = page.table(("number", "group", "first threshold", "last threshold"), rows)
    return f"<details><summary>Thresholds of the {len(record.groups)} groups</summary>{table}</details>"


def _unclipped(record: Record) -> Iterator[str]:
    yield "<h2>Fraction of unclipped examples</h2>"
    if not record.asked:
        yield caption("This threshold does not measure the fraction.")
        return
    noise = ", with the noise that keeps it private: single values may lie outside [0, 1]" if record.private else ""
    yield caption(
        f"Dots: the released fraction at each step{noise}." if len(record.groups) <= figures.FEW else "",
        f"Lines: running means over {figures.window(len(record.steps))} steps.",
        *_reading(record),
    )
    mean = figures.running_mean(record.noisy_unclipped, figures.window(len(record.steps)))
    yield picture(
        figures.unclipped_fraction(record),
        f"fraction of examples left unclipped against steps, as a running mean: {words.course(mean)}",
    )


def _reading(record: Record) -> Iterator[str]:
    """Say how to read the unclipped fraction; above p, a threshold at its lower bound is not too high."""
    if words.is_balanced(record):
        yield "There is no target: the more noise, the more examples are clipped."
    if record.targets is not None:
        yield "Dashed: the target p. Near it, the threshold follows the gradients."
        yield "Below it, the threshold is too low; above it, too high: it may be either at the start."
        if record.reached_floor:
            yield (
                f"<b>Not so at its lower bound</b>, {words.plain(record.threshold['tau_min'])}, which it reached: a "
                "fraction above p there means that more gradients vanish than p allows, and that the others are "
                "clipped to almost nothing."
            )
    if record.lost.any():
        yield SHADED


def _costs(record: Record) -> Iterator[str]:
    if not (record.noise > 0).any() and not (record.bias > 0).any():
        return
    yield "<h2>What noise and clipping cost</h2>"
    yield caption(*_sources(record), words.costs(record))
    yield picture(figures.costs(record), f"noise and bias of the mean gradient against steps. {words.costs(record)}")


def _sources(record: Record) -> Iterator[str]:
    """Say what noise and bias are, and what the threshold does about them."""
    yield "What makes a step's mean gradient wrong, in its own units, on a logarithmic axis."
    yield "Noise: the length of the noise added for privacy, which grows with the threshold."
    if np.isfinite(record.bias).any():
        yield "Bias: the most that clipping can have changed the mean, estimated from noisy counts; it shrinks as the"
        yield "threshold grows. Noise points another way at each step and partly averages out; bias does not."
    else:
        yield "This threshold does not estimate the bias of clipping, and little noise alone does not make it a good"
        yield "one: the lower it is, the less noise and the more bias."
    if words.is_balanced(record):
        yield "The threshold keeps the two in balance: it falls where noise costs more, and rises where bias does."


def _learning_rate(record: Record) -> Iterator[str]:
    rates = record.learning_rates
    if rates is None:
        return
    search = rates[record.steps < record.summary.num_steps / 2]
    yield "<h2>Learning rate</h2>"
    yield caption(
        "Found by the run from its released gradients, at no cost in privacy, and in units of the threshold.",
        "In the first half of the run it grows while the gradient points where the last steps went, and falls when it",
        "points back; in the second half it decays to 0.",
        f"It began at {words.number(float(search[0]), 2)} and came to {words.number(float(search[-1]), 2)}.",
    )
    yield picture(figures.learning_rate(record), f"learning rate against steps: {words.course(rates)}")


def _epsilon(record: Record) -> Iterator[str]:
    if not record.private:
        return
    yield "<h2>Privacy spent</h2>"
    yield caption("Each step spends a little. Dots: the steps at which epsilon was computed.")
    yield picture(figures.epsilon_spent(record), f"epsilon spent against steps: {words.course(record.epsilons)}")


def _certificate(record: Record) -> Iterator[str]:
    certificate, refused = record.summary.certificate, record.summary.certificate_refused
    if certificate is None and refused is None:
        return
    yield "<h2>Certificate</h2>"
    if certificate is None:
        yield caption(f"There is no certificate: {escape(str(refused))}")
        return
    mean, _, warning = page.symbols(certificate.mean).partition("; ")
    yield caption(
        f"A bound on {escape(mean)}; at 0 the point is stationary. It follows from the thresholds and",
        "fractions recorded above and from the given smoothness, noise and gap of the problem, and is valid only if",
        f"these are correct. Theorem: {escape(certificate.theorem)} of the theory.",
    )
    if warning:
        yield f'<p class="note">{escape(warning[:1].upper() + warning[1:])}.</p>'
    yield page.formula(PLAIN_MEAN if certificate.theorem.startswith("least") else WEIGHTED_MEAN)
    rows = [(name, words.number(getattr(certificate, name)), text) for name, text in TERMS.items()]
    if certificate.this_run is None:
        why = "with momentum no theorem bounds a single run; else its steps were too few for their noise"
        rows.append(("this run", "none", why))
    else:
        chance = f"holds with a probability of {certificate.confidence:.0%} for this run alone"
        rows.append(("this run", words.number(certificate.this_run), chance))
    yield page.table(("term", "bound", "meaning"), rows)


def _facts(record: Record) -> Iterator[str]:
    summary = record.summary
    yield "<h2>The run</h2>"
    z, gradient = words.number(summary.noise_multiplier), words.number(summary.gradient_noise_multiplier)
    rate = words.number(summary.sample_rate)
    facts = {
        "examples": words.plain(summary.examples),
        "expected batch size": f"{words.plain(summary.batch_size)} (sampling rate {rate})",
        "steps": words.steps(record),
        "epochs": words.number(words.epochs(record)),
        "noise multiplier": f"{z} in all, {gradient} on the gradient",
        "trainable parameters": words.plain(summary.parameters),
        "groups": words.plain(len(record.groups)) if len(record.steps) else "",
        "threshold": words.threshold_settings(record),
        "seconds": words.plain(summary.seconds),
    }
    yield page.definitions(facts.items())
    shown = [(key.replace("_", " "), words.setting(key, value)) for key, value in summary.settings.items()]
    yield f"<h2>Settings</h2>{page.definitions(shown)}"
    if summary.command:
        yield f"<h2>Command</h2><pre>{escape(summary.command)}</pre>"
    versions = ", ".join(f"{name} {version}" for name, version in summary.versions.items())
    yield f'<p class="facts">{escape(versions)}; {escape(summary.date)}</p>'
