"""The comparison of thresholds runs, and writes what it says."""

import json

import pytest

pytest.importorskip("matplotlib")

from qclip.apps.cli import main
from qclip.apps.experiments.quality import QualityRow, quality, table
from qclip.apps.experiments.quality_settings import QualitySettings


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_every_threshold_is_trained_at_the_budget(tmp_path, workers):
    settings = QualitySettings(
        data="digits", epsilon=3.0, epochs=3, batch_size=300, quantiles=(0.7,), constants=(1.0,), seeds=1,
        workers=workers, out=tmp_path,
    )  # fmt: skip
    rows = quality(settings, say=lambda text: None)
    assert [row.threshold for row in rows] == ["PrivateQuantile(0.7)", "SlackQuantile(0.7)", "Constant(1)"]
    assert all(2.95 < row.epsilon <= 3.0 and 0.3 < row.accuracy < 1.0 for row in rows)
    assert [QualityRow(**row) for row in json.loads((tmp_path / "rows.json").read_text())] == rows
    assert (tmp_path / "table.md").read_text() == table(rows)
    assert (tmp_path / "quality.png").stat().st_size > 1000


def test_the_table_has_the_mean_and_the_extremes():
    rows = [QualityRow("Constant(1)", seed, accuracy, 3.0, 1.0, 1.8) for seed, accuracy in enumerate((0.5, 0.7, 0.9))]
    assert "| Constant(1) | 70.00 | 50.00 | 90.00 | 1 |" in table(rows)


def test_the_command_says_what_is_missing(tmp_path, capsys):
    assert main(["experiment", "quality", "--data", "mnist", "--data-dir", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "data_dir" in capsys.readouterr().err
