"""The folder of a run that was made in Python, for ``qclip report``; and the report of a run in memory."""

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from qclip import _validate as check
from qclip.apps.live_run import score_line, step_line, summary_of
from qclip.apps.run_folder import RunFolder
from qclip.apps.run_summary import Summary
from qclip.training.run import PrivateTraining


class RunLog:
    """The folder of a run, as ``qclip train`` writes it: ``metrics.jsonl`` and ``summary.json``.

        log = qclip.RunLog(training, "out/mine", description="digits, a CNN of my own")
        for epoch in range(10):
            for batch in training.loader:
                training.step(*batch)
            log.write(held_out={"accuracy": accuracy(model)})

    ``qclip report out/mine out/digits`` then compares it with other runs, of Python or of the command line, and
    ``qclip audit --ledger out`` adds up what they spent. The files hold released values and held-out scores only.

    A resumed run goes on in its folder: the steps after the checkpoint are written again. Of several processes, rank 0
    writes.

    Args:
        training: The private run.
        folder: The folder, new or of this run.
        task: What is learnt, in a word or two; by default the name of the model's class.
        description: One line about data and model.
        unit: What epsilon protects, in words.
        details: Further lines about data and model.
        settings: Further settings to show and compare; values that may be read by anyone.
        overwrite: Whether to replace another run in the folder.

    Raises:
        Refusal: The folder cannot be written to, or holds another run.
    """

    def __init__(
        self,
        training: PrivateTraining,
        folder: str | os.PathLike[str],
        *,
        task: str = "",
        description: str = "",
        unit: str = "",
        details: tuple[str, ...] = (),
        settings: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> None:
        self.folder = RunFolder(Path(folder))
        """The folder and its files."""
        self._training, self._own_settings = training, dict(settings or {})
        name, rows = type(training.model).__name__, training.settings["rows_per_example"]
        self._about: dict[str, Any] = {
            "task": task or name,
            "description": description or f"{name}, {training.plan.dataset_size:,} examples.",
            "unit": unit or ("any one example" if rows == 1 else f"any one example of {rows} rows"),
            "public": ["the number of examples"],
            "details": list(details),
        }
        self._held_out: dict[str, float] = {}
        self._written, self._seconds_before, self._began = 0, 0.0, monotonic()
        if training.rank == 0:
            self.folder.refuse_unwritable("folder")
            if self.folder.holds_run and not overwrite:
                self._go_on()
            elif self.folder.holds_run:
                self.folder.clear()
            self.folder.prepare()
            self.folder.metrics_file.touch()

    def write(self, *, held_out: Mapping[str, float] | None = None) -> None:
        """Write the logical steps that the folder does not have yet, and the summary.

        Args:
            held_out: Scores on held-out examples after these steps, such as ``{"accuracy": 0.9, "loss": 0.3}``. They
                are not protected by epsilon.
        """
        training = self._training
        done = len(training.history)
        scores = {name: check.real(f"held_out[{name!r}]", value) for name, value in (held_out or {}).items()}
        self._held_out = scores or self._held_out
        if training.rank != 0:
            return
        for record in training.history[self._written :]:
            self.folder.append(step_line(training, record))
        self._written = done
        if scores:
            self.folder.append(score_line(training, done, scores))
        self.folder.write_summary(self._summary())

    def report(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write what is missing, and the report; return its path.

        Args:
            path: The file of the page; report.html in the folder when left out.
        """
        self.write()
        try:
            from qclip.apps.report.run import write_report
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(f"{missing.name} is not installed; pip install 'qclip[train]'") from missing
        out = self.folder.report_file if path is None else Path(path)
        return write_report(self.folder.path, out) if self._training.rank == 0 else out

    def _summary(self) -> Summary:
        return summary_of(
            self._training,
            exact=self._training.finished,
            held_out=self._held_out,
            evaluation=None,
            seconds=round(self._seconds_before + monotonic() - self._began, 3),
            settings=self._settings(),
            seeded=self._training.seeded,
            command="",
            certificate=None,
            certificate_refused=None,
            **self._about,
        )

    def _settings(self) -> dict[str, Any]:
        """Return the settings of the run, by the names of those of the command line where it has them."""
        plan, own = self._training.plan, self._training.settings
        epochs, part = divmod(plan.num_steps, plan.steps_per_epoch)
        length = {"steps": plan.num_steps} if part else {"epochs": epochs}
        shown = {"batch_size": plan.batch_size, "epsilon": plan.epsilon, "delta": plan.delta} | length | own
        return shown | {"optimizer": own["optimizer"].lower()} | self._own_settings

    def _go_on(self) -> None:
        """Go on in a folder that this run has written before it was resumed."""
        history, lines = self._training.history, self.folder.steps()
        common = min(len(history), len(lines))
        own = all(list(history[k].tau) == lines[k].get("tau") for k in range(common))
        if common == 0 or not own:
            raise check.Refusal(
                f"folder = {str(self.folder.path)!r} holds another run: choose another folder, load the checkpoint of "
                "that run before the log is made, or pass overwrite=True"
            )
        self.folder.truncate(common)
        self._written = common
        scores = self.folder.scores()
        self._held_out = dict(scores[-1]["held_out"]) if scores else {}
        if self.folder.summary_file.exists():
            self._seconds_before = self.folder.summary().seconds


def report(
    training: PrivateTraining,
    path: str | os.PathLike[str],
    *,
    held_out: Mapping[str, float] | None = None,
    **about: Any,
) -> Path:
    """Write the report of a run so far, a self-contained page, and return its path.

        qclip.report(training, "report.html", held_out={"accuracy": accuracy(model)})

    The page says what is guaranteed, and draws the threshold, the unclipped fraction, what noise and clipping cost,
    and epsilon: released values, and the scores that are given. It needs matplotlib (``pip install 'qclip[train]'``).

    Args:
        training: The private run, finished or not.
        path: The file of the page.
        held_out: Scores on held-out examples, which epsilon does not protect.
        about: What the page says of the run: ``task``, ``description``, ``unit``, ``details``, ``settings`` of
            `qclip.RunLog`, which keeps the scores of a whole run.
    """
    path = Path(path)
    with TemporaryDirectory() as folder:
        log = RunLog(training, Path(folder) / path.stem, **about)
        log.write(held_out=held_out)
        return log.report(path)
