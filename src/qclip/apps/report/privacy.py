"""What the guarantee of a run means, in words for a reader who has to decide about it."""

import math
from collections.abc import Iterator
from html import escape

from qclip.apps.report import page, words
from qclip.apps.report.record import Record

FALSE_ALARMS = (0.001, 0.01, 0.05)
"""Rates of wrong accusations at which the power of a test is shown."""
ACCOUNTANTS = {
    "pld": "privacy loss distributions (PLD) of Google's dp-accounting: tight, rounded up",
    "rdp": "Rényi differential privacy (RDP) of Google's dp-accounting: an upper bound",
}
SAMPLING = {"poisson": "each joins each step at random, with probability {rate}, independently of all others"}


def section(record: Record) -> Iterator[str]:
    """Yield the section of a private run: the claim, its odds, and what it rests on; nothing for other runs."""
    if not record.private:
        return
    summary, epsilon = record.summary, record.epsilon
    delta = words.number(summary.delta)
    yield "<h2>The guarantee</h2>"
    yield (
        f"<p>This run is <b>(ε = {words.epsilon(epsilon)}, δ = {delta})-differentially private</b> for "
        f"<b>{escape(summary.unit)}</b>: adding it to the training data, or removing it, makes no outcome of the run "
        f"more than e<sup>ε</sup> = {words.number(math.exp(epsilon), 3)} times as likely, except with probability δ."
        "</p>"
    )
    yield (
        "<p>So someone who knows all other data, and holds it for as likely as not that this was among them, can be at "
        f"most <b>{_percent(certainty(epsilon))}</b> sure after studying all that the run released. A test for it "
        "that raises so many false alarms finds it at most this often:</p>"
    )
    rows = [(_percent(alarm), _percent(power(epsilon, summary.delta, alarm))) for alarm in FALSE_ALARMS]
    yield page.table(("false alarms", "found, at most"), rows, narrow=True)
    rate = words.number(summary.sample_rate)
    yield page.definitions(
        {
            "unit of privacy": summary.unit,
            "neighbouring data": "data sets that differ by adding or removing one such unit",
            "sampling": SAMPLING.get(summary.sampling, summary.sampling).format(rate=rate),
            "accountant": ACCOUNTANTS.get(summary.accountant, summary.accountant),
            "released": "the model, the thresholds, the learning rates, and all that this page shows of the training",
            "public": "; ".join(["the settings of the run, on this page", *summary.public]),
            "not covered": (
                "held-out examples and their scores; other runs on the same data, whose epsilons add up; checkpoints "
                "of an unfinished run"
            ),
        }.items()
    )


def certainty(epsilon: float) -> float:
    """Return the most that even odds can become, as a probability.

    >>> round(certainty(3.0), 4)
    0.9526
    """
    return 1 / (1 + math.exp(-epsilon))


def power(epsilon: float, delta: float, false_alarms: float) -> float:
    """Return the most that any test finds at a rate of false alarms (Kairouz, Oh and Viswanath 2015).

    >>> round(power(3.0, 1e-5, 0.01), 4), round(power(3.0, 1e-5, 0.5), 4), power(0.0, 0.0, 0.25)
    (0.2009, 0.9751, 0.25)
    """
    by_growth = math.exp(epsilon) * false_alarms + delta
    by_misses = 1 - math.exp(-epsilon) * (1 - delta - false_alarms)
    return min(1.0, by_growth, by_misses)


def _percent(probability: float) -> str:
    """Format a probability, rounded up, so that no risk looks smaller than it is.

    >>> _percent(0.95257), _percent(0.001), _percent(0.2000001)
    ('95.3 %', '0.1 %', '20.1 %')
    """
    return f"{math.ceil(round(1000 * probability, 6)) / 10:g} %"
