"""Held-out accuracy with nothing tuned, against the best of grids, at one privacy budget (docs/accuracy.md).

* **Automatic**: `BalancedThreshold` and ``step_size="auto"``. Nothing is chosen.
* **Grids**, one seed: learning rates with `BalancedThreshold`; then, at the best rate, quantiles and constants.
* **Finalists**: the best of each grid, again on the fresh seeds of the automatic runs, and compared seed by seed. At
  other budgets they keep the settings that were best here.

All runs take the same number of steps with the same noise multiplier, in units of the threshold
(``rescale_to_unit_norm``), at a learning rate that is constant for half of the run and then decays linearly to 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from qclip.apps.experiments.accuracy_runs import Family, Job, Run, Runner, task_of
from qclip.apps.experiments.accuracy_settings import AccuracySettings
from qclip.apps.experiments.accuracy_table import Finalist, Results, table

THRESHOLD_MARGIN = 0.3
"""Points of accuracy that the automatic run may lose against the best of a grid of thresholds."""
RATE_MARGIN = 1.0
"""Points that it may lose against the best of a grid of learning rates."""


def accuracy(settings: AccuracySettings, say: Callable[[str], object] = print) -> str:
    """Run what is not yet in runs.jsonl; write table.md, and a figure where it is asked for; return the table."""
    settings.check()
    with Runner(settings, say) as runner:
        results = _results(settings, runner)
    text = table(results)
    (settings.out / "table.md").write_text(text, encoding="utf-8")
    if settings.figure:
        from qclip.apps.experiments.accuracy_figure import draw
        from qclip.apps.report.style import save

        save(draw(results), settings.out / "accuracy.png")
    return text


def _results(settings: AccuracySettings, runner: Runner) -> Results:
    jobs = Jobs(settings)
    epsilons = (settings.epsilon, *settings.also_epsilon)
    automatic = {epsilon: jobs.automatic(epsilon) for epsilon in epsilons}
    rates = [jobs.grid("balanced", None, rate) for rate in settings.rates]
    references = [jobs.grid("unclipped", None, rate, private=False) for rate in settings.reference_rates]
    runner.finish([job for each in (rates, *automatic.values(), references) for job in each])
    results = Results(settings, task_of(settings).description, reference=runner.results(references))
    results.finalists = {epsilon: [Finalist("nothing", runner.results(each))] for epsilon, each in automatic.items()}
    results.grids["learning rate"] = runner.results(rates)
    best_rate = best(results.grids["learning rate"], settings)
    if best_rate is not None:
        _thresholds(settings, runner, jobs, results, best_rate.job)
    results.missing = runner.missing
    return results


def _thresholds(settings: AccuracySettings, runner: Runner, jobs: "Jobs", results: Results, best_rate: Job) -> None:
    """Add the grids of thresholds at the best learning rate, and the best of all three grids on fresh seeds."""
    grids = {
        "p": [jobs.grid("quantile", p, best_rate.rate) for p in settings.quantiles],
        "C": [jobs.grid("constant", c, best_rate.rate) for c in settings.constants],
    }
    rerun = {epsilon: jobs.again(best_rate, epsilon) for epsilon in results.finalists}
    runner.finish([job for each in (*grids.values(), *rerun.values()) for job in each])
    tried = len(settings.rates)
    for epsilon, each in rerun.items():
        results.finalists[epsilon].append(Finalist("learning rate", runner.results(each), tried, RATE_MARGIN))
    results.grids |= {name: runner.results(each) for name, each in grids.items()}
    winners = {name: winner.job for name in grids if (winner := best(results.grids[name], settings)) is not None}
    runner.finish([job for winner in winners.values() for epsilon in rerun for job in jobs.again(winner, epsilon)])
    for name, winner in winners.items():
        for epsilon in rerun:
            runs = runner.results(jobs.again(winner, epsilon))
            finalist = Finalist(f"learning rate, {name}", runs, tried + len(grids[name]), THRESHOLD_MARGIN)
            results.finalists[epsilon].append(finalist)


class Jobs:
    """The jobs of an experiment, with the lengths and batch sizes of its task."""

    def __init__(self, settings: AccuracySettings) -> None:
        defaults = task_of(settings).defaults
        self._settings = settings
        self._batch_size = settings.batch_size or defaults.batch_size
        self._epochs = settings.epochs or defaults.epochs

    def grid(self, family: Family, value: float | None, rate: float | None, *, private: bool = True) -> Job:
        """Return the job of a point on a grid."""
        settings = self._settings
        epsilon = settings.epsilon if private else None
        return Job(settings.data, self._batch_size, self._epochs, settings.delta, epsilon, family, value, rate, seed=0)

    def automatic(self, epsilon: float) -> list[Job]:
        """Return the jobs with nothing tuned, one for each fresh seed."""
        return self.again(self.grid("balanced", None, None), epsilon)

    def again(self, job: Job, epsilon: float) -> list[Job]:
        """Return a job at this budget on each fresh seed."""
        return [replace(job, epsilon=epsilon, seed=seed) for seed in self._settings.fresh_seeds]


def best(runs: Sequence[Run], settings: AccuracySettings) -> Run | None:
    """Return the run with the best held-out score, of equal accuracies that of least loss; None if all failed."""
    by_loss = settings.choose == "loss"
    finished = (run for run in runs if not run.error)
    return min(finished, key=lambda run: run.loss if by_loss else (-run.accuracy, run.loss), default=None)
