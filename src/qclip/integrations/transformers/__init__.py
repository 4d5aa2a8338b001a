"""Hugging Face models: `PrivateTrainer`, losses for ``make_private(per_example_loss=...)``, batches of fixed length.

A model of `transformers` returns the mean over all labels of a batch, which divides one example's loss by the number of
labels of the others. The losses here are means over each example's own labels; a batch of one example has the loss of
the model. Batches are mappings with ``labels``, as the collate functions of `transformers` make them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from qclip import _validate as check

try:
    from transformers import BatchEncoding
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("transformers is not installed; pip install 'qclip[transformers]'") from missing

__all__ = [
    "PrivateTrainer",
    "PublicLengths",
    "bucketed_lengths",
    "causal_lm_loss",
    "classification_loss",
    "fixed_length",
    "question_answering_loss",
    "seq2seq_loss",
    "token_classification_loss",
]

LABELS = {"label": "labels", "label_ids": "labels"}
"""Names of labels in data sets, and in batches: the collate functions of `transformers` rename them, too."""
IGNORED = -100
"""The label of positions that do not count."""

Batch = Mapping[str, Any]


def causal_lm_loss(model: nn.Module, batch: Batch, *, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross entropy of each example's next tokens, [B].

    Terms that the model adds to its own loss, such as one that balances experts over the batch, are left out: they mix
    examples.

    Args:
        model: A causal language model.
        batch: Its inputs, and ``labels`` [B, T]: the ids, not shifted. Labels of -100 do not count, and an example
            without any other label has loss 0.
        label_smoothing: The share of the target that is spread over all classes.
    """
    logits = model(**_without_labels(batch)).logits
    labels = _behind_prompt(batch["labels"], logits)
    return _mean_over_labels(logits[:, :-1], labels[:, 1:], label_smoothing)


def seq2seq_loss(model: nn.Module, batch: Batch, *, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross entropy of each example's target tokens, [B].

    Args:
        model: An encoder-decoder model.
        batch: Its inputs, and ``labels`` [B, T]; labels of -100 do not count. Without ``decoder_input_ids`` the model
            makes them from the labels (shifted by one, behind its start token).
        label_smoothing: The share of the target that is spread over all classes.
    """
    given = _without_labels(batch) if "decoder_input_ids" in batch else batch
    return _mean_over_labels(model(**given).logits, batch["labels"], label_smoothing)


def token_classification_loss(model: nn.Module, batch: Batch, *, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross entropy of each example's labelled tokens, [B]: tags, or masked tokens.

    Args:
        model: A token classifier or a masked language model.
        batch: Its inputs, and ``labels`` [B, T] at the positions of their tokens; labels of -100 do not count.
        label_smoothing: The share of the target that is spread over all classes.
    """
    return _mean_over_labels(model(**_without_labels(batch)).logits, batch["labels"], label_smoothing)


def classification_loss(model: nn.Module, batch: Batch, *, label_smoothing: float = 0.0) -> Tensor:
    """Return the loss of each example's class, classes or regression targets, [B], for texts, images or sound.

    The model's ``config.problem_type`` selects the loss. Without one the choice is that of `transformers`: regression
    for one output, one class per example for integer labels [B], and several for labels [B, classes] of zeros and ones.

    Args:
        model: A classifier or a regression model.
        batch: Its inputs, and ``labels``.
        label_smoothing: The share of the target that is spread over all classes (of single labels only).
    """
    labels = batch["labels"]
    logits = model(**_without_labels(batch)).logits.float()
    kind = _problem_type(model, logits, labels)
    if kind == "single_label_classification":
        return F.cross_entropy(
            logits, labels.flatten(), ignore_index=IGNORED, reduction="none", label_smoothing=label_smoothing
        )
    if label_smoothing != 0:
        raise check.refuse("label_smoothing", label_smoothing, f"0 for {kind}", "leave it out")
    targets = labels.reshape(logits.shape).float()
    if kind == "regression":
        return (logits - targets).square().mean(1)
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)


def question_answering_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross entropy of each answer's first and last token, [B].

    Args:
        model: A model that extracts answers.
        batch: Its inputs, and ``start_positions`` and ``end_positions`` [B]. Positions outside of the text, such as
            those of an answer that was cut off, do not count.
    """
    positions = [batch[name].flatten() for name in ("start_positions", "end_positions")]
    outputs = model(
        **{name: value for name, value in batch.items() if name not in ("start_positions", "end_positions")}
    )
    total = torch.zeros_like(positions[0], dtype=torch.float32)
    for logits, at in zip((outputs.start_logits, outputs.end_logits), positions, strict=True):
        inside = torch.where((at >= 0) & (at < logits.shape[1]), at, IGNORED)
        total = total + F.cross_entropy(logits.float(), inside, ignore_index=IGNORED, reduction="none") / 2
    return total


@dataclass(frozen=True)
class PublicLengths:
    """A collate function that pads or truncates to public lengths; made by `fixed_length` or `bucketed_lengths`."""

    pad_id: int
    lengths: tuple[int, ...]
    """Ascending. A batch takes the shortest that holds all of it, or the last."""
    label_length: int | None
    """Length of the labels; None for that of the texts."""

    def __call__(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        """Return the batch of these examples, one row each."""
        parts = [self._parts(example) for example in examples]
        longest = max(len(each["input_ids"]) for each in parts)
        length = next((length for length in self.lengths if length >= longest), self.lengths[-1])
        rows = [{name: self._fit(name, part, length) for name, part in each.items()} for each in parts]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def _parts(self, example: Any) -> dict[str, Tensor]:
        given = example if isinstance(example, Mapping) else {"input_ids": example}
        parts = {LABELS.get(name, name): _tensor(name, value) for name, value in given.items()}
        ids = parts["input_ids"]
        if ids.dim() != 1:
            raise check.Refusal(
                f"input_ids has shape {tuple(ids.shape)} instead of [tokens]; give the collate function single "
                "examples, without a batch dimension"
            )
        real = parts.setdefault("attention_mask", torch.ones_like(ids))
        parts.setdefault("labels", torch.where(real.bool(), ids, IGNORED))
        return parts

    def _fit(self, name: str, part: Tensor, length: int) -> Tensor:
        if part.dim() != 1 or part.is_floating_point():
            return part  # one label, or one number per class
        if self.label_length is not None and (name == "labels" or name.startswith("decoder_")):
            length = self.label_length
        padding = IGNORED if name == "labels" else self.pad_id if name.endswith("input_ids") else 0
        return F.pad(part[:length], (0, max(length - len(part), 0)), value=padding)


def fixed_length(tokenizer_or_pad_id: Any, length: int, *, label_length: int | None = None) -> PublicLengths:
    """Return a collate function that pads or truncates every example at its end to ``length`` tokens.

    >>> batch = fixed_length(0, 4)([[5, 6, 7], [5, 6, 7, 8, 9]])
    >>> batch["input_ids"].tolist(), batch["attention_mask"].tolist()
    ([[5, 6, 7, 0], [5, 6, 7, 8]], [[1, 1, 1, 0], [1, 1, 1, 1]])
    >>> batch["labels"].tolist()
    [[5, 6, 7, -100], [5, 6, 7, 8]]

    - Fixed shapes are proven once and compiled once; a batch padded to its own longest text has a new shape nearly
      every time.
    - Examples are lists of ids, or mappings with ``input_ids`` and anything else that has one integer per token.
    - Padding has attention 0 and label -100. Without labels the ids become the labels, as causal language models
      expect. One label per example (``label`` becomes ``labels``), and vectors of floats, stay unchanged.

    Args:
        tokenizer_or_pad_id: A tokenizer with a padding token, or the id to pad with. Padding is masked, so any id will
            do, except for classifiers on top of a decoder, which look for the last token that is not the model's
            padding.
        length: A public length: chosen without looking at the texts, or from public knowledge of them.
        label_length: Length of the labels, where they are a text of their own (`seq2seq_loss`); ``length`` when left
            out.

    Raises:
        Refusal: The tokenizer has no padding token, or a length is not positive.
    """
    if isinstance(length, Sequence):
        raise check.Refusal(f"length = {length!r} is not one number; bucketed_lengths({length!r}) takes several")
    return bucketed_lengths([length], tokenizer_or_pad_id, label_length=label_length)


def bucketed_lengths(
    lengths: Sequence[int], tokenizer_or_pad_id: Any = 0, *, label_length: int | None = None
) -> PublicLengths:
    """Return a collate function that pads a batch to the shortest of some public lengths that holds all its texts.

    >>> collate = bucketed_lengths([2, 4])
    >>> collate([[5], [5, 6]])["input_ids"].tolist(), collate([[5], [5, 6, 7]])["input_ids"].tolist()
    ([[5, 0], [5, 6]], [[5, 0, 0, 0], [5, 6, 7, 0]])

    - Short batches cost less than with `fixed_length`, and there are only so many shapes to prove and to compile.
    - The longest text of a batch decides how far the others are padded. That is private only where padding changes
      nothing: every run proves it on its batches, and refuses a model that sees its padding.
    - Texts beyond the longest length are cut off. Everything else is as in `fixed_length`.

    Args:
        lengths: Public lengths: chosen without looking at the texts, or from public knowledge of them.
        tokenizer_or_pad_id: A tokenizer with a padding token, or the id to pad with (`fixed_length`).
        label_length: Length of the labels, where they are a text of their own.

    Raises:
        Refusal: The tokenizer has no padding token, there are no lengths, or one is not positive.
    """
    pad_id = tokenizer_or_pad_id if isinstance(tokenizer_or_pad_id, int) else tokenizer_or_pad_id.pad_token_id
    if pad_id is None:
        raise check.Refusal(
            "tokenizer.pad_token_id is None; pass an id instead, such as tokenizer.eos_token_id: padding is masked"
        )
    pad_id = check.count("pad_id", pad_id, "it is the id of a token", least=0)
    if len(lengths) == 0:
        raise check.Refusal("lengths = [] is empty; pass one number of tokens or several, such as [32, 64, 128]")
    ascending = sorted({check.count("length", each, "it is the number of tokens of every example") for each in lengths})
    label_length = None if label_length is None else check.count("label_length", label_length)
    return PublicLengths(pad_id, tuple(ascending), label_length)


def _tensor(name: str, value: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        remedy = "tokenize first, and drop columns that the model does not read"
        raise check.refuse(name, value, "a number or a list of numbers", remedy) from None
    return tensor if tensor.numel() else tensor.long()  # an empty text has no floats either


def _without_labels(batch: Batch) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name != "labels"}


def _behind_prompt(labels: Tensor, logits: Tensor) -> Tensor:
    """Return labels for all positions, [B, T]; those of a prompt that `peft` puts in front do not count."""
    return F.pad(labels, (max(logits.shape[1] - labels.shape[1], 0), 0), value=IGNORED)


def _mean_over_labels(logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    """Return the cross entropy of logits [B, T, V] at labels [B, T], averaged over each example's own labels, [B]."""
    labels = _behind_prompt(labels, logits)
    scores = logits.float().transpose(1, 2)
    losses = F.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="none", label_smoothing=label_smoothing)
    return losses.sum(1) / (labels != IGNORED).sum(1).clamp_min(1)


def _problem_type(model: nn.Module, logits: Tensor, labels: Tensor) -> str:
    config: Any = model.config
    if config.problem_type is not None:
        return config.problem_type
    if logits.shape[1] == 1:
        return "regression"
    return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"


def _register_batches() -> None:
    """Register BatchEncoding, the batch type of `transformers`, so that the engine finds the tensors inside."""
    if BatchEncoding not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            BatchEncoding,
            lambda batch: (list(batch.values()), list(batch.keys())),
            lambda values, keys: BatchEncoding(dict(zip(keys, values, strict=True))),
            serialized_type_name="transformers.BatchEncoding",
        )


_register_batches()


def __getattr__(name: str) -> Any:
    """Import the trainer when it is first used: that takes seconds, and needs accelerate."""
    if name == "PrivateTrainer":
        from qclip.integrations.transformers.trainer import PrivateTrainer

        return PrivateTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
