"""Text: Shakespeare, character by character."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qclip import _validate as check
from qclip.apps.data import files, models
from qclip.apps.data.task import Defaults, Task, classifier, hold_out

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
"""Line feed and printable ASCII: fixed beforehand, not collected from the text."""
OTHER = len(ALPHABET)
"""The id of every other character."""
WINDOW = 64
SPEECHES = "speeches.tsv.gz"
PLAIN = "tinyshakespeare_input.txt.gz"
SOURCE = (
    "get the speeches, one to a line after a header line: play, speaker and text between tabs, line feeds written as "
    "\\n"
)


def shakespeare(data_dir: Path | None) -> Task:
    """Load windows of 64 characters, to predict each character from those before it; every sixth is held out.

    The protected example is a window, not a speaker. Windows do not overlap; those of the speeches stay within one
    speaker of one play.
    """
    source = f"{SOURCE}; or the text known as tiny Shakespeare, input.txt of the char-rnn project"
    (path,) = files.find(data_dir, ("shakespeare",), (SPEECHES,), (PLAIN,), source=source)
    text = files.read_text(path)
    pieces = speeches(text, path) if path.name.startswith("speeches") else [text]
    ids = windows(pieces)
    if len(ids) < 2:
        raise check.Refusal(
            f"{path} gives {len(ids)} windows of {WINDOW + 1} characters, fewer than 2; take a longer text"
        )
    train, held_out = hold_out(ids[:, :-1], ids[:, 1:])
    description = (
        f"{len(train)} windows of {WINDOW} characters, {len(held_out)} held out (every 6th), "
        f"{OTHER + 1} characters fixed beforehand"
    )
    model = partial(models.CausalTransformer, OTHER + 1, WINDOW)
    defaults = Defaults(batch_size=512, epochs=5)
    return classifier("shakespeare", train, held_out, model, defaults, description, chunk=250)


def speeches_file(data_dir: Path | None) -> Path:
    """Return the file of the speeches, which knows the speakers."""
    (path,) = files.find(data_dir, ("shakespeare",), (SPEECHES,), source=SOURCE)
    return path


def speeches(text: str, path: Path) -> list[str]:
    """Return the joined speeches of each speaker in each play, from lines of play, speaker and text."""
    by_speaker: dict[tuple[str, str], list[str]] = {}
    for number, line in enumerate(text.rstrip("\n").split("\n")[1:], start=2):
        fields = line.rstrip("\r").split("\t")
        if len(fields) != 3:
            raise check.Refusal(
                f"line {number} of {path} has {len(fields)} fields instead of 3, between tabs; write tabs within a "
                "speech as spaces"
            )
        play, speaker, speech = fields
        by_speaker.setdefault((play, speaker), []).append(speech.replace("\\n", "\n"))
    return ["\n".join(each) for each in by_speaker.values()]


def windows(pieces: Sequence[str], length: int = WINDOW + 1) -> Tensor:
    """Return the character ids of each window, [N, length]; pieces are cut from their start, the remainder is dropped.

    >>> windows(["a" * 64 + "é" + "left", "too short"])[:, -2:]
    tensor([[66, 96]])
    """
    numbers = {ord(character): k for k, character in enumerate(ALPHABET)}
    table = np.full(0x110000, OTHER)
    table[list(numbers)] = list(numbers.values())
    rows = [np.zeros((0, length), dtype=np.int64)]
    for piece in pieces:
        codes = np.frombuffer(piece.encode("utf-32-le"), dtype="<u4")
        count = len(codes) // length
        rows.append(table[codes[: count * length]].reshape(count, length))
    return torch.from_numpy(np.concatenate(rows))
