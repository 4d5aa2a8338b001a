"""Adapters of `peft` on tiny models of `transformers`, in training mode, on padded batches: exact, and they train."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from engine.cases.case import token_loss
from engine.cases.models import SMALL
from engine.compare import assert_same
from qclip.engine import clipped_gradients, explain, oracle

transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")

B, T = 4, 6


def llama():
    """A causal language model, a padded batch and the loss of its next tokens."""
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=1, max_position_embeddings=16, use_cache=False)
    inputs, words = padded()
    return transformers.LlamaForCausalLM(config), inputs, words, next_token


def bert():
    """A classifier, a padded batch and cross entropy; dropout draws random numbers."""
    config = transformers.BertConfig(**SMALL, max_position_embeddings=16, num_labels=3)
    return transformers.BertForSequenceClassification(config), padded()[0], torch.randint(3, (B,)), classes


def padded():
    words, real = torch.randint(1, SMALL["vocab_size"], (B, T)), torch.arange(T) < torch.tensor([[6], [4], [5], [2]])
    return {"input_ids": words * real, "attention_mask": real.long()}, words.where(real, -100)


def next_token(outputs, labels):
    return token_loss(outputs.logits[:, -T:-1], labels[:, 1:])  # a prompt comes before the words


def classes(outputs, labels):
    return F.cross_entropy(outputs.logits, labels, reduction="none")


MODELS = {"CAUSAL_LM": (llama, ["q_proj", "v_proj", "down_proj"]), "SEQ_CLS": (bert, ["query", "value", "dense"])}
METHODS = {
    "LoRA": ("LoraConfig", {"r": 2, "lora_dropout": 0.1}),
    "DoRA": ("LoraConfig", {"r": 2, "use_dora": True}),
    "DoRA with dropout": ("LoraConfig", {"r": 2, "use_dora": True, "lora_dropout": 0.2}),
    "IA3": ("IA3Config", {"feedforward_modules": []}),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
    "prompt as long as the batch": ("PromptTuningConfig", {"num_virtual_tokens": B}),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 3, "prefix_projection": True}),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 3, "encoder_hidden_size": 6}),
    "VeRA": ("VeraConfig", {"r": 2}),
    "AdaLoRA": ("AdaLoraConfig", {"init_r": 3, "target_r": 2, "total_step": 10}),
    "LoKr": ("LoKrConfig", {"r": 2}),
    "LoHa": ("LoHaConfig", {"r": 2}),
    "OFT": ("OFTConfig", {"oft_block_size": 4}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4}),
    "HRA": ("HRAConfig", {"r": 2}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 5}),
    "VB-LoRA": ("VBLoRAConfig", {"r": 2, "num_vectors": 6, "vector_length": 4, "topk": 2}),
}
FAST = {"DoRA", "prompt as long as the batch", "p-tuning", "LoHa", "OFT", "HRA"}
"""On Llama: each is classified in a way of its own."""
ONE_SHAPE = {"VeRA": {"CAUSAL_LM": ["q_proj"], "SEQ_CLS": ["query", "value"]}}
"""What an adapter can be applied to, where that is less than everything."""


def adapted(method, task):
    """A model with trained adapters, and its problem."""
    torch.manual_seed(0)
    make, targets = MODELS[task]
    model, *problem = make()
    kind, options = METHODS[method]
    if not issubclass(getattr(peft, kind), peft.PromptLearningConfig):
        options = options | {"target_modules": ONE_SHAPE.get(method, {}).get(task, targets)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's own advice
        model = peft.get_peft_model(model, getattr(peft, kind)(task_type=task, **options))
    with torch.no_grad():
        for parameter in trainable(model).values():  # many start at zero
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train(), *problem


def trainable(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("method", "task"),
    [
        pytest.param(method, task, marks=[] if method in FAST and task == "CAUSAL_LM" else pytest.mark.slow)
        for method in METHODS
        for task in MODELS
    ],
)
def test_adapter(method, task):
    model, inputs, labels, loss = adapted(method, task)
    torch.manual_seed(1)
    expected = oracle.clipped_gradients(model, loss, inputs, labels, 0.5, groups="per-layer", shared_forward=True)
    torch.manual_seed(1)
    found = clipped_gradients(model, loss, inputs, labels, 0.5, groups="per-layer")
    assert_same(found, expected, rtol=5e-5)
    strategies = {row.strategy for row in explain(model, inputs, loss=loss, targets=labels).parameters}
    assert strategies <= {"rule", "vmap of the function", "frozen"}
    before = {name: parameter.detach().clone() for name, parameter in trainable(model).items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e3)  # some gradients are tiny
    for name, parameter in trainable(model).items():
        parameter.grad = found.sums[name]
    optimizer.step()
    still = [name for name, parameter in trainable(model).items() if torch.equal(parameter, before[name])]
    assert not still
