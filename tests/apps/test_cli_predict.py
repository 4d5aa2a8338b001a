"""`qclip train` on a table, then `qclip predict`: one line per row, by the file that the run left."""

import csv
import io
import math
import random

import numpy as np
import pytest
import torch
from safetensors import safe_open

pytest.importorskip("rich")
pytest.importorskip("tyro")

import qclip
from qclip.apps.cli import main
from qclip.apps.run_folder import RunFolder
from qclip.tables.predictor import Predictor


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run on a file of two classes, and a file of fresh rows with the target and a column of names."""
    folder = tmp_path_factory.mktemp("predict")
    rng = random.Random(0)

    def rows(count):
        for k in range(count):
            x, colour = rng.random(), rng.choice(["red", "blue"])
            kind = "yes" if rng.random() < 1 / (1 + math.exp(-8 * (x - 0.5))) else "no"
            yield k, f"{x:.3f}", colour, kind

    for name, count in (("known", 600), ("fresh", 100)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["name", "x", "colour", "kind"])
            writer.writerows(rows(count))
    arguments = ["--target", "kind", "--columns", "name=drop", "x=0:1", "--epochs", "3", "--seed", "0"]
    assert main(["train", "--data", str(folder / "known.csv"), *arguments, "--out", str(folder / "run")]) == 0
    return folder


def read(text):
    header, *rows = csv.reader(io.StringIO(text))
    return header, rows


def test_a_line_for_each_row(folder, capsys):
    out = folder / "predictions.csv"
    assert main(["predict", str(folder / "run"), str(folder / "fresh.csv"), "--out", str(out), "--keep", "name"]) == 0
    header, rows = read(out.read_text())
    assert header == ["name", "predicted kind", "probability of no", "probability of yes"]
    assert [row[0] for row in rows] == [str(k) for k in range(100)]
    expected = qclip.load(folder / "run").predict_proba(folder / "fresh.csv")
    assert np.allclose([[float(p) for p in row[2:]] for row in rows], expected, atol=1e-5)
    assert all(row[1] == ("no" if float(row[2]) > float(row[3]) else "yes") for row in rows)
    screen = capsys.readouterr().out
    assert "auc: 0." in screen  # the file has the target
    assert "100 predictions" in screen


def test_predictions_alone_go_to_the_screen(folder, capsys):
    main(["predict", str(folder / "run" / "model.safetensors"), str(folder / "fresh.csv")])
    printed = capsys.readouterr()
    header, rows = read(printed.out)
    assert (len(header), len(rows)) == (3, 100)
    assert "accuracy" in printed.err


def test_rows_without_the_target_are_predicted(folder, tmp_path, capsys):
    path = tmp_path / "new.tsv"
    path.write_text("colour\tx\tshade\nred\t0.9\tdark\nblue\t\tlight\n")
    assert main(["predict", str(folder / "run"), str(path)]) == 0
    printed = capsys.readouterr()
    assert len(read(printed.out)[1]) == 2
    assert "accuracy" not in printed.err


def test_scores_are_those_of_rows_whose_target_is_known(folder, tmp_path, capsys):
    """A file in use knows some outcomes only; it is never replaced by its own predictions."""
    path, out = tmp_path / "new.csv", tmp_path / "out.csv"
    path.write_text('colour;x;kind\nred;"0,9";yes\nblue;"0,1";\nblue;"0,2";perhaps\n')
    assert main(["predict", str(folder / "run"), str(path), "--decimal", ",", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "accuracy: 1.0000" in printed
    assert "the scores leave out 2 rows whose kind is not known" in printed
    assert [row[0] for row in read(out.read_text())[1]] == ["yes", "no", "no"]
    for arguments in (["--out", str(path)], ["--out", str(tmp_path / "." / "new.csv")]):
        assert main(["predict", str(folder / "run"), str(path), *arguments]) == 2
        assert "another file than the table" in " ".join(capsys.readouterr().err.split())
    assert path.read_text().startswith("colour;x;kind")


def test_the_exported_model_is_that_of_the_run_without_its_secrets(folder):
    file = RunFolder(folder / "run").model_file
    predictor = Predictor.load(file)
    saved = torch.load(RunFolder(folder / "run").checkpoint_file, weights_only=True)["model"]
    assert all(torch.equal(saved[name], x) for name, x in predictor.model.state_dict().items())
    summary = RunFolder(folder / "run").summary()
    assert predictor.facts["epsilon"] == summary.epsilon
    assert predictor.facts["held_out"] == summary.held_out
    assert "seed" not in file.read_bytes().decode("latin-1")


def test_a_run_on_other_data_leaves_its_weights(tmp_path, capsys):
    pytest.importorskip("sklearn")
    assert main(["train", "--epochs", "1", "--out", str(tmp_path / "run")]) == 0
    with safe_open(tmp_path / "run" / "model.safetensors", "pt") as opened:
        assert len(list(opened.keys())) == 4
        assert '"epsilon"' in opened.metadata()["facts"]
    assert main(["predict", str(tmp_path / "run"), "rows.csv"]) == 2
    assert "not the model of a table" in " ".join(capsys.readouterr().err.split())


def test_what_is_missing_is_named(folder, tmp_path, capsys):
    assert main(["predict", str(tmp_path), str(folder / "fresh.csv")]) == 2
    assert "a file that exists" in " ".join(capsys.readouterr().err.split())
    assert main(["predict", str(folder / "run"), str(folder / "fresh.csv"), "--keep", "nmae"]) == 2
    assert "did you mean 'name'" in " ".join(capsys.readouterr().err.split())
