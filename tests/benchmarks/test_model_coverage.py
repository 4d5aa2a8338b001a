"""The sweep over transformers: tiny models of every family, what a row says, and a sweep that goes on."""

import json
import os
import time

import pytest
import torch

pytest.importorskip("transformers")

import model_coverage
from model_coverage_page import Row, page
from tiny_batches import LENGTHS, tiny_problem
from tiny_configs import VOCABULARY, tiny_config

transformers = model_coverage.transformers

FAMILIES = {
    "a decoder": "LlamaForCausalLM",
    "an encoder": "BertForSequenceClassification",
    "an encoder and a decoder": "T5ForConditionalGeneration",
    "images": "ViTForImageClassification",
    "stages of images": "SwinForImageClassification",
    "audio": "Wav2Vec2ForCTC",
    "spectra": "WhisperForConditionalGeneration",
    "images and text": "LlavaForConditionalGeneration",
    "patches and text": "Qwen2VLForConditionalGeneration",
    "a state space": "MambaForCausalLM",
    "layers of two kinds": "Zamba2ForCausalLM",
    "experts": "MixtralForCausalLM",
    "boxes around words": "LayoutLMForTokenClassification",
    "choices": "BertForMultipleChoice",
    "a series": "PatchTSTForPrediction",
}


@pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES)
def test_a_tiny_model_and_a_padded_batch(name):
    problem = tiny_problem(getattr(transformers, name))
    assert sum(p.numel() for p in problem.model.parameters()) < 1_500_000
    assert problem.model.training
    assert all(len(x) == len(LENGTHS) for x in problem.inputs.values())
    if "input_ids" in problem.inputs:
        assert problem.inputs["input_ids"].max() < VOCABULARY
        assert not problem.inputs["attention_mask"].all(), "nothing is padded"


def test_equal_tokens_of_parts_stay_equal():
    config = tiny_config(transformers.Qwen2VLConfig)
    assert config.image_token_id != config.video_token_id
    assert max(config.image_token_id, config.video_token_id) < VOCABULARY == config.text_config.vocab_size


def test_an_exact_model():
    row = model_coverage.Measurement("LlamaForCausalLM").row()
    assert (row.status, row.proofs, row.said) == ("exact", 2, "")
    assert max(row.sum_error, row.norm_error) < 1e-5
    assert row.first > row.fifth > 0
    assert row.new_length > row.seen_length > 0


@pytest.mark.parametrize("wrong", ["sums", "norms"])
def test_a_wrong_sum_or_norm_is_found(wrong, monkeypatch):
    right = model_coverage.Engine.clipped

    def clipped(*arguments, **options):
        result = right(*arguments, **options)
        for x in result.sums.values() if wrong == "sums" else [result.norms]:
            x.mul_(1.001)
        return result

    monkeypatch.setattr(model_coverage.Engine, "clipped", clipped)
    row = model_coverage.Measurement("LlamaForCausalLM").row()
    assert row.status == "differs"
    assert {"sums": row.sum_error, "norms": row.norm_error}[wrong] == pytest.approx(1e-3, rel=0.01)


ONE_BY_ONE = {
    "experts in a loop": "JetMoeForCausalLM",
    "experts with dropout inside": "SwitchTransformersForConditionalGeneration",
    "gates of a linear recurrence": "RecurrentGemmaForCausalLM",
    "relative positions with dropout": "XLNetForSequenceClassification",
    "pooled relative positions": "FunnelForSequenceClassification",
    "positions cut to the image": "ViltForQuestionAnswering",
    "speech and masks of numpy": "SpeechT5ForSpeechToText",
}
IN_FAST_TESTS = {"experts in a loop"}


@pytest.mark.filterwarnings("ignore:examples are run through the model one at a time:UserWarning")
@pytest.mark.parametrize(
    "name",
    [pytest.param(v, id=k, marks=[] if k in IN_FAST_TESTS else pytest.mark.slow) for k, v in ONE_BY_ONE.items()],
)
def test_a_model_that_is_run_one_example_at_a_time(name):
    row = model_coverage.Measurement(name).row()
    assert (row.status, row.is_alone) == ("exact", True)
    assert max(row.sum_error, row.norm_error) < 1e-5


ROUTED = {
    "sorted experts": "Qwen3MoeForCausalLM",
    "shared and sorted experts": "DeepseekV3ForCausalLM",
    "experts with biases": "GptOssForCausalLM",
    "images among words": "LlavaForConditionalGeneration",
    "patches among words": "Qwen2VLForConditionalGeneration",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(v, id=k, marks=[] if k.startswith("sorted") else pytest.mark.slow) for k, v in ROUTED.items()],
)
def test_a_model_whose_rows_are_followed(name):
    row = model_coverage.Measurement(name).row()
    assert (row.status, row.said, row.proofs) == ("exact", "", 2)
    assert max(row.sum_error, row.norm_error) < 1e-5


def test_a_refused_model_says_why_and_whether_its_examples_mix():
    row = model_coverage.Measurement("ResNetForImageClassification").row()
    assert row.status == "refused"
    assert "BatchNorm2d" in row.reason
    assert row.mixes < 1e-4  # in evaluation mode


def test_a_sweep_goes_on_where_it_stopped(tmp_path, monkeypatch):
    measured = []

    def sweep(names, jobs, limit):
        for name in names:
            measured.append(name)
            yield Row(name, "", "exact")
            if len(measured) == 2:
                return

    monkeypatch.setattr(model_coverage, "sweep", sweep)
    options = model_coverage.Options(out=tmp_path, classes=("LlamaFor*",), page=tmp_path / "page.md")
    model_coverage.main(options)
    model_coverage.main(options)
    assert sorted(measured) == sorted(name for name in model_coverage.classes() if name.startswith("LlamaFor"))
    assert len(measured) > 2
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["name"] for line in lines] == measured
    assert f"| exact | {len(measured)} |" in (tmp_path / "page.md").read_text()


def test_processes_that_die_or_take_too_long(monkeypatch):
    def measurement(name):
        if name == "dies":
            os._exit(3)
        time.sleep(60 if name == "sleeps" else 0)
        raise ValueError(name)

    monkeypatch.setattr(model_coverage, "Measurement", measurement)
    rows = {row.name: row for row in model_coverage.sweep(["dies", "sleeps", "fails"], jobs=2, limit=1.0)}
    assert {name: row.status for name, row in rows.items()} == {"dies": "crashed", "sleeps": "late", "fails": "failed"}
    assert rows["fails"].reason == "ValueError: fails"


def test_what_the_page_says():
    rows = [
        Row("Fast", "", "exact", fifth=3.0, first=60.0),
        Row("Alone", "", "exact", fifth=6.0, first=60.0, said="examples are run through the model one at a time"),
        Row("Again", "", "exact", fifth=50.0, first=60.0, proofs=7, calls=7, said="it is proven at every step"),
        Row("Silent", "", "exact", fifth=50.0, first=60.0, proofs=7, calls=7),
        Row("Batched", "", "refused", "'norm' (BatchNorm2d) keeps what the data did to it", mixes=1e-7),
        Row("Mixed", "", "refused", "examples mix", mixes=0.1),
        Row("Spared", "", "refused", "examples mix", mixes=1e-7),
        Row("Unknown", "", "unbuilt", "KeyError: 3"),
        Row("Wrong", "", "differs", sum_error=0.1),
    ]
    text = page(rows, ["Later"], size=4, exact=1e-4, transformers="5", torch="2", date="May 2026")
    for line in (
        "| exact | 1 |",
        "| exact, one example at a time | 1 |",
        "| exact, and more than 20 plain steps in the fifth call, or a proof at every step | 2 |",
        "| not run | 1 |",
        "| differ from autograd | 1 |",
        "| refused, though examples do not seem to mix | 1 |",
        "| refused | 2 |",
        "| Again | 50 | proven at every step: it is proven at every step |",
        "| Silent | 50 | proven at every step, in silence |",
        "| examples mix | 1: Spared |",
        "| KeyError: ... | 1: Unknown |",
    ):
        assert line in text, line


def test_gradients_that_are_not_finite_are_not_measured(monkeypatch):
    measurement = model_coverage.Measurement("LlamaForCausalLM")
    with torch.no_grad():
        next(measurement.model.parameters()).fill_(torch.nan)
    with pytest.raises(model_coverage.NotBuilt, match="with autograd alone"):
        measurement.row()
