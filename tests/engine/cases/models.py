"""Models nobody here wrote: tiny random configurations from `transformers`, and LoRA from `peft`."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.cases.case import Case, Problem, T, V, family, ids, squared, token_loss

SMALL = {"vocab_size": V, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}


def _build(name: str, config: str, attention: str = "sdpa", **options: Any) -> nn.Module:
    """A model of `transformers` with random weights, in training mode."""
    transformers = pytest.importorskip("transformers")
    configured = getattr(transformers, config)(**options, attn_implementation=attention)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=DeprecationWarning)
        return getattr(transformers, name)(configured).train()


def _next_token(outputs: Any, labels: Tensor) -> Tensor:
    return token_loss(outputs.logits[:, :-1], labels[:, 1:])


def _pooled(outputs: Any, targets: Tensor) -> Tensor:
    return squared(outputs.logits, targets)


def _features(outputs: Any, targets: Tensor) -> Tensor:
    return squared(outputs.last_hidden_state, targets)


def _causal(B: int, model: nn.Module) -> Problem:
    words = ids(B, T + 1)
    return Problem(model, {"input_ids": words}, words, _next_token)


def _gpt2(dropout: float = 0.0, attention: str = "sdpa") -> nn.Module:
    return _build(
        "GPT2LMHeadModel", "GPT2Config", attention,
        vocab_size=V, n_positions=8, n_embd=8, n_layer=2, n_head=2, use_cache=False, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip


def _gpt2_padded(B: int) -> Problem:
    words = ids(B, T + 1)
    real = torch.arange(T + 1) < torch.randint(2, T + 2, (B, 1))
    inputs = {"input_ids": words, "attention_mask": real.long(), "position_ids": torch.arange(T + 1)[None]}
    return Problem(_gpt2(), inputs, words.where(real, -100), _next_token)


def _lora(B: int) -> Problem:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, lora_dropout=0.0
    )
    return _causal(B, peft.get_peft_model(_gpt2(), config))


def _decoder(kind: str, **options: Any) -> nn.Module:
    options = SMALL | {"max_position_embeddings": 8, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0} | options
    return _build(f"{kind}ForCausalLM", f"{kind}Config", **options)


def _bert(B: int) -> Problem:
    model = _build(
        "BertForSequenceClassification", "BertConfig", **SMALL, max_position_embeddings=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    real = torch.arange(T) < torch.randint(1, T + 1, (B, 1))
    inputs = {"input_ids": ids(B, T), "attention_mask": real.long(), "token_type_ids": ids(B, T, high=2)}
    return Problem(model, inputs, loss=_pooled)


def _vit(B: int) -> Problem:
    sizes = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    model = _build("ViTForImageClassification", "ViTConfig", **sizes, image_size=8, patch_size=4, num_labels=3)
    return Problem(model, {"pixel_values": torch.randn(B, 3, 8, 8)}, loss=_pooled)


def _siglip(B: int) -> Problem:
    """It pools the patches by a mean, and computes the output of a pooling head that nobody reads."""
    sizes = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    vision = sizes | {"image_size": 8, "patch_size": 4}
    model = _build("SiglipForImageClassification", "SiglipConfig", vision_config=vision, num_labels=3)
    return Problem(model, {"pixel_values": torch.randn(B, 3, 8, 8)}, loss=_pooled)


def _t5(B: int, attention: str = "eager", dropout: float = 0.0) -> Problem:
    model = _build(
        "T5ForConditionalGeneration", "T5Config", attention, vocab_size=V, d_model=8, d_kv=4, d_ff=12, num_layers=2,
        num_heads=2, relative_attention_num_buckets=4, dropout_rate=dropout, use_cache=False,
    )  # fmt: skip
    words = ids(B, T)
    return Problem(model, {"input_ids": ids(B, 5), "decoder_input_ids": words}, words, _next_token)


def _wav2vec2(B: int) -> Problem:
    sizes = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    model = _build(
        "Wav2Vec2Model", "Wav2Vec2Config", **sizes, conv_dim=(6, 6), conv_kernel=(4, 3), conv_stride=(3, 2),
        num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, layerdrop=0.0,
    )  # fmt: skip
    return Problem(model, {"input_values": torch.randn(B, 40)}, loss=_features)


def _whisper(B: int) -> Problem:
    model = _build(
        "WhisperForConditionalGeneration", "WhisperConfig", vocab_size=V, num_mel_bins=4, d_model=8, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=12, decoder_ffn_dim=12,
        max_source_positions=5, max_target_positions=8, dropout=0.0, use_cache=False, pad_token_id=0, bos_token_id=0,
        eos_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    words = ids(B, T)
    return Problem(model, {"input_features": torch.randn(B, 4, 10), "decoder_input_ids": words}, words, _next_token)


def _swin(B: int) -> Problem:
    """Windows are rows of their own, and their masks and position biases meet as [B * windows, ...]."""
    model = _build(
        "SwinModel", "SwinConfig", image_size=16, patch_size=2, num_channels=1, embed_dim=8, depths=[2], num_heads=[2],
        window_size=4, drop_path_rate=0.0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return Problem(model, {"pixel_values": torch.randn(B, 1, 16, 16)}, loss=_features)


def _deberta(B: int) -> Problem:
    """Relative positions are projected once, and repeated for the examples and heads."""
    model = _build(
        "DebertaV2Model", "DebertaV2Config", "eager", **SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"],
        position_buckets=4, max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    words = ids(B, 6)
    return Problem(model, {"input_ids": words, "attention_mask": torch.ones_like(words)}, loss=_features)


def _mixture(B: int) -> Problem:
    """Rows are sorted by expert, and their products grouped."""
    return _causal(B, _decoder("Qwen3Moe", num_key_value_heads=1, head_dim=4, num_experts=4, num_experts_per_tok=2,
                               moe_intermediate_size=8, decoder_sparse_step=1))  # fmt: skip


def _mamba(B: int) -> Problem:
    sizes = {"vocab_size": V, "hidden_size": 8, "state_size": 4, "num_hidden_layers": 1, "expand": 2}
    return _causal(B, _build("MambaForCausalLM", "MambaConfig", "eager", **sizes, time_step_rank=2, use_cache=False))


def _vision_language(B: int) -> Problem:
    """The features of an image take the places of some words."""
    transformers = pytest.importorskip("transformers")
    sizes = {name: value for name, value in SMALL.items() if name != "vocab_size"} | {"num_hidden_layers": 1}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=8)
    text = transformers.LlamaConfig(**SMALL | {"num_hidden_layers": 1}, max_position_embeddings=16, use_cache=False)
    model = _build("LlavaForConditionalGeneration", "LlavaConfig", vision_config=vision, text_config=text,
                   image_token_index=0, vision_feature_layer=-1)  # fmt: skip
    words = 1 + ids(B, 7, high=V - 1)
    words[:, 1:5] = 0
    words[::2] = words[::2].roll(1, 1)
    return Problem(model, {"input_ids": words, "pixel_values": torch.randn(B, 3, 8, 8)}, words, _next_token)


MODELS: list[Case] = family(
    "model",
    {
        "gpt2": lambda B: _causal(B, _gpt2()),
        "gpt2-eager": lambda B: _causal(B, _gpt2(attention="eager")),
        "gpt2-padded": _gpt2_padded,
        "gpt2-lora": _lora,
        "bert": _bert,
        "vit": _vit,
        "siglip": _siglip,
        "swin": _swin,
        "deberta": _deberta,
        "llama": lambda B: _causal(B, _decoder("Llama", num_key_value_heads=1)),
        "llama-tied": lambda B: _causal(B, _decoder("Llama", num_key_value_heads=2, tie_word_embeddings=True)),
        "mistral": lambda B: _causal(B, _decoder("Mistral", num_key_value_heads=1, head_dim=4)),
        "gpt-neox": lambda B: _causal(B, _decoder("GPTNeoX", attention_dropout=0.0, hidden_dropout=0.0)),
        "mixture-of-experts": _mixture,
        "mamba": _mamba,
        "vision-language": _vision_language,
        "t5": _t5,
        "wav2vec2": _wav2vec2,
        "whisper": _whisper,
    },
) + family(
    "model",
    {
        "gpt2-dropout": lambda B: _causal(B, _gpt2(dropout=0.2)),
        "t5-dropout": lambda B: _t5(B, "sdpa", dropout=0.2),
    },
    random=True,
)
