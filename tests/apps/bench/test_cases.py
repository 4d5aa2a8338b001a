"""Cases, models and precisions."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from qclip.apps.bench import cases, models
from qclip.apps.bench.precision import PRECISIONS, precision_named
from qclip.apps.bench.workload import workload

CPU = torch.device("cpu")
# The GPU's cases in miniature: the same code, fewer layers.
SMALL = {
    "vit": partial(models.VisionTransformer, side=32, patch=16, width=16, layers=1, heads=2, classes=5),
    "wrn": partial(models.wide_resnet, depth=10, widen=1),
    "gpt2": partial(models.gpt2, 6, layers=1, width=8, heads=2),
}


@pytest.mark.parametrize("name", ["transformer", "cnn-28", "cnn-32", "mlp", "mlp-2048"])
def test_every_case_has_one_loss_per_example(name):
    case = replace(cases.CASES[name], batch=2)
    work = workload(case, PRECISIONS["float32"], CPU)
    losses = work.losses(work.model, work.batch)
    assert losses.shape == (2,)
    assert losses.requires_grad


@pytest.mark.parametrize(
    ("name", "shape", "outputs"), [("vit", (3, 32, 32), (5,)), ("wrn", (3, 32, 32), (10,)), ("gpt2", (6,), (6, 50257))]
)
def test_models_of_gpu_cases(name, shape, outputs):
    inputs = torch.randint(50257, (2, *shape)) if name == "gpt2" else torch.randn(2, *shape)
    assert SMALL[name]()(inputs).shape == (2, *outputs)


@pytest.mark.parametrize(
    ("name", "millions"), [("gpt2-128", 162.4), ("gpt2-1024", 163.1), ("vit", 86.6), ("wrn", 2.75), ("mlp-2048", 5.82)]
)
def test_sizes_of_gpu_cases(name, millions):
    with torch.device("meta"):
        count = sum(p.numel() for p in cases.CASES[name].model().parameters())
    assert count / 1e6 == pytest.approx(millions, rel=0.005)


def test_vision_attends_to_what_comes_after():
    torch.manual_seed(0)
    model = SMALL["vit"]()
    x = torch.randn(1, 16, 16)
    assert not torch.equal(model.blocks[0](x)[0, 0], model.blocks[0](torch.cat([x[:, :1], -x[:, 1:]], 1))[0, 0])


def test_loss_is_the_mean_over_positions():
    case = cases.CASES["transformer"]
    outputs, targets = torch.randn(3, 4, 7), torch.randint(7, (3, 4))
    expected = torch.stack([F.cross_entropy(o, t) for o, t in zip(outputs, targets, strict=True)])
    torch.testing.assert_close(case.losses(outputs, targets), expected)
    assert case.losses(outputs.bfloat16(), targets).dtype == torch.float32


def test_examples_are_the_same_for_the_same_seed():
    case = cases.CASES["mlp"]
    assert torch.equal(case.examples(2)[0], case.examples(2)[0])
    assert not torch.equal(case.examples(2)[0], case.examples(2, seed=1)[0])


def test_cases_of_a_device():
    assert [case.name for case in cases.chosen((), CPU)] == ["transformer", "cnn-28", "cnn-32", "mlp"]
    gpu = [case.name for case in cases.chosen((), torch.device("cuda"))]
    assert gpu == ["gpt2-128", "gpt2-512", "gpt2-1024", "vit", "wrn", "mlp-2048"]
    assert [case.name for case in cases.chosen(["wrn", "mlp"], CPU)] == ["mlp", "wrn"]


@pytest.mark.parametrize(
    ("name", "parameters", "scores"),
    [
        ("float32", torch.float32, torch.float32),
        ("tf32", torch.float32, torch.float32),
        ("bfloat16", torch.bfloat16, torch.bfloat16),
        ("autocast", torch.float32, torch.bfloat16),
    ],
)
def test_precisions(name, parameters, scores, tiny):
    work = workload(tiny, precision_named(name), CPU)
    assert next(work.model.parameters()).dtype == work.batch[0].dtype == parameters
    seen = []
    work.model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    assert work.losses(work.model, work.batch).dtype == torch.float32
    assert seen == [scores]


@pytest.mark.parametrize(
    "chosen", [("none", "tf32", "tf32"), ("tf32", "ieee", "tf32")], ids=["default", "by its newer names"]
)
@pytest.mark.parametrize("name", PRECISIONS)
def test_settings_are_restored(name, chosen):
    """Once torch's newer names were used, the older ones may raise."""
    switches = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn

    def now():
        return tuple(switch.fp32_precision for switch in switches)

    def choose(settings):
        for switch, setting in zip(switches, settings, strict=True):
            switch.fp32_precision = setting

    precision, before = PRECISIONS[name], now()
    choose(chosen)
    try:
        with precision.settings():
            assert now() == {None: chosen, True: ("tf32",) * 3, False: ("ieee",) * 3}[precision.tf32]
        assert now() == chosen
    finally:
        choose(before)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="dtype = 'float16' must be one of 'float32'"):
        precision_named("float16")
