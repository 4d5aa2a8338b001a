"""What a run has learnt: its held-out metrics beside a constant guess, class by class, and how far to trust them."""

from collections.abc import Iterator
from html import escape

import numpy as np

from qclip.apps.report import figures, page, words
from qclip.apps.report.record import Record
from qclip.apps.run_summary import Evaluation

MOST_CLASSES = 12
"""The most classes that a confusion matrix is shown for."""
MEANINGS = {
    "accuracy": "share of examples whose class is predicted",
    "loss": "mean loss; lower is better, and wrong probabilities count",
    "auc": "chance that of two examples, one of each class, the right one has the higher score; 0.5 is a guess",
    "average_precision": "mean precision over the examples of the rarer class, each at its own score",
    "mean_absolute_error": "mean distance, in the units of the target",
    "rmse": "root of the mean squared distance, in the units of the target",
    "r2": "share of the variance that is explained; 0 is a guess, 1 is perfect",
}


def section(record: Record) -> Iterator[str]:
    """Yield the section of the results."""
    yield "<h2>Results</h2>"
    if not record.metrics:
        yield page.caption("No score was recorded.")
        return
    evaluation = record.summary.evaluation
    yield page.caption(
        "Measured on examples that took no part in training. The privacy guarantee covers the training examples, not",
        "these.",
        "A constant guess says the same of every example, as well as can be." if evaluation is not None else "",
    )
    yield _metrics(record, evaluation)
    if evaluation is not None and evaluation.classes:
        yield from _classes(evaluation)
    if len(record.scores) > 1:
        courses = {name: [score.values.get(name, np.nan) for score in record.scores] for name in record.metrics}
        said = "; ".join(f"{name} {words.course(np.array(values))}" for name, values in courses.items())
        yield figures.picture(figures.held_out(record), f"held-out metrics over the run: {said}")


def _metrics(record: Record, evaluation: Evaluation | None) -> str:
    rows = []
    for name in record.metrics:
        row = [escape(name.replace("_", " ")), words.number(record.last(name)), escape(MEANINGS.get(name, ""))]
        if evaluation is not None:
            row.insert(2, words.number(evaluation.guess.get(name)))
        rows.append(row)
    guess = [] if evaluation is None else ["a constant guess"]
    return page.table(["held-out metric", "this run", *guess, "meaning"], rows)


def _classes(evaluation: Evaluation) -> Iterator[str]:
    """Yield recall and precision of each class, the confusion matrix and the calibration."""
    classes, confusion = evaluation.classes, evaluation.confusion
    if len(classes) <= MOST_CLASSES:
        rows = []
        for k, name in enumerate(classes):
            predicted = sum(row[k] for row in confusion)
            rows.append(
                [escape(name)]
                + [words.plain(count) for count in confusion[k]]
                + [_share(confusion[k][k], sum(confusion[k])), _share(confusion[k][k], predicted)]
            )
        yield "<h3>Class by class</h3>"
        yield page.table(["class", *classes, "recall", "precision"], rows, narrow=True)
        yield page.caption(
            "A row counts the examples of a class by the class that was predicted, in columns.",
            "Recall: the share of the class that was found. Precision: the share of the predictions that were right.",
        )
    if len(evaluation.calibration) > 1:
        of = f"“{escape(evaluation.positive)}”" if evaluation.positive else "the class it predicts"
        yield "<h3>Calibration</h3>"
        yield page.caption(
            f"Examples in bins of the probability that the model gives to {of}: how often it was so.",
            "On the dashed line, probabilities can be taken at their word. The larger a dot, the more examples.",
        )
        points = ", ".join(f"{share:.2f} at {probability:.2f}" for probability, share, _ in evaluation.calibration)
        alternative = f"share that came true against probability: {points}"
        yield figures.picture(figures.calibration(evaluation.calibration), alternative)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.3f}" if whole else "none"
