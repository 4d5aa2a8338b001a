"""Proofs on a GPU: they pass for what is separate, time after time, refuse what mixes, and leave no setting behind."""

import pytest
import torch
from torch import nn

from engine.cases import squared
from engine.cases.case import token_loss
from gpu.device import DEVICE, ON_GPU, cuda_only
from qclip.engine import Engine, torch_settings
from qclip.engine.driver import call

pytestmark = pytest.mark.gpu

DEPTH, WIDTH, LENGTH, TIMES = (8, 256, 96, 10) if ON_GPU else (2, 32, 12, 3)


def transformer(dtype):
    """Deep enough for sums in another order to grow: attention's backward kernels add up in any."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False).to(DEVICE, dtype)


def proven(model, loss, inputs, targets):
    """The norms by an engine that knows nothing yet: it makes a proof."""

    def evaluate(batch):
        return loss(call(model, batch[0]), batch[1])

    return Engine(model).clipped(evaluate, (inputs, targets), 1.0).norms


def sequences(dtype, count=8):
    x = torch.randn(count, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    return x.to(DEVICE, dtype), torch.randn(count, generator=torch.Generator().manual_seed(2)).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_transformer_is_proven_every_time(dtype):
    """A refusal at random would come of kernels that do not repeat. CUDA only: such kernels."""
    model, (x, y) = transformer(dtype), sequences(dtype)
    norms = [proven(model, squared, x, y) for _ in range(TIMES)]
    for each in norms[1:]:
        torch.testing.assert_close(each, norms[0], rtol=0.05 if dtype == torch.bfloat16 else 1e-3, atol=0)


def test_gpt2_in_bfloat16_is_proven_every_time():
    """Masks, tied embeddings and torch's own choice of attention."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=311, n_positions=LENGTH, n_embd=WIDTH, n_layer=DEPTH // 2, n_head=4, use_cache=False,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train().to(DEVICE, torch.bfloat16)
    words = torch.randint(311, (8, LENGTH), generator=torch.Generator().manual_seed(3)).to(DEVICE)

    def loss(outputs, labels):
        return token_loss(outputs.logits[:, :-1], labels[:, 1:])

    norms = [proven(model, loss, {"input_ids": words}, words) for _ in range(TIMES)]
    for each in norms[1:]:
        torch.testing.assert_close(each, norms[0], rtol=0.05, atol=0)


def test_autocast_is_proven_every_time():
    model, (x, y) = transformer(torch.float32), sequences(torch.float32)
    for _ in range(TIMES):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            norms = proven(model, squared, x, y)
        assert norms.isfinite().all()
        assert norms.dtype == torch.float32


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_settings_are_as_before(precision):
    """TF32, the level of determinism, and where the generators stand."""
    model, (x, y) = transformer(torch.float32), sequences(torch.float32)
    with torch_settings.fp32_precision(precision):
        before = torch_settings.tf32_settings()
        states = torch.get_rng_state(), torch.cuda.get_rng_state() if ON_GPU else None
        proven(model, squared, x, y)
        assert torch_settings.tf32_settings() == torch_settings._current_tf32() == before
        assert torch.get_deterministic_debug_mode() == 0
        assert torch.equal(torch.get_rng_state(), states[0])
        assert not ON_GPU or torch.equal(torch.cuda.get_rng_state(), states[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_examples_that_mix_are_refused(dtype):
    model = nn.Sequential(nn.Linear(6, 8), Centred(), nn.Linear(8, 3))
    x, y = torch.randn(8, 6).to(DEVICE, dtype), torch.randn(8, device=DEVICE)
    with pytest.raises(ValueError, match=r"examples mix|depends on others|cannot be attributed"):
        proven(model.to(DEVICE, dtype), squared, x, y)


class Centred(nn.Module):
    """Takes the mean of the batch away, behind a detach: no gradient shows it."""

    def forward(self, x):
        return x - x.detach().mean(0)


def test_the_same_step_twice_gives_the_same():
    """To rounding: what is proven in the first is not proven in the third."""
    x, y = torch.randn(16, 6, device=DEVICE), torch.randn(16, device=DEVICE)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3)).to(DEVICE)
    engine = Engine(model)

    def evaluate(batch):
        return squared(call(model, batch[0]), batch[1])

    first, _, third = (engine.clipped(evaluate, (x, y), 0.5) for _ in range(3))
    for name in first.sums:
        torch.testing.assert_close(first.sums[name], third.sums[name], rtol=1e-6, atol=1e-6)


@cuda_only("memory of a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_nothing_stays_behind(dtype):
    """Neither of a step nor of its proof: 20 eager steps take no memory that they do not give back."""
    model, (x, y) = transformer(dtype), sequences(dtype)
    engine = Engine(model)

    def evaluate(batch):
        return squared(call(model, batch[0]), batch[1])

    held = []
    for _ in range(20):  # proofs at the 1st, 2nd and 16th
        engine.clipped(evaluate, (x, y), 0.5)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert max(held[3:]) <= held[3] + 2**20
