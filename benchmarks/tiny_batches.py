"""Batches for tiny models of transformers, made from the signature of a forward pass and the model's configuration."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from tiny_configs import ATTEMPTS, tiny_config

LENGTHS: Final = (7, 5, 7, 3)
"""The number of words of each example; what follows them is padding."""


@dataclass(frozen=True)
class Wanted:
    """What to put into a batch; a forward pass that fails may ask for something else (`_corrected`)."""

    image_tokens: int = 0
    """The words of each example that stand for an image."""
    audio_tokens: int = 0
    words: int = 0
    """The length of texts that are not padded; 0 for padded ones."""
    frames: int = 0
    """The number of frames of audio; 0 for what the configuration says."""
    image: tuple[int, int] | None = None
    """The size of images; None for what the configuration says."""
    features_last: bool = False
    """Whether frames of audio come before their features."""
    image_rank: int = 0
    """How many images an example has, if they are one dimension more."""
    is_mono: bool = False
    """Whether audio has a dimension of channels."""
    more: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Problem:
    """A tiny model in training mode, and the arguments of its forward pass with one row per example."""

    model: Any
    inputs: Mapping[str, Any]


class NotBuilt(Exception):
    """No tiny model of a class could be run."""


def tiny_problem(model_class: Any) -> Problem:
    """Return a tiny model of a class, and a batch that it takes; what fails decides what is tried next.

    Raises:
        NotBuilt: Nothing worked; the message says what failed first.
    """
    first: Exception | None = None
    for sizes in ATTEMPTS:
        try:
            return _runnable(_built(model_class, tiny_config(model_class.config_class, sizes)))
        except Exception as error:  # whatever a model raises
            first = first or error
    raise NotBuilt(f"{type(first).__name__}: {first}") from first


def _built(model_class: Any, config: Any) -> Any:
    """Return the model in training mode, with weights large enough for every part of it to matter."""
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for x in model.parameters():
            if x.is_floating_point():
                x.add_(0.05 * torch.randn_like(x))
    return model.train()


def _runnable(model: Any) -> Problem:
    """Return the model with a batch that it takes."""
    wanted, tried = Wanted(), set[Wanted]()
    while True:
        tried.add(wanted)
        maker = _Maker(model, wanted)
        inputs, flat = maker.inputs()
        # A row per example is what the engine needs, though the model takes the patches of all images in a row.
        handle = model.register_forward_pre_hook(_flattened(flat), with_kwargs=True)
        try:
            with torch.no_grad():
                model(**inputs)
            return Problem(model, inputs)
        except Exception as error:
            handle.remove()
            following = next((x for x in _corrected(wanted, str(error)) if x not in tried), None)
            if following is None or len(tried) > 12:
                raise
            wanted = following


def _flattened(names: frozenset[str]) -> Callable[..., tuple[Any, Any]]:
    """Return a hook that takes the dimension of examples from some arguments."""

    def hook(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return args, {name: x.flatten(0, 1) if name in names else x for name, x in kwargs.items()}

    return hook


def _image_tokens(wanted: Wanted, count: int) -> list[Wanted]:
    size = len(LENGTHS)
    return [replace(wanted, image_tokens=n) for n in (count // size, count, 4, 16, 1, 17) if 0 < n < 100]


_Correction = Callable[[Wanted, re.Match[str]], list[Wanted]]
_CORRECTIONS: Final[tuple[tuple[str, _Correction], ...]] = (
    (r"image features and image tokens do not match.*features:? (\d+)", lambda w, m: _image_tokens(w, int(m[1]))),
    (r"audio.* tokens.*features:? (\d+)", lambda w, m: [replace(w, audio_tokens=int(m[1]) // len(LENGTHS))]),
    (r"of length (\d+), but found", lambda w, m: [replace(w, frames=int(m[1]))]),
    (r"missing \d+ required positional arguments?: (.*)",
     lambda w, m: [replace(w, more=w.more | set(re.findall(r"'(\w+)'", m[1])))]),
    (r"(?:have to specify|`)(?: either)? ?`?(\w+)`? ?(?:cannot be|must be|$|are required)",
     lambda w, m: [replace(w, more=w.more | {m[1]})]),
    (r"'NoneType' object has no attribute 'shape'",
     lambda w, _: [replace(w, more=w.more | {"spatial_shapes", "pixel_attention_mask"})]),
    (r"split_with_sizes expects", lambda w, _: [replace(w, image_rank=2)]),
    (r"unexpected keyword argument '(\w+)'", lambda w, m: [replace(w, without=w.without | {m[1]})]),
    (r"both (\w+) and (\w+) at the same time", lambda w, m: [replace(w, without=w.without | {m[2]}),
                                                           replace(w, without=w.without | {m[1]})]),
    (r"doesn't match model \((\d+)\*(\d+)", lambda w, m: [replace(w, image=(int(m[1]), int(m[2])))]),
    (r"must be a 5D", lambda w, _: [replace(w, image_rank=2)]),
    (r"expected 5, got 4", lambda w, _: [replace(w, image_rank=1)]),
    (r"expected 3, got 2|have 1 channels, but got|Audio must be mono", lambda w, _: [replace(w, is_mono=True)]),
    (r"initialized without a vision_config", lambda w, _: [replace(w, without=w.without | {"pixel_values"})]),
    (r"'NoneType' object has no attribute 'sum'|has no attribute 'to'",
     lambda w, _: [replace(w, more=w.more | {"input_features_mask", "feature_attention_mask"})]),
    (r"'NoneType' object is not iterable|object of type 'NoneType' has no len",
     lambda w, _: [replace(w, more=w.more | {"image_sizes"})]),
    (r"shape of the mask \[\d+, \d+\] at index 1",
     lambda w, _: [replace(w, without=w.without | {"decoder_input_ids"})]),
    (r"attn_mask dtype", lambda w, _: [replace(w, without=w.without | {"attention_mask"})]),
    (r"multiply to sequence length", lambda w, _: [replace(w, words=64)]),
    (r"mat1 and mat2 shapes|normalized_shape|expected input.* to have|size of tensor a|Dimension out of range",
     lambda w, _: [replace(w, features_last=not w.features_last)]),
    (r"tensor a \(7\) must match the size of tensor b \((\d+)\)", lambda w, m: [replace(w, words=int(m[1]))]),
)  # fmt: skip
"""What an error says about the batch, and what to try then."""


def _corrected(wanted: Wanted, error: str) -> Iterator[Wanted]:
    for pattern, change in _CORRECTIONS:
        match = re.search(pattern, error, re.IGNORECASE | re.DOTALL)
        if match:
            yield from change(wanted, match)


class _Maker:
    """Makes a batch for a model."""

    def __init__(self, model: Any, wanted: Wanted) -> None:
        self.model, self.config, self.wanted = model, model.config, wanted
        self.size = len(LENGTHS)
        self.text = _part(self.config, "text_config", "text_encoder", "thinker_config", "llm_config", "decoder")
        self.vision = _part(self.config, "vision_config", "image_config", "image_model_config", "backbone_config")
        self.audio = _part(self.config, "audio_config", "encoder_config", "audio_encoder_config", "speech_encoder")
        self.parameters = inspect.signature(model.forward).parameters
        self.generator = torch.Generator().manual_seed(1)

    def inputs(self) -> tuple[dict[str, Any], frozenset[str]]:
        """Return the batch, and the names of what the model takes without the dimension of examples."""
        made = {name: make(self) for name, make in _MAKERS.items() if self._is_wanted(name)}
        made = {name: x for name, x in made.items() if x is not None}
        if type(self.model).__name__.endswith("MultipleChoice"):
            made = {name: torch.stack([x, x.roll(1, 0)], 1) for name, x in made.items()}
        flat = {"pixel_values"} if self.by_patch else set()
        return made, frozenset(flat | ({"hidden_states"} if "grid_thw" in made else set()))

    def _is_wanted(self, name: str) -> bool:
        parameter = self.parameters.get(name)
        if parameter is None or name in self.wanted.without:
            return False
        return name in _USUAL or name in self.wanted.more or parameter.default is inspect.Parameter.empty

    # Sizes

    def get(self, *names: str, default: Any = None, at: Any = None) -> Any:
        """Return the first of these values that a part of the configuration has."""
        for part in (self.config, self.vision, self.text, self.audio) if at is None else (at,):
            for name in names:
                value = getattr(part, name, None)
                if value is not None:
                    return value
        return default

    @property
    def by_patch(self) -> bool:
        """Whether images come as patches, those of all examples after each other."""
        return "image_grid_thw" in self.parameters or "grid_thw" in self.parameters

    @property
    def length(self) -> int:
        """The number of words."""
        return self.wanted.words or max(LENGTHS) + self.wanted.image_tokens + self.wanted.audio_tokens

    def words_of(self, part: Any) -> int:
        """The size of a vocabulary."""
        found = [getattr(each, "vocab_size", 0) for each in (part, self.text, self.config)]
        return next((n for n in found if isinstance(n, int) and n > 0), 32)

    def special(self, config: Any = None) -> set[int]:
        """The ids that mean something."""
        found: set[int] = set()
        for name, value in vars(self.config if config is None else config).items():
            if hasattr(value, "model_type"):
                found |= self.special(value)
            elif re.search(r"_id$|_index$|_ids$", name):
                found |= {x for x in (value if isinstance(value, (list, tuple)) else [value]) if type(x) is int}
        return found

    def randn(self, *shape: int) -> Tensor:
        """Random numbers, one row per example."""
        return torch.randn(self.size, *shape, generator=self.generator)

    def randint(self, limit: int, *shape: int) -> Tensor:
        """Random integers below a limit, one row per example."""
        return torch.randint(limit, (self.size, *shape), generator=self.generator)

    def mask(self, length: int | None = None) -> Tensor:
        """Ones for words or frames, and zeros for the padding on the right."""
        if length is None:
            lengths = [self.length - max(LENGTHS) + n for n in LENGTHS]
            length = self.length
            lengths = [length] * self.size if self.wanted.words else lengths
        else:
            lengths = [max(1, length * n // max(LENGTHS)) for n in LENGTHS]
        return (torch.arange(length) < torch.tensor(lengths)[:, None]).long()

    # Text

    def words(self, length: int, part: Any = None) -> Tensor:
        """Random words, none of which means anything."""
        special = self.special()
        plain = [k for k in range(self.words_of(part or self.text)) if k not in special] or [0]
        return torch.tensor(plain)[self.randint(len(plain), length)]

    def input_ids(self) -> Tensor:
        """Words after images and audio, padded on the right; the last of each example is the end of the text."""
        ids, mask = self.words(self.length), self.mask()
        count, pad, end = self.words_of(self.text), self.get("pad_token_id"), self.get("eos_token_id")
        if type(end) is int and 0 <= end < count:
            ids[torch.arange(self.size), mask.sum(1) - 1] = end
        ids = torch.where(mask.bool(), ids, pad if type(pad) is int and 0 <= pad < count else 0)
        at = 0
        for length, names in ((self.wanted.image_tokens, _IMAGE), (self.wanted.audio_tokens, _AUDIO)):
            ids[:, at : at + length] = self.get(*names, default=0)
            at += length
        question = self.get("question_token_id")
        if question is not None:
            ids[:, 1] = question
        return ids

    def attention_mask(self) -> Tensor | None:
        """The mask of the words, or of the audio where that is the only input."""
        if "input_ids" in self.parameters and self._is_wanted("input_ids"):
            return self.mask()
        if "input_values" in self.parameters:
            x = self.input_values()
            return self.mask(x.shape[-1]) if x.dim() == 2 else None
        if "input_features" in self.parameters:
            return self.features_mask()
        return None

    # Images

    def image_size(self) -> tuple[int, int]:
        """Height and width."""
        size = (
            self.wanted.image
            or self.get("image_size", at=self.vision)
            or self.get("image_size", "img_size", default=32)
        )
        return (size, size) if isinstance(size, int) else (size[-2], size[-1])

    def pixel_values(self) -> Tensor:
        """Images, videos or patches."""
        channels = self.get("num_channels", "in_channels", "in_chans", at=self.vision, default=3)
        channels = channels if isinstance(channels, int) and channels < 5 else 3
        if self.by_patch or "spatial_shapes" in self.parameters:
            patch = self.get("patch_size", at=self.vision, default=8)
            patch = patch if isinstance(patch, int) else patch[-1]
            temporal = self.get("temporal_patch_size", at=self.vision, default=1)
            return self.randn(16, channels * temporal * patch * patch)
        frames = self.get("num_frames", "frames_per_clip", at=self.vision)
        if type(frames) is int and frames > 1 and "Image" not in type(self.model).__name__:
            return self.randn(frames, channels, *self.image_size())
        return self.randn(*[self.wanted.image_rank] if self.wanted.image_rank else [], channels, *self.image_size())

    def videos(self) -> Tensor:
        """Videos of the frames that the configuration says."""
        frames = self.get("num_frames", "frames_per_clip", default=4)
        return self.randn(frames, 3, *self.image_size())

    def masked_patches(self) -> Tensor:
        """Which patches of an image or video are hidden: half of them, others in each example."""
        patch = self.get("patch_size", default=8)
        height, width = self.image_size()
        count = (height // patch) * (width // patch)
        count *= self.get("num_frames", default=1) // self.get("tubelet_size", default=1)
        return self.randn(count).argsort(1) % 2 == 0

    def mm_token_type_ids(self) -> Tensor:
        """1 for the words that stand for an image."""
        return (torch.arange(self.length) < self.wanted.image_tokens).long().repeat(self.size, 1)

    def token_type_ids(self) -> Tensor:
        """Segments; for models of images and text, what stands for an image."""
        if self.wanted.image_tokens:
            return self.mm_token_type_ids()
        if self.get("type_vocab_sizes") is not None:
            return torch.zeros(self.size, self.length, len(self.get("type_vocab_sizes")), dtype=torch.long)
        return self.randint(min(2, max(1, self.get("type_vocab_size", default=2))), self.length)

    # Audio and series

    def input_values(self) -> Tensor:
        """Samples of audio, or its spectrum."""
        if self.get("num_mel_bins", at=self.config) and not self.get("conv_stride", at=self.config):
            return self.randn(
                self.get("max_length", at=self.config, default=64), self.get("num_mel_bins", at=self.config)
            )
        return self.randn(*[1] if self.wanted.is_mono else [], 6000)

    def input_features(self) -> Tensor:
        """Frames of audio with their features."""
        names = ("num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim", "n_mels",
                 "input_dim", "num_mels", "spec_size")  # fmt: skip
        features = self.get(*names, at=self.audio, default=self.get(*names, default=16))
        positions = self.get("max_source_positions", at=self.audio)
        frames = self.wanted.frames or (2 * positions if positions else 64)
        return self.randn(frames, features) if self.wanted.features_last else self.randn(features, frames)

    def features_mask(self) -> Tensor:
        """The mask of `input_features`."""
        return self.mask(self.input_features().shape[1 if self.wanted.features_last else -1])

    def series(self) -> Tensor:
        """A time series, with its past as far as the model looks back."""
        length = self.get("context_length", default=16) + max(self.get("lags_sequence", default=[0]))
        channels = self.get("num_input_channels")
        return self.randn(length, channels) if channels else self.randn(length)

    def boxes(self) -> Tensor:
        """A box around every word."""
        limit = self.get("max_2d_position_embeddings", default=64)
        corner = self.randint(limit // 2, self.length, 2)
        return torch.cat([corner, corner + limit // 2 - 1], 2)


def _part(config: Any, *names: str) -> Any:
    found = [getattr(config, name, None) for name in names]
    return next((x for x in found if hasattr(x, "model_type")), config)


_IMAGE: Final = ("image_token_id", "image_token_index", "media_placeholder_token_id", "image_patch_id")
_AUDIO: Final = ("audio_token_id", "audio_token_index")
_grid: Final = lambda m: torch.tensor([[1, 4, 4]]).repeat(m.size, 1)  # noqa: E731
_MAKERS: Final[dict[str, Callable[[_Maker], Any]]] = {
    "input_ids": _Maker.input_ids,
    "attention_mask": _Maker.attention_mask,
    "token_type_ids": _Maker.token_type_ids,
    "decoder_input_ids": lambda m: m.words(5, m.get("decoder", at=m.config)),
    "bbox": _Maker.boxes,
    "pixel_values": _Maker.pixel_values,
    "image_grid_thw": _grid,
    "grid_thw": _grid,
    "mm_token_type_ids": _Maker.mm_token_type_ids,
    "input_values": _Maker.input_values,
    "input_features": _Maker.input_features,
    # What only some models ask for.
    "hidden_states": _Maker.pixel_values,
    "image_sizes": lambda m: torch.tensor([m.image_size()]).repeat(m.size, 1),
    "spatial_shapes": lambda m: torch.tensor([[4, 4]]).repeat(m.size, 1),
    "pixel_attention_mask": lambda m: m.mask(16),
    "pixel_values_videos": _Maker.videos,
    "bool_masked_pos": _Maker.masked_patches,
    "qformer_input_ids": lambda m: m.words(5, m.get("qformer_config")),
    "high_res_pixel_values": _Maker.pixel_values,
    "input_features_mask": _Maker.features_mask,
    "feature_attention_mask": _Maker.features_mask,
    "past_values": _Maker.series,
    "past_observed_mask": lambda m: torch.ones_like(m.series()),
    "past_time_features": lambda m: m.randn(m.series().shape[1], m.get("num_time_features", default=2)),
    "visual_feats": lambda m: m.randn(6, m.get("visual_feat_dim", default=32)),
    "visual_pos": lambda m: m.randn(6, 4).sigmoid(),
    "merge_sizes": lambda m: torch.full((m.size,), 2),
    "query_embeds": lambda m: m.randn(6, m.get("hidden_size")),
    "state": lambda m: m.randn(m.get("max_state_dim", default=32)),
    "flattened_patches": lambda m: m.randn(6, m.get("patch_embed_hidden_size", default=32)),
    "latents": lambda m: m.randn(m.get("hidden_size"), 8),
    "inputs_embeds": lambda m: m.randn(m.length, m.get("hidden_size")),
}  # fmt: skip
"""How an argument of a forward pass is made."""
_USUAL: Final = frozenset(list(_MAKERS)[: list(_MAKERS).index("hidden_states")])
"""Arguments that are given wherever a forward pass has them; others only where it needs them."""
