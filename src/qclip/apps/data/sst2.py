"""SST-2: the sentiment of sentences from film reviews (Socher et al., 2013), by a pretrained encoder."""

from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.utils.data import TensorDataset

from qclip import _validate as check
from qclip.apps.data import encoder, files, models
from qclip.apps.data.task import Defaults, Task, classifier

TRAINING_LENGTH, LENGTH = 32, 64
"""Tokens of an example for training, where a step takes half the time, and of a held-out one: fixed beforehand, not the
longest of the data."""
FILES = ("train.tsv.gz", "dev.tsv.gz")
LABELLED_TEST = (*FILES, "test.tsv.gz")
HEADER = "sentence\tlabel"

Tuned = Literal["full", "lora", "head"]
TUNED: dict[Tuned, str] = {"full": "all weights", "lora": "LoRA adapters and the head", "head": "the head"}


def sst2(data_dir: Path | None, *, tuned: Tuned = "full") -> Task:
    """Load SST-2: is a phrase of a film review favourable? The 872 sentences of GLUE's development set are held out.

    The protected example is a line of the training set: a phrase, not the sentence or the review that it is part of.

    They are those of dev.tsv, as published, unless test.tsv has labels: then the published training set was split into
    train.tsv and dev.tsv, both are trained on, and test.tsv is held out.

    Args:
        data_dir: Folder of the files.
        tuned: The weights to train: all of them, LoRA adapters and the head, or the head alone.
    """
    source = "get SST-2 of the GLUE benchmark (a header line, then sentence and label between tabs) and name its folder"
    paths = files.find(data_dir, ("sst2", "SST-2"), LABELLED_TEST, FILES, source=source)
    if len(paths) > 2 and files.read_text(paths[2]).split("\n", 1)[0].rstrip("\r") != HEADER:
        paths = paths[:2]
    *train_paths, held_out_path = paths
    assert data_dir is not None
    encoder.require("transformers", *(["peft"] if tuned == "lora" else []))
    folder = encoder.find(data_dir, paths[0].parent)
    train, held_out = _pairs(train_paths, folder, TRAINING_LENGTH), _pairs([held_out_path], folder, LENGTH)
    description = (
        f"{len(train)} phrases, cut to {TRAINING_LENGTH} tokens, {len(held_out)} sentences held out "
        f"({held_out_path.name}), 2 classes; {TUNED[tuned]} of a pretrained encoder"
    )
    name = "sst2" if tuned == "full" else f"sst2-{tuned}"
    build = partial(_model, folder, tuned)
    defaults = Defaults(batch_size=1024, epochs=10)
    return classifier(name, train, held_out, build, defaults, description, classes=("negative", "positive"), chunk=250)


def _model(folder: Path, tuned: Tuned) -> nn.Module:
    bert = encoder.pretrained(folder)
    width = bert.config.hidden_size
    if tuned == "head":
        bert.requires_grad_(False)
    return models.TextClassifier(encoder.with_adapters(bert) if tuned == "lora" else bert, width, 2)


def _pairs(paths: list[Path], folder: Path, length: int) -> TensorDataset:
    """Return token ids [N, length] with labels [N]."""
    texts, labels = zip(*(pair for path in paths for pair in read(path)), strict=True)
    return TensorDataset(encoder.tokens(folder, texts, length), torch.tensor(labels))


def read(path: Path) -> list[tuple[str, int]]:
    """Return the sentences of a file with their labels, 0 or 1."""
    header, *lines = files.read_text(path).rstrip("\n").split("\n")
    if header.rstrip("\r") != HEADER or not lines:
        raise check.Refusal(
            f"{path} begins with {header[:40]!r} and has {len(lines)} more lines; a file of SST-2 begins with "
            f"{HEADER!r}, and sentences follow: get it again"
        )
    pairs = []
    for number, line in enumerate(lines, start=2):
        text, _, label = line.rstrip("\r").partition("\t")
        if label not in ("0", "1"):
            remedy = "write a sentence, a tab and its label to each line"
            raise check.refuse(f"label in line {number} of {path}", label, "0 or 1", remedy)
        pairs.append((text, int(label)))
    return pairs
