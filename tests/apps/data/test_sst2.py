"""SST-2: sentences as token ids, by a pretrained encoder whose files are checked; exact per-example gradients."""

import json
import sys

import pytest
import torch

from data.samples import real_data, write_encoder, write_sst2
from qclip.apps.data import encoder, load
from qclip.apps.data.sst2 import LENGTH, TRAINING_LENGTH
from qclip.engine import clipped_gradients

NAMES = ("sst2", "sst2-lora", "sst2-head")


@pytest.fixture
def not_installed(monkeypatch):
    """No encoder but that of the folder."""
    monkeypatch.setattr(encoder, "PACKAGE", "no_such_package")


@pytest.mark.parametrize("subfolder", ["", "sst2", "SST-2"])
def test_sentences_become_ids_of_a_fixed_length(tmp_path, subfolder):
    write_sst2(tmp_path / subfolder)
    task = load("sst2", data_dir=tmp_path)
    assert task.description == (
        "24 phrases, cut to 32 tokens, 8 sentences held out (dev.tsv), 2 classes; all weights of a pretrained encoder"
    )
    ids, labels = task.train.tensors
    assert ids.shape == (24, TRAINING_LENGTH)
    assert task.held_out.tensors[0].shape == (8, LENGTH)
    assert ids[1].tolist() == [2, 4, 7, 6, 6, 3] + [0] * 26  # [CLS] a good film film [SEP]
    assert labels.tolist() == [0, 1] * 12


def test_long_sentences_are_cut_and_unknown_words_have_one_id(tmp_path):
    ids = encoder.tokens(write_encoder(tmp_path / "encoder"), ["film " * 100, "films, naturally"], LENGTH)
    assert ids[0].tolist() == [2] + [6] * 62 + [3]
    assert ids[1, :7].tolist() == [2, 6, 8, 1, 1, 3, 0]


def test_a_labelled_test_set_is_held_out_and_the_rest_trained_on(tmp_path):
    write_sst2(tmp_path)
    (tmp_path / "test.tsv").write_text("index\tsentence\n0\ta good film\n", encoding="utf-8")  # as published
    assert len(load("sst2", data_dir=tmp_path).train) == 24
    (tmp_path / "test.tsv").write_text("sentence\tlabel\na good film\t1\n", encoding="utf-8")
    task = load("sst2", data_dir=tmp_path)
    assert (len(task.train), len(task.held_out)) == (32, 1)
    assert "1 sentences held out (test.tsv)" in task.description


def trained_parts(model):
    return {name.split(".")[0] + (".lora" if "lora" in name else "") for name, p in model.named_parameters()
            if p.requires_grad}  # fmt: skip


def test_the_names_say_what_is_trained(tmp_path):
    write_sst2(tmp_path)
    models = {name: load(name, data_dir=tmp_path).build_model() for name in NAMES}
    assert trained_parts(models["sst2"]) == {"encoder", "head"}
    assert trained_parts(models["sst2-lora"]) == {"encoder.lora", "head"}
    assert trained_parts(models["sst2-head"]) == {"head"}
    assert all(p.requires_grad for p in models["sst2"].parameters())
    # An adapter begins as zero, so the three begin as the same function.
    ids = torch.tensor([[2, 7, 6, 3, 0]])
    torch.nn.init.normal_(models["sst2"].head.weight)
    outputs = []
    for model in models.values():
        model.head.load_state_dict(models["sst2"].head.state_dict())
        outputs.append(model(ids))
    assert outputs[0].abs().min() > 0.01
    assert torch.allclose(outputs[0], outputs[1])
    assert torch.allclose(outputs[0], outputs[2])


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_one_example_at_a_time(tmp_path, name):
    task = load(name, data_dir=write_sst2(tmp_path))
    torch.manual_seed(0)
    model = task.build_model()
    for parameter in model.parameters():
        if parameter.requires_grad:  # with a head and adapters of zeros, most gradients would vanish
            torch.nn.init.normal_(parameter, std=0.5)
    inputs, targets = (part[:8] for part in task.train.tensors)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    norms, sums = [], {name: torch.zeros_like(parameter) for name, parameter in trained.items()}
    clip_norm = 1.0
    for x, y in zip(inputs.split(1), targets.split(1), strict=True):
        gradients = torch.autograd.grad(task.loss(model(x), y).sum(), list(trained.values()))
        norms.append(torch.stack([each.norm() for each in gradients]).norm())
        for total, gradient in zip(sums.values(), gradients, strict=True):
            total.add_(gradient, alpha=min(1.0, clip_norm / norms[-1].item()))
    assert min(norms) > 0
    assert max(norms) > clip_norm
    found = clipped_gradients(model, task.loss, inputs, targets, clip_norm)
    assert torch.allclose(found.norms, torch.stack(norms), rtol=1e-4)
    assert found.sums.keys() == sums.keys()
    for parameter, expected in sums.items():
        assert torch.allclose(found.sums[parameter], expected, rtol=1e-3, atol=1e-5), parameter


def test_padding_does_not_count(tmp_path):
    model = load("sst2", data_dir=write_sst2(tmp_path)).build_model()
    torch.nn.init.normal_(model.head.weight)
    ids = torch.tensor([[2, 4, 7, 6, 3]])
    padded = torch.nn.functional.pad(ids, (0, 10))
    assert torch.allclose(model(ids), model(padded), atol=1e-6)
    assert not torch.allclose(model(ids), model(ids.where(ids != 7, 5)), atol=1e-3)
    assert model(torch.zeros_like(ids)).isfinite().all()  # an example of nothing but padding


def test_weights_of_other_types_become_float32(tmp_path):
    models = {}
    for dtype in ("float32", "bfloat16"):
        models[dtype] = encoder.pretrained(write_encoder(tmp_path / dtype, dtype=dtype))
    wide, narrow = (torch.cat([p.flatten() for p in model.parameters()]) for model in models.values())
    assert wide.dtype == narrow.dtype == torch.float32
    assert torch.allclose(wide, narrow, rtol=0.01)
    config = models["float32"].config
    assert config.hidden_dropout_prob == config.attention_probs_dropout_prob == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"train.tsv begins with '' and has 0 more lines; a file of SST-2 begins with 'sentence\\tlabel'"),
        ("sentence\tlabel\n", r"and has 0 more lines"),
        ("index\tsentence\n0\tgood\n", r"train.tsv begins with 'index\\tsentence'"),
        ("sentence\tlabel\ngood\t1\ngood\n", r"label in line 3 of .*train.tsv = '' must be 0 or 1; write"),
        ("sentence\tlabel\ngood\t2\n", r"label in line 2 of .* = '2' must be 0 or 1"),
        ("sentence\tlabel\ngood\t1\t0\n", r"label in line 2 of .* = '1\\t0' must be 0 or 1"),
    ],
    ids=["empty", "header", "unlabelled", "cut", "range", "columns"],
)
def test_bad_files_are_refused(tmp_path, content, message):
    (write_sst2(tmp_path) / "train.tsv").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load("sst2", data_dir=tmp_path)


def test_an_encoder_that_is_not_there_is_asked_for(tmp_path, not_installed):
    pytest.importorskip("transformers")
    write_sst2(tmp_path, encoder=False)
    with pytest.raises(
        ValueError, match=r"all-minilm-l6-v2 is not installed, .*; pip install 'qclip\[text\]', or copy"
    ):
        load("sst2", data_dir=tmp_path)


def test_the_encoder_of_an_installed_package_is_found(tmp_path, monkeypatch):
    write_sst2(tmp_path, encoder=False)
    package = tmp_path / "site" / "some_encoder_package"
    write_encoder(package / "model")
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(encoder, "PACKAGE", package.name)
    assert load("sst2", data_dir=tmp_path).train.tensors[0].shape == (24, TRAINING_LENGTH)


@pytest.mark.parametrize(("name", "package"), [("sst2", "transformers"), ("sst2-lora", "peft")])
def test_packages_that_are_missing_are_named(tmp_path, monkeypatch, name, package):
    write_sst2(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"needs {package}, .* pip install 'qclip\[text\]'"):
        load(name, data_dir=tmp_path)


def replace_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").write_text("{"), r"config.json is not JSON"),
        (lambda folder: replace_config(folder, model_type="gpt2"), r"model_type in .* = 'gpt2' must be 'bert'"),
        (lambda folder: replace_config(folder, vocab_size=5), r"has 9 tokens, \[PAD\] as number 0, for a model of 5"),
        (lambda folder: replace_config(folder, vocab_size=10), r"does not hold the weights .*size mismatch for embed"),
        (lambda folder: replace_config(folder, num_hidden_layers=3), r"does not hold the weights .*encoder.layer.2"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), r"tokenizer.json is not a tokenizer"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"?"), r"model.safetensors does not hold the weig"),
    ],
    ids=["json", "kind", "tokens", "sizes", "layers", "tokenizer", "weights"],
)
def test_damaged_encoders_are_refused(tmp_path, damage, message):
    damage(write_sst2(tmp_path) / encoder.FOLDER)
    with pytest.raises(ValueError, match=message):
        load("sst2", data_dir=tmp_path).build_model()


def test_the_published_sentences_are_read(tmp_path):
    """With the encoder of the samples: the published one need not be installed."""
    folder = real_data("sst2") / "sst2"
    for path in folder.glob("*.tsv.gz"):
        (tmp_path / path.name).symlink_to(path)
    write_encoder(tmp_path / encoder.FOLDER)
    task = load("sst2-head", data_dir=tmp_path)
    assert (len(task.train), len(task.held_out)) == (67_349, 872)
    assert task.train.tensors[1].sum() == 37_569
    assert task.held_out.tensors[1].sum() == 444


def test_the_published_encoder_is_read():
    pytest.importorskip("transformers")
    try:
        folder = encoder.find(real_data("sst2"))
    except ValueError as refusal:
        pytest.skip(str(refusal))
    ids = encoder.tokens(folder, ["a charming and often affecting journey", "unflinchingly bleak"], LENGTH)
    assert ids[0, :8].tolist() == [101, 1037, 11951, 1998, 2411, 12473, 4990, 102]
    model = encoder.pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == 22_565_376
    sentences = encoder.tokens(folder, ["a good film", "an excellent movie", "the train is late"], LENGTH)
    with torch.no_grad():
        outputs = model(input_ids=sentences, attention_mask=sentences != 0).last_hidden_state
    mask = (sentences != 0).unsqueeze(-1)
    means = torch.nn.functional.normalize((outputs * mask).sum(1) / mask.sum(1), dim=1)
    similarity = means @ means.T
    assert similarity[0, 1] > 0.6
    assert similarity[0, 2] < 0.2
