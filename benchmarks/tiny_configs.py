"""Tiny configurations of transformers' models, made from their default ones.

The name of a field says what its number counts: layers, heads, words, positions, or the width of something (`_RULES`).
Numbers of one kind become the same small number, so that they still fit together. `ATTEMPTS` has other sizes for models
that refuse the first ones, `_OWN` what only one model needs.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Final

from transformers import PreTrainedConfig, ResNetConfig

VOCABULARY: Final = 96
SMALL: Final = 64
"""Numbers up to this stay as they are, but for layers, heads and the like."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a tiny model."""

    width: int = 32
    inner: int = 48
    heads: int = 4
    groups: int = 2
    """Heads of keys and values."""
    head: int = 8
    image: int = 32
    patch: int = 8
    window: int = 4
    positions: int = 64
    layers: int = 2
    stages: bool = True
    """Whether the widths of stages become smaller, too."""

    @property
    def half(self) -> int:
        """Half of the width."""
        return self.width // 2

    @property
    def mixers(self) -> int:
        """Heads of a state space, which is twice as wide."""
        return 2 * self.heads


ATTEMPTS: Final = (
    Sizes(), Sizes(inner=32, groups=4, layers=4), Sizes(image=64, window=2), Sizes(width=64, inner=128, head=16),
    Sizes(stages=False), Sizes(image=128, patch=16, width=64, inner=64, head=16, layers=4),
)  # fmt: skip
"""The sizes to try, in this order."""

_RULES: Final[tuple[tuple[str, str | int | None], ...]] = (
    (r"rate$|seed|base$|theta|temperature|hop_length|max_distance|ignore|cost|multiple_of|floor_scale|num_classes",
     None),
    (r"conv_depthwise_kernel_size|chunk_(length|size)|right_context|hop", None),
    (r"mm_tokens_per_image", 4),
    (r"^(pretrain_)?(image|img|input|crop|spec)_size$|max_im(a)?ge?_size|resolution", "image"),
    (r"num_pos_feats", "half"),
    (r"patch_(size|length)$", "patch"),
    (r"window", "window"),
    (r"codebook_size", 64),
    (r"vocab|num_embeddings|buckets|codevectors_per|_labels$|centroids", VOCABULARY),
    (r"position|n_ctx|seq_len|context_length|max_(source|target|2d|temporal|rel|text|ep|encoder|decoder)|max_len",
     "positions"),
    (r"mask_(time|feature)_length", 2),
    (r"period$|interval$|_every_n_layers$", 2),
    (r"layer_offset$", 1),
    (r"mamba.*heads$", "mixers"),
    (r"num_filters|n_filters", 8),
    (r"(^|_)(kv|key_value|key|value|k|v)_?(n_)?heads$|query_groups", "groups"),
    (r"(^|_)n?_?heads?$", "heads"),
    (r"head.*dim|dim.*head|d_kv|d_head|kv_channels|qk_\w+_dim|rotary_dim|mamba_d_head", "head"),
    (r"rank$", 16),
    (r"experts?_per|top_?k(_experts)?$|n_group$|topk_group|moe_k$", 2),
    (r"shared_experts?$", 1),
    (r"experts?$", 4),
    (r"(^|_)n?_?(layers?|depth|blocks|repeats)$|blocks_per|^num_\w*layers\w*$", "layers"),
    (r"quer(y|ies)|latents|proposals|denoising|negatives|tokens$|num_frames|prompt", 8),
    (r"num_patches", 16),
    (r"intermediate|ffn|mlp|d_ff|dff|d_inner|feed_?forward|linear_units", "inner"),
    (r"mel_bins|^feature_size$|num_mel|mel_dim|n_mels|input_feat", 16),
)  # fmt: skip
"""What the name of a number says of its size: the most, by name of a size or as it is; None to leave it alone."""
_TOKENS: Final = r"(token|_pad|_eos|_bos|_start|_end|patch|stream_\w+)_(id|index)$|^im_\w+_id$|^(image|video|audio)_id$"
_INDEX: Final = r"(_index|_idx|_layer|_dense_replace)$"
_INDICES: Final = r"ind(ex|ices|exes)$|idxs?$|_layers?$|hook_ids$|_blocks$"
_NO_INDEX: Final = r"num_|^n_|ignore|proj"
_SECTIONS: Final = r"vl|4v|46v|ocr|glm_image|omni"
"""Kinds of models that rotate by sections for time, height and width, and do not say so in their configuration."""
_AREAS: Final = r"image|patch|window"
_STAGES: Final = r"size|dim|channel|width|feature"

_RESNET: Final = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1],
                  "out_features": ["stage1", "stage2", "stage3", "stage4"], "layer_type": "basic"}  # fmt: skip
_SERIES: Final = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 2}
_CODES: Final = {"<image>": 95, **{f"IMGIMG{chr(65 + k // 8)}{chr(65 + k % 8)}Z": k for k in range(64)}}
_OWN: Final[dict[str, dict[str, Any]]] = {
    "aria": {"max_value_projector_patch_to_query_dict": None, "projector_patch_to_query_dict": {16: 4, 64: 4}},
    "autoformer": _SERIES,
    "bamba": {"mamba_d_head": "auto"},
    "chameleon": {"vocabulary_map": _CODES},
    "cvt": {"depth": [1, 2, 3]},
    "fast_vlm": {"vision_feature_layer": -1},
    "glm5_next_text": {"num_key_value_heads": 4},
    "fun_asr_nano_adaptor": {"intermediate_size": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"mamba_d_head": "auto", "layer_types": ["mamba", "attention"]},
    "informer": _SERIES,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "DbrxAttentionConfig": {"rope_theta": 10000.0},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "lilt": {"hidden_size": 48},
    "llava_next": {"image_grid_pinpoints": [[32, 32]]},
    "llava_next_video": {"image_grid_pinpoints": [[32, 32]]},
    "llava_onevision": {"image_grid_pinpoints": [[32, 32]]},
    "mamba2": {"num_heads": 8},
    "markuplm": {"max_xpath_tag_unit_embeddings": 100, "max_xpath_subs_unit_embeddings": 100},
    "mask2former": {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32},
    "maskformer": {"fpn_feature_size": 32, "mask_feature_size": 32},
    "nemotron": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "perceiver": {"d_latents": 32, "d_model": 32, "qk_channels": 32, "v_channels": 32, "num_latents": 8},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 8]},
    "qwen2_5_vl_vision": {"window_size": 32},
    "time_series_transformer": _SERIES,
    "vitmatte": {"convstream_hidden_sizes": [8, 8, 8], "fusion_hidden_sizes": [32, 16, 8, 8]},
    "xmod": {"languages": ["en_XX", "de_DE"], "default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3, "n_mamba_heads": 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3},
}  # fmt: skip
"""What the configurations of some models need besides, by model type."""


def tiny_config(config_class: type[PreTrainedConfig], sizes: Sizes = ATTEMPTS[0]) -> PreTrainedConfig:
    """Return a tiny configuration of a class."""
    return _Shrinker(sizes).config(config_class())


class _Shrinker:
    """Makes small configurations of one size; equal tokens of configurations inside each other stay equal."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._tokens: dict[int, int] = {}

    def config(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Return a small configuration of the same class, with the same settings."""
        kind: Any = type(config)
        self._kind = config.model_type
        own = _OWN.get(config.model_type) or _OWN.get(kind.__name__, {})
        if config.model_type == "timm_backbone":  # needs another package
            return ResNetConfig(**_RESNET)  # pyrefly: ignore[unexpected-keyword]
        usual = config if _needs_arguments(kind) else kind()
        taken = len(getattr(config, "out_indices", None) or ())  # by whatever the configuration is a part of
        layers = _chosen_layers(config, max(self._sizes.layers, taken))
        has_stages = any(_is_stages(name, value) for name, value in vars(config).items())
        values: dict[str, Any] = {"use_cache": False} if hasattr(config, "use_cache") else {}
        if config.is_encoder_decoder:
            values["decoder_start_token_id"] = 0
        if taken and not has_stages:
            values["out_indices"] = list(range(1, taken + 1))
        for field in fields(kind):
            name, value = field.name, _value_of(config, field)
            if name.startswith("_") or name in ("use_cache", *own):
                continue
            if isinstance(value, PreTrainedConfig):
                values[name] = self.config(value)
            elif value is None:
                values |= self._filled(name)
            elif (
                field.default is not None or name.startswith("rope") or value != getattr(usual, name, None)
            ):  # not computed from others
                values[name] = self._value(name, value, layers, has_stages=has_stages)
        return kind(**values | own)

    def _filled(self, name: str) -> dict[str, Any]:
        """Return a value for a field that has none, where models expect one."""
        known = {"pad_token_id": 0, "vocab_size": VOCABULARY, "head_dim": self._sizes.head, "num_experts_per_tok": 2,
                 "image_token_index": VOCABULARY - 1, "image_token_id": VOCABULARY - 1}  # fmt: skip
        return {name: known[name]} if name in known else {}

    def _value(self, name: str, value: Any, layers: "_Layers", *, has_stages: bool) -> Any:
        if isinstance(value, bool):
            return value
        if isinstance(value, int):
            return self._number(name, value, layers, has_stages=has_stages)
        if isinstance(value, (list, tuple)) and value:
            return type(value)(self._list(name, value, layers, has_stages=has_stages))
        if isinstance(value, dict) and name.startswith("rope"):
            return self._rope(value, with_sections=bool(re.search(_SECTIONS, self._kind)))
        return value

    def _rope(self, parameters: dict[str, Any], *, with_sections: bool) -> dict[str, Any]:
        share = parameters.get("partial_rotary_factor", 1.0)
        quarter = max(2, int(self._sizes.head * share) // 4)
        sections = {
            "mrope_section": [quarter, quarter // 2, int(self._sizes.head * share) // 2 - quarter - quarter // 2]
        }
        small = sections | {"original_max_position_embeddings": 32}
        changed = {
            name: self._rope(value, with_sections=False) if isinstance(value, dict) else small.get(name, value)
            for name, value in parameters.items()
        }
        return changed | sections if with_sections else changed

    def _number(self, name: str, value: int, layers: "_Layers", *, has_stages: bool) -> int:
        if re.search(_TOKENS, name):
            return self._token(value)
        if name in layers.names:
            return len(layers.kept)
        if re.search(_INDEX, name) and not re.search(_NO_INDEX, name):
            return layers.index(value)
        for pattern, most in _RULES:
            if re.search(pattern, name):
                return (
                    value if most is None else min(value, getattr(self._sizes, most) if isinstance(most, str) else most)
                )
        if has_stages and re.search(_STAGES, name):
            return _narrower(value) if self._sizes.stages else value
        return self._sizes.width if value > SMALL else value

    def _token(self, value: int) -> int:
        """Return the id of a token: large ones become the last of the vocabulary."""
        if value < VOCABULARY:
            return value
        return self._tokens.setdefault(value, VOCABULARY - 1 - len(self._tokens))

    def _list(self, name: str, values: Sequence[Any], layers: "_Layers", *, has_stages: bool) -> list[Any]:
        if len(values) == layers.count > 4:
            return [self._value(name, values[k], layers, has_stages=has_stages) for k in layers.kept]
        if all(type(x) is int for x in values):
            change = self._change(name, values, layers)
            return [change(x) for x in values]
        nested = (list, tuple)
        return [self._value(name, x, layers, has_stages=has_stages) if isinstance(x, nested) else x for x in values]

    def _change(self, name: str, values: Sequence[int], layers: "_Layers") -> Callable[[int], int]:
        """Return how the numbers of a list change, each for itself."""
        is_index = re.search(_INDICES, name) and not re.search(_NO_INDEX, name)
        stages = _narrower if self._sizes.stages else int
        changes: list[tuple[Any, Callable[[int], int]]] = [
            (re.search(r"depth|repeats|num_blocks|num_layers|numb_of_layers|blocks_per", name), lambda _: 1),
            (re.search(r"heads", name), lambda x: min(x, 2)),
            (re.search(_TOKENS, name), self._token),
            (is_index, layers.index),
            (_is_stages(name, values), stages),
            (re.search(_AREAS, name), lambda x: self._number(name, x, layers, has_stages=False)),
        ]
        return next((change for applies, change in changes if applies), int)


def _value_of(config: PreTrainedConfig, field: Any) -> Any:
    """Return the value of a field; its default where layers have values of their own."""
    try:
        return getattr(config, field.name, None)
    except RuntimeError:
        return None if field.default is MISSING else field.default


def _is_given(field: Any, value: Any, usual: Any) -> bool:
    """Return whether a value was given, and not computed from others when the configuration was made."""
    return field.default is not None or field.name.startswith("rope") or value != usual


def _is_stages(name: str, values: Any) -> bool:
    """Return whether a field lists the widths of stages."""
    is_list = isinstance(values, (list, tuple)) and len(values) > 1 and all(type(x) is int for x in values)
    return (
        is_list and max(values) > 32 and bool(re.search(_STAGES, name)) and not re.search(r"image|patch|window", name)
    )


@dataclass(frozen=True)
class _Layers:
    """The layers of a configuration, and those that a small one keeps."""

    names: tuple[str, ...]
    count: int
    kept: tuple[int, ...]

    def index(self, layer: int) -> int:
        """Return where a layer is in the small configuration."""
        if layer < 0:
            return max(layer, -len(self.kept))
        return layer * len(self.kept) // self.count if layer < self.count else min(layer, len(self.kept))


_LAYERS: Final = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "encoder_layers")


def _chosen_layers(config: PreTrainedConfig, most: int) -> _Layers:
    """Return the layers to keep: one of each kind, if there are lists of kinds."""
    names = tuple(name for name in _LAYERS if type(getattr(config, name, None)) is int)
    count = getattr(config, names[0]) if names else 0
    lists = [x for x in vars(config).values() if isinstance(x, (list, tuple)) and len(x) == count > 1]
    kinds: dict[Any, int] = {}
    for k in range(count):
        kinds.setdefault(tuple(x[k] for x in lists if isinstance(x[k], str)), k)
    kept = sorted(kinds.values())[: max(most, 4)]
    kept += [k for k in range(count) if k not in kept][: max(0, most - len(kept))]
    return _Layers(names, count, tuple(sorted(kept)))


def _needs_arguments(kind: Any) -> bool:
    return any(f.default is MISSING and f.default_factory is MISSING for f in fields(kind))


def _narrower(width: int) -> int:
    """Return about an eighth of the width of a stage, as a multiple of 8."""
    return width if width <= 8 else -(-width // 64) * 8
