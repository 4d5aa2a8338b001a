"""Adult, by its published schema."""

import gzip

import pytest
import torch

from data.samples import ADULT_ROW, real_data, write_adult
from qclip.apps.data import load


def test_rows_become_inputs_by_the_schema(tmp_path):
    task = load("adult", data_dir=write_adult(tmp_path / "adult").parent)
    inputs, labels = task.train.tensors
    assert (len(task.train), len(task.held_out)) == (30, 10)
    assert labels.tolist() == [0 if k % 3 else 1 for k in range(30)]
    assert torch.equal(task.held_out.tensors[1], labels[:10])  # dots and the remark of adult.test are passed over
    assert torch.equal(task.held_out.tensors[0], inputs[:10])
    assert torch.allclose(inputs.sum(1), torch.full((30,), 13.0))  # 14 columns, less the weight: shares of 1 each


def test_sampling_weights_are_not_used(tmp_path):
    write_adult(tmp_path)
    before = load("adult", data_dir=tmp_path).train.tensors[0]
    path = tmp_path / "adult.data.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b"77516", b"1")))
    assert torch.equal(load("adult", data_dir=tmp_path).train.tensors[0], before)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ADULT_ROW.replace("Male", "M"), r"column 'sex' \(line 31\) = 'M' must be one of 'Female', 'Male'"),
        (ADULT_ROW.replace("39", "old"), r"column 'age' \(line 31\) = 'old' must be a number"),
        (ADULT_ROW.replace("<=50K", "50K"), r"column 'income' \(line 31\) = '50K' must be one of '<=50K', '>50K'"),
        ("39, State-gov", r"line 31 of .* has 2 values for 15 columns; complete the row"),
    ],
    ids=["category", "number", "label", "ragged"],
)
def test_rows_off_the_schema_are_refused(tmp_path, row, message):
    write_adult(tmp_path, extra=row)
    with pytest.raises(ValueError, match=message):
        load("adult", data_dir=tmp_path)


def test_empty_and_absent_files_are_refused(tmp_path):
    message = "a folder with adult.data.gz and adult.test.gz, in it or in its subfolder adult .*get the Adult data set"
    with pytest.raises(ValueError, match=message):
        load("adult", data_dir=tmp_path)
    write_adult(tmp_path)
    (tmp_path / "adult.data.gz").write_bytes(gzip.compress(b"\n"))
    with pytest.raises(ValueError, match="has no rows of values; check that it is the right file"):
        load("adult", data_dir=tmp_path)


def test_the_published_files_are_read():
    task = load("adult", data_dir=real_data("adult"))
    inputs, labels = task.train.tensors
    assert (len(task.train), len(task.held_out)) == (32_561, 16_281)
    assert labels.sum() == 7841  # 24.08 %, as adult.names has it
    assert torch.allclose(inputs.sum(1), torch.tensor(13.0))
    majority = task.build_model()
    majority.bias.data[0] = 1.0
    assert task.score(majority)["accuracy"] == pytest.approx(0.7638, abs=1e-4)
