"""Losses for Hugging Face models: each example has the loss it would have alone, and the engine clips it exactly."""

import importlib
import pickle
import sys
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from qclip.engine import oracle
from qclip.thresholds import Constant
from qclip.training.make import make_private
from shards import named

transformers = pytest.importorskip("transformers")
integration = pytest.importorskip("qclip.integrations.transformers")

V = 13
SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
LENGTHS = (3, 7, 5, 2, 7, 6)
"""Of the examples, in tokens; the longest fits exactly."""


def build(name: str, config: str, **options: Any):
    """A model without dropout, and with random weights large enough for every token to matter."""
    torch.manual_seed(0)
    configured = getattr(transformers, config)(vocab_size=V, initializer_range=0.4, **options)
    return getattr(transformers, name)(configured).eval()


def gpt2():
    return build("GPT2LMHeadModel", "GPT2Config", n_positions=16, n_embd=8, n_layer=2, n_head=2, eos_token_id=0)


def llama():
    return build("LlamaForCausalLM", "LlamaConfig", **SIZES, num_key_value_heads=1, max_position_embeddings=16)


def t5():
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2, "relative_attention_num_buckets": 4}
    return build("T5ForConditionalGeneration", "T5Config", **sizes, decoder_start_token_id=0)


def bert(head: str, **options: Any):
    return build(f"BertFor{head}", "BertConfig", **SIZES, max_position_embeddings=16, **options)


def texts(labels=lambda words: None) -> list[dict[str, Any]]:
    """Examples of several lengths, with the labels that a function makes of their words."""
    draw = torch.Generator().manual_seed(1)
    examples = []
    for length in LENGTHS:
        words = torch.randint(1, V, (length,), generator=draw)
        made = labels(words)
        examples.append({"input_ids": words} | ({} if made is None else {"labels": made}))
    return examples


def prompted(words):
    """The first two words are the prompt: they have no labels."""
    return torch.cat([torch.full((2,), -100), words[2:]])


@dataclass(frozen=True)
class Row:
    """A model, its loss, and the labels of its examples."""

    name: str
    model: Any
    loss: Any
    labels: Any = lambda words: None

    def batch(self, length: int = 7):
        return integration.fixed_length(0, length)(texts(self.labels))


ROWS = [
    Row("gpt2", gpt2, integration.causal_lm_loss),
    Row("gpt2-prompted", gpt2, integration.causal_lm_loss, lambda words: prompted(words) if len(words) > 2 else words),
    Row("llama", llama, integration.causal_lm_loss),
    Row("t5", t5, integration.seq2seq_loss, lambda words: words.flip(0)[:4]),
    Row("bert-classes", lambda: bert("SequenceClassification", num_labels=3), integration.classification_loss,
        lambda words: int(words.sum()) % 3),
    Row("bert-several", lambda: bert("SequenceClassification", num_labels=4), integration.classification_loss,
        lambda words: [float(int(word) % 2) for word in (*words, 1, 0)[:4]]),
    Row("bert-number", lambda: bert("SequenceClassification", num_labels=1), integration.classification_loss,
        lambda words: float(words.sum()) / 10),
    Row("bert-numbers", lambda: bert("SequenceClassification", num_labels=2, problem_type="regression"),
        integration.classification_loss, lambda words: [float(words[0]) / 5, float(words[-1]) / 5]),
    Row("bert-tags", lambda: bert("TokenClassification", num_labels=3), integration.token_classification_loss,
        lambda words: words % 3),
    Row("bert-masked", lambda: bert("MaskedLM"), integration.token_classification_loss,
        lambda words: torch.where(words % 2 == 0, words, -100).index_fill(0, torch.tensor([0]), 4)),
]  # fmt: skip
rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def alone(model, example):
    """The loss that the model itself gives one example, without padding."""
    return model(**{name: torch.as_tensor(value)[None] for name, value in example.items()}).loss


@rows
def test_each_example_has_the_loss_it_would_have_alone(row):
    model, batch = row.model(), row.batch()
    examples = texts(row.labels)
    if row.loss is integration.causal_lm_loss:
        examples = [{"labels": example["input_ids"]} | example for example in examples]
    expected = torch.stack([alone(model, example) for example in examples])
    losses = row.loss(model, batch)
    assert losses.shape == (len(examples),)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert losses.std() > 1e-4, "the examples cannot be told apart: the test shows nothing"


def private_sums(model, loss, examples, collate, clip_norm):
    """One step of `make_private` over all examples without noise: its sums, and the batch it saw."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = make_private(
        model, optimizer, DataLoader(examples, collate_fn=collate), per_example_loss=loss, batch_size=len(examples),
        steps=1, noise_multiplier=0, threshold=Constant(clip_norm),
    )  # fmt: skip
    (batch,) = training.loader
    training.loss(batch).backward()
    return {name: p.grad * len(examples) for name, p in model.named_parameters()}, batch


def assert_close(sums, expected):
    """Equal to the rounding of the largest."""
    atol = 2e-5 * max(float(sum_.abs().max()) for sum_ in expected.values())
    for name, sum_ in expected.items():
        torch.testing.assert_close(sums[name], sum_, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


QUICK = ("gpt2", "bert-classes")
"""The engine's own tests compare more models with the oracle."""


@pytest.mark.parametrize("row", named(QUICK, ROWS, name=attrgetter("name")))
def test_private_sums_equal_the_oracle(row):
    model = row.model()
    norms = oracle.clipped(model, lambda batch: row.loss(model, batch), row.batch(), 1.0).norms
    middle = float(norms.median())
    assert norms.min() < middle < norms.max()
    sums, batch = private_sums(model, row.loss, texts(row.labels), integration.fixed_length(0, 7), middle)
    assert len(batch["input_ids"]) == len(LENGTHS)
    assert_close(sums, oracle.clipped(model, lambda batch: row.loss(model, batch), batch, middle).sums)


@rows
def test_padding_changes_no_gradient(row):
    model = row.model()
    short, long = (
        oracle.clipped(model, lambda batch: row.loss(model, batch), row.batch(length), 0.5) for length in (7, 12)
    )
    torch.testing.assert_close(short.norms, long.norms, rtol=1e-4, atol=1e-5)
    # A table of positions, or of words, has rows of its own for the padding: they get no gradient either.
    assert_close(long.sums, short.sums)


@rows
def test_what_lies_under_the_mask_does_not_count(row):
    model, batch = row.model(), row.batch()
    others = torch.where(batch["attention_mask"].bool(), batch["input_ids"], 5)
    assert not torch.equal(others, batch["input_ids"])
    torch.testing.assert_close(row.loss(model, batch | {"input_ids": others}), row.loss(model, batch))


def test_without_its_mask_an_encoder_sees_the_padding():
    row = next(row for row in ROWS if row.name == "bert-classes")
    model, batch = row.model(), row.batch()
    unmasked = batch | {"attention_mask": torch.ones_like(batch["attention_mask"])}
    assert not torch.allclose(row.loss(model, unmasked), row.loss(model, batch))


@pytest.mark.parametrize("name", ["gpt2", "t5", "bert-tags", "bert-classes"])
def test_an_example_without_labels_has_no_loss_and_no_gradient(name):
    row = next(row for row in ROWS if row.name == name)
    model, batch = row.model(), row.batch()
    labels = batch["labels"].clone()
    labels[1] = -100
    batch["labels"] = labels
    found = oracle.clipped(model, lambda batch: row.loss(model, batch), batch, 1.0)
    assert found.losses[1] == 0
    assert found.norms[1] == 0
    assert (found.norms > 0).sum() == len(LENGTHS) - 1
    one = {name: value[1:2] for name, value in batch.items()}
    assert model(**one).loss.isnan()  # what the model's own mean would do


@pytest.mark.parametrize("make", [gpt2, pytest.param(llama, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "lengths", [(7, 7, 7, 7), (7, 7, 2, 7), (7, 0, 1, 4)], ids=["all-full", "one-short", "one-empty"]
)
def test_lengths_that_make_models_take_another_path(make, lengths):
    """Without any padding the models drop the mask; the engine must accept what replaces one by the other."""
    model = make()
    draw = torch.Generator().manual_seed(2)
    examples = [torch.randint(1, V, (length,), generator=draw).tolist() for length in lengths]
    sums, batch = private_sums(model, integration.causal_lm_loss, examples, integration.fixed_length(0, 7), 0.5)
    expected = oracle.clipped(model, lambda batch: integration.causal_lm_loss(model, batch), batch, 0.5)
    assert all(sum_.isfinite().all() for sum_ in sums.values())
    assert_close(sums, expected.sums)


def test_decoder_inputs_of_the_batch_are_used():
    row = next(row for row in ROWS if row.name == "t5")
    model, batch = row.model(), row.batch()
    made = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    torch.testing.assert_close(row.loss(model, batch | {"decoder_input_ids": made}), row.loss(model, batch))
    assert not torch.allclose(row.loss(model, batch | {"decoder_input_ids": made.roll(1, 1)}), row.loss(model, batch))


def test_the_mean_of_a_batch_is_not_the_mean_of_its_examples():
    """Why these losses exist: the model's own divides by the labels of all examples."""
    row = ROWS[0]
    model, batch = row.model(), row.batch()
    assert not torch.allclose(model(**batch).loss, row.loss(model, batch).mean(), rtol=1e-3)


def test_bfloat16_losses_are_float32():
    row = ROWS[0]
    losses = row.loss(row.model().bfloat16(), row.batch())
    assert losses.dtype == torch.float32


# Fixed lengths


def word_tokenizer(**special):
    """A tokenizer of a few words, made here: nothing is downloaded."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[pad]": 0, "[unknown]": 1, "[end]": 2, "the": 3, "fox": 4, "sleeps": 5}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[unknown]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[unknown]", **special)


def test_fixed_length_takes_what_a_tokenizer_gives():
    tokenizer = word_tokenizer(pad_token="[pad]")
    collate = integration.fixed_length(tokenizer, 4)
    batch = collate([tokenizer("the fox sleeps"), tokenizer("the fox the fox sleeps")])
    assert batch["input_ids"].tolist() == [[3, 4, 5, 0], [3, 4, 3, 4]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch["labels"].tolist() == [[3, 4, 5, -100], [3, 4, 3, 4]]
    assert {tensor.shape for tensor in batch.values()} == {(2, 4)}


def test_the_padding_id_is_still_a_label_inside_a_text():
    tokenizer = word_tokenizer(eos_token="[end]")
    batch = integration.fixed_length(tokenizer.eos_token_id, 3)([[3, 2]])
    assert batch["labels"].tolist() == [[3, 2, -100]]


def test_masked_positions_of_an_example_get_no_label():
    batch = integration.fixed_length(0, 4)([{"input_ids": [9, 3, 4], "attention_mask": [0, 1, 1]}])
    assert batch["labels"].tolist() == [[-100, 3, 4, -100]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 0]]


def test_labels_may_have_a_length_of_their_own():
    example = {"input_ids": [3, 4, 5], "labels": [6, 7, 8, 9], "decoder_input_ids": [1, 6, 7, 8]}
    batch = integration.fixed_length(2, 5, label_length=6)([example])
    assert batch["input_ids"].tolist() == [[3, 4, 5, 2, 2]]
    assert batch["labels"].tolist() == [[6, 7, 8, 9, -100, -100]]
    assert batch["decoder_input_ids"].tolist() == [[1, 6, 7, 8, 2, 2]]


def test_one_label_and_vectors_of_floats_stay_as_they_are():
    collate = integration.fixed_length(0, 3)
    assert collate([{"input_ids": [3], "labels": 2}, {"input_ids": [4], "labels": 0}])["labels"].tolist() == [2, 0]
    assert collate([{"input_ids": [3], "labels": [0.5, 1.0]}])["labels"].tolist() == [[0.5, 1.0]]


def test_an_empty_text_is_all_padding():
    batch = integration.fixed_length(0, 2)([[], [3]])
    assert batch["attention_mask"].tolist() == [[0, 0], [1, 0]]
    assert batch["labels"].tolist() == [[-100, -100], [3, -100]]
    assert batch["input_ids"].dtype == torch.long


def test_public_buckets():
    collate = integration.bucketed_lengths([6, 2, 4])
    for longest, length in ((1, 2), (2, 2), (3, 4), (6, 6), (9, 6)):
        batch = collate([[3], [4] * longest])
        assert {tensor.shape for tensor in batch.values()} == {(2, length)}
        assert batch["attention_mask"].sum(1).tolist() == [1, min(longest, length)]


def test_labels_as_data_sets_name_them():
    assert integration.fixed_length(0, 2)([{"input_ids": [3], "label": 2}])["labels"].tolist() == [2]


def test_a_run_on_public_buckets(caplog):
    row = replace(COLLATORS["padding"], collator=lambda _: integration.bucketed_lengths([7, 8, 9]))
    assert train(row, steps=8) == 8
    assert 1 <= caplog.text.count("proving a new shape of batches") <= 2


class Tokens(torch.utils.data.Dataset):
    """What a tokenizer gives, of 2 to 9 words."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 60

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        words = torch.randint(1, 6, (int(torch.randint(2, 10, (), generator=draw)),), generator=draw)
        return self.make(words.tolist())


def tagged(words):
    return {"input_ids": words, "attention_mask": [1] * len(words), "labels": words}


def judged(words):
    return {"input_ids": words, "attention_mask": [1] * len(words), "labels": words[0] % 2}


def plain(words):
    return {"input_ids": words, "attention_mask": [1] * len(words)}


def bare(words):
    return {"input_ids": words, "labels": words[0] % 2}


@dataclass(frozen=True)
class Collated:
    """What a tokenizer gives, what collates it, and what is trained on it."""

    items: Any
    collator: Any
    model: Any
    loss: Any


COLLATORS = {
    "padding": Collated(
        judged,
        transformers.DataCollatorWithPadding,
        lambda: bert("SequenceClassification"),
        integration.classification_loss,
    ),
    "tags": Collated(
        tagged,
        transformers.DataCollatorForTokenClassification,
        lambda: bert("TokenClassification", num_labels=V),
        integration.token_classification_loss,
    ),
    "masked words": Collated(
        plain,
        lambda tokenizer: transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5),
        lambda: bert("MaskedLM"),
        integration.token_classification_loss,
    ),
    "next words": Collated(
        plain,
        lambda tokenizer: transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
        gpt2,
        integration.causal_lm_loss,
    ),
}


def train(row, names=("input_ids", "attention_mask"), wrap=lambda collate: collate, steps=2):
    """A few steps; the tokenizer pads what has these names."""
    tokenizer = word_tokenizer(pad_token="[pad]", mask_token="[unknown]")
    tokenizer.model_input_names = list(names)
    model = row.model().train()
    training = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(Tokens(row.items), collate_fn=wrap(row.collator(tokenizer))),
        per_example_loss=row.loss,
        batch_size=6,
        steps=steps,
        noise_multiplier=1.0,
        threshold=Constant(1.0),
        seed=0,
    )
    for batch in training.loader:
        training.step(batch)
    return len(training.history)


@pytest.mark.parametrize(
    "row",
    named(
        {"padding", "masked words"},
        COLLATORS.values(),
        name=lambda row: next(name for name, each in COLLATORS.items() if each is row),
    ),
)
def test_collators_that_pad_to_the_longest_what_the_model_masks(row):
    assert train(row) == 2


def test_a_collator_whose_padding_the_model_sees():
    """Without a mask in the batch, the model attends to the padding."""
    message = r"DataCollatorWithPadding mixes examples.*fixed_length.*bucketed_lengths"
    with pytest.raises(ValueError, match=message):
        train(replace(COLLATORS["padding"], items=bare), names=["input_ids"])


def test_a_collator_that_counts_the_words_of_the_batch():
    def counting(collate):
        return lambda items: dict(collate(items)) | {"num_items_in_batch": sum(len(x["input_ids"]) for x in items)}

    def shared(model, batch):
        given = {key: value for key, value in batch.items() if key != "num_items_in_batch"}
        return integration.causal_lm_loss(model, given) / batch["num_items_in_batch"]

    with pytest.raises(ValueError, match="mixes examples"):
        train(replace(COLLATORS["next words"], loss=shared), wrap=counting)


def test_fixed_length_goes_to_worker_processes():
    collate = integration.fixed_length(0, 2)
    assert pickle.loads(pickle.dumps(collate)) == collate


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: integration.fixed_length(word_tokenizer(), 4), "tokenizer.pad_token_id"),
        (lambda: integration.fixed_length(0, 0), "length"),
        (lambda: integration.fixed_length(0, [2, 4]), r"bucketed_lengths\(\[2, 4\]\)"),
        (lambda: integration.bucketed_lengths([]), r"lengths = \[\] is empty"),
        (lambda: integration.fixed_length(-1, 3), "pad_id"),
        (lambda: integration.fixed_length(0, 3, label_length=0), "label_length"),
        (lambda: integration.fixed_length(0, 3)([{"input_ids": [[1, 2]]}]), "input_ids"),
        (lambda: integration.fixed_length(0, 3)([{"input_ids": [1, 2], "text": "a fox"}]), "text = 'a fox'"),
    ],
    ids=[
        "no-padding-token",
        "no-length",
        "several",
        "no-lengths",
        "negative-id",
        "no-label-length",
        "a-batch",
        "a-string",
    ],
)
def test_refusals_name_what_is_wrong(make, named):
    with pytest.raises(ValueError, match=named):
        make()


# What transformers itself makes


def test_batches_of_its_own_collate_functions_train():
    tokenizer = word_tokenizer(pad_token="[pad]")
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    examples = [tokenizer(text) for text in ("the fox", "the fox sleeps", "fox sleeps", "the the fox")]
    assert isinstance(collate(examples), transformers.BatchEncoding)
    model = gpt2()
    sums, batch = private_sums(model, integration.causal_lm_loss, examples, collate, 0.5)
    plain = dict(batch)
    assert_close(sums, oracle.clipped(model, lambda batch: integration.causal_lm_loss(model, batch), plain, 0.5).sums)


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "qclip.integrations.transformers")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'qclip\[transformers\]'"):
        importlib.import_module("qclip.integrations.transformers")
