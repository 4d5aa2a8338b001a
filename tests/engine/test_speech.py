"""Speech models of `transformers` with SpecAugment, in training mode, on padded batches.

Numpy draws what is masked, in a loop over the examples, and how much it draws depends on their lengths. A trained
vector is then written over what is masked.
"""

import random

import numpy as np
import pytest
import torch

from engine.cases import Net
from engine.cases.case import D, P, linear, squared
from engine.compare import assert_same
from qclip.engine import Refusal, clipped_gradients, explain, oracle
from qclip.engine.randomness import drawn_call_by_call

B, T = 4, 200
SMALL = {
    "vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12,
    "conv_dim": (6, 6), "conv_kernel": (4, 3), "conv_stride": (3, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.3, "mask_time_length": 3, "mask_feature_prob": 0.2, "mask_feature_length": 2,
}  # fmt: skip
MODELS = {
    "Wav2Vec2ForCTC": ("Wav2Vec2Config", {}),
    "HubertModel": ("HubertConfig", {}),
    "WavLMModel": ("WavLMConfig", {"mask_feature_prob": 0.0}),  # its own code has no default for the masks of features
    "SEWModel": ("SEWConfig", {"squeeze_factor": 2}),
    "UniSpeechModel": ("UniSpeechConfig", {}),
    "UniSpeechSatModel": ("UniSpeechSatConfig", {}),
    "Data2VecAudioModel": ("Data2VecAudioConfig", {"conv_pos_kernel_size": 3, "num_conv_pos_embeddings": 2}),
}
FAST = {"Wav2Vec2ForCTC"}


pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask:UserWarning")


def seeded(function, *arguments, **options):
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    return function(*arguments, **options)


def features(outputs, targets):
    return squared(outputs[0], targets)  # logits, or the last hidden state


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in MODELS]
)
def test_masked_frames(name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config, options = MODELS[name]
    model = getattr(transformers, name)(getattr(transformers, config)(**SMALL | options)).train()
    torch.nn.init.normal_(next(p for path, p in model.named_parameters() if path.endswith("masked_spec_embed")))
    real = torch.arange(T) < torch.tensor([[200], [90], [150], [60]])
    problem = model, features, {"input_values": torch.randn(B, T) * real, "attention_mask": real.long()}, torch.rand(B)
    found = seeded(clipped_gradients, *problem, 0.1)
    assert_same(found, seeded(oracle.clipped_gradients, *problem, 0.1, shared_forward=True), rtol=2e-5)
    assert found.sums[next(path for path in found.sums if path.endswith("masked_spec_embed"))].any()
    rows = seeded(explain, *problem[:1], problem[2], loss=features, targets=problem[3]).parameters
    assert {row.strategy for row in rows} <= {"rule", "vmap of the function", "unused"}


DRAWS = {
    "numpy": lambda n: np.random.choice(n, size=n - 1, replace=False)[0],  # noqa: NPY002
    "python": lambda n: random.sample(range(n), n - 1)[0],
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draws_of_an_example_do_not_shift_those_of_others(draw):
    """How many numbers a call takes depends on the example's length."""

    def forward(n, x, lengths):
        places = torch.tensor([draw(int(length)) for length in lengths])
        return n.out(x * (1 + places[:, None]))

    model, inputs = Net(forward, out=linear()()), (torch.randn(B, D), torch.tensor([5, 9, 3, 7]))
    problem = model, squared, inputs, torch.randn(B)
    found = seeded(clipped_gradients, *problem, 0.1)
    assert_same(found, seeded(oracle.clipped_gradients, *problem, 0.1, shared_forward=True), rtol=2e-5)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_partner_that_is_drawn_is_found(draw):
    def forward(n, x):
        return n.out(x + torch.stack([x[draw(len(x))] for _ in x]))

    with pytest.raises(Refusal, match="examples mix"):
        clipped_gradients(Net(forward, out=linear(D, P)()), squared, torch.randn(B, D), torch.randn(B), 1.0)


def test_calls_are_seeded_one_by_one():
    def numbers(first):
        with drawn_call_by_call():
            random.sample(range(100), first)
            np.random.rand(first)  # noqa: NPY002
            return random.random(), np.random.rand()  # noqa: NPY002

    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    with drawn_call_by_call():  # without a draw
        pass
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002
    assert seeded(numbers, 1) == seeded(numbers, 50)
    assert random.random.__self__ is random._inst
    assert np.random.rand.__self__ is np.random.mtrand._rand
