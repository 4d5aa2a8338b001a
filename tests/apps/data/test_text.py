"""Windows of characters: no overlap, a fixed alphabet, one speaker each."""

import gzip

import pytest
import torch

from data.samples import real_data, write_speeches
from qclip.apps.data import load
from qclip.apps.data.text import ALPHABET, OTHER, WINDOW, speeches, windows


def decoded(ids):
    return "".join((ALPHABET + "~")[k] if k < OTHER else "#" for k in ids.tolist())


def test_windows_do_not_overlap_and_drop_what_is_left():
    text = "".join(ALPHABET[k % 96] for k in range(150))
    found = windows([text, "short", text[:65]])
    assert found.shape == (3, WINDOW + 1)
    assert decoded(found[0]) + decoded(found[1]) == text[:130]
    assert decoded(found[2]) == text[:65]


def test_other_characters_have_one_number():
    found = windows(["é\t\U0001f3ad" + "a" * 62])
    assert found[0, :4].tolist() == [OTHER, OTHER, OTHER, ALPHABET.index("a")]


def test_the_next_character_is_the_target(tmp_path):
    task = load("shakespeare", data_dir=write_speeches(tmp_path))
    inputs, targets = task.train[0]
    assert inputs.shape == targets.shape == (WINDOW,)
    assert torch.equal(inputs[1:], targets[:-1])
    assert "held out (every 6th), 97 characters fixed beforehand" in task.description


def test_speeches_stay_with_their_speaker(tmp_path):
    text = "header\nhamlet\tA\tone\\ntwo\nhamlet\tB\tthree\nhamlet\tA\tfour\nlear\tA\tfive\n"
    assert speeches(text, tmp_path) == ["one\ntwo\nfour", "three", "five"]


def test_plain_text_is_taken_where_there_are_no_speeches(tmp_path):
    folder = tmp_path / "shakespeare"
    folder.mkdir()
    (folder / "tinyshakespeare_input.txt.gz").write_bytes(gzip.compress(("To be, or not to be" * 100).encode()))
    task = load("shakespeare", data_dir=tmp_path)
    assert len(task.train) + len(task.held_out) == 1900 // 65
    write_speeches(folder)
    assert len(load("shakespeare", data_dir=tmp_path).train) != len(task.train)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("header\nhamlet\tA\n", "line 2 of .* has 2 fields instead of 3, between tabs; write tabs within"),
        ("header\nhamlet\tA\tshort\n", "gives 0 windows of 65 characters, fewer than 2"),
        ("", "gives 0 windows"),
        (b"\xff\xfe\xfa", r"is not UTF-8 text \(byte 0\); save it in that encoding"),
    ],
    ids=["ragged", "short", "empty", "encoding"],
)
def test_bad_files_are_refused(tmp_path, content, message):
    raw = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "speeches.tsv.gz").write_bytes(gzip.compress(raw))
    with pytest.raises(ValueError, match=message):
        load("shakespeare", data_dir=tmp_path)


def test_files_that_are_not_there_are_named(tmp_path):
    message = "with speeches.tsv.gz, or tinyshakespeare_input.txt.gz, in it or in its subfolder shakespeare .*get the"
    with pytest.raises(ValueError, match=message):
        load("shakespeare", data_dir=tmp_path)


def test_the_real_speeches_are_read():
    task = load("shakespeare", data_dir=real_data("shakespeare"))
    inputs, _ = task.train.tensors
    assert len(task.train) > 50_000
    assert (inputs == OTHER).float().mean() < 1e-3
