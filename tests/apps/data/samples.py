"""Small made-up files in the formats that are read, and where the real ones lie."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

REAL = Path(os.environ.get("QCLIP_DATA_DIR", Path(__file__).parents[4] / "shared" / "data"))


def real_data(folder):
    """The folder with all data sets, where this one is in it; the test is skipped otherwise."""
    if not (REAL / folder).is_dir():
        pytest.skip(f"no {folder} data in {REAL}; set QCLIP_DATA_DIR")
    return REAL


def idx_bytes(array, *, kind=8):
    """An array of bytes as an idx file."""
    lengths = b"".join(length.to_bytes(4, "big") for length in array.shape)
    return bytes([0, 0, kind, array.ndim]) + lengths + array.astype(np.uint8).tobytes()


def write_idx(folder, *, train=40, test=15, side=28, zipped=True, **replaced):
    """The four files of an MNIST-like data set with random pixels; ``replaced`` has other bytes for some of them."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for part, count in (("train", train), ("t10k", test)):
        images, labels = rng.integers(0, 256, (count, side, side)), np.arange(count) % 10
        contents = {f"{part}-images-idx3-ubyte": idx_bytes(images), f"{part}-labels-idx1-ubyte": idx_bytes(labels)}
        for name, raw in contents.items():
            content = replaced.get(name.replace("-", "_"), raw)
            (folder / (f"{name}.gz" if zipped else name)).write_bytes(gzip.compress(content) if zipped else content)
    return folder


def cifar_images(batch, *, images=6):
    """The random pixels of a batch, [N, 3, 32, 32]; the last batch, 6, is that of the tests."""
    return np.random.default_rng(batch).integers(0, 256, (images, 3, 32, 32), dtype=np.uint8)


def cifar_labels(batch, *, images=6):
    """The labels of a batch, [N]."""
    return (np.arange(images, dtype=np.uint8) + batch) % 10


def cifar_name(batch):
    """The name of a batch's file, without its ending."""
    return "test_batch" if batch == 6 else f"data_batch_{batch}"


def write_cifar(folder, *, images=6):
    """The binary batches of a small CIFAR-10."""
    folder.mkdir(parents=True, exist_ok=True)
    for batch in range(1, 7):
        pixels, labels = cifar_images(batch, images=images), cifar_labels(batch, images=images)
        records = np.concatenate([labels[:, None], pixels.reshape(images, -1)], axis=1)
        (folder / f"{cifar_name(batch)}.bin").write_bytes(records.tobytes())
    return folder


def write_mosaics(folder):
    """The same images as mosaics of 2 rows of 3, and their labels."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for batch in range(1, 7):
        mosaic = cifar_images(batch).reshape(2, 3, 3, 32, 32).transpose(0, 3, 1, 4, 2).reshape(64, 96, 3)
        Image.fromarray(mosaic).save(folder / f"{cifar_name(batch)}.webp", lossless=True)
    train = np.concatenate([cifar_labels(batch) for batch in range(1, 6)])
    np.savez(folder / "labels.npz", train=train, test=cifar_labels(6))
    return folder


ADULT_ROW = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, "
    "United-States, <=50K"
)


def write_adult(folder, *, rows=30, extra=""):
    """Two files in the format of Adult; ``extra`` is added to the training rows."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [ADULT_ROW.replace("39", str(20 + k)).replace("<=50K", "<=50K" if k % 3 else ">50K") for k in range(rows)]
    lines[1] = lines[1].replace("State-gov", "?")
    train = "\n".join(lines) + "\n" + extra + "\n\n"
    test = "|1x3 Cross validator\n" + "".join(f"{line}.\n" for line in lines[:10]) + "\n"
    (folder / "adult.data.gz").write_bytes(gzip.compress(train.encode()))
    (folder / "adult.test.gz").write_bytes(gzip.compress(test.encode()))
    return folder


def write_speeches(folder, *, speeches=12):
    """Speeches of two speakers, each somewhat longer than a window."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"hamlet\t{'AB'[k % 2]}\tWords, words, words.\\nBetween who? {'x' * 60}" for k in range(speeches)]
    text = "play\tspeaker\ttext\n" + "\n".join(lines) + "\n"
    (folder / "speeches.tsv.gz").write_bytes(gzip.compress(text.encode()))
    return folder


def write_sst2(folder, *, lines=24, encoder=True):
    """A training set and a development set in the format of GLUE, with a small encoder of random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", lines), ("dev", lines // 3)):
        text = "".join(f"a {('bad', 'good')[k % 2]} film {'film ' * (k % 4)}\t{k % 2}\n" for k in range(count))
        (folder / f"{name}.tsv").write_text("sentence\tlabel\n" + text, encoding="utf-8")
    if encoder:
        write_encoder(folder / "all-minilm-l6-v2")
    return folder


def write_encoder(folder, *, dtype="float16", **options):
    """The three files of a small BERT with random weights, which know the words of `write_sst2`."""
    for package in ("transformers", "tokenizers", "peft"):
        pytest.importorskip(package)
    import safetensors.torch
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    folder.mkdir(parents=True)
    words = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "bad", "film", "good", "##s")
    tokenizer = Tokenizer(models.WordPiece({word: k for k, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = BertConfig(
        **{"vocab_size": len(words), "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2} | options,
        intermediate_size=16, max_position_embeddings=64,
    )  # fmt: skip
    config.to_json_file(folder / "config.json", use_diff=False)
    torch.manual_seed(0)
    weights = BertModel(config).state_dict()
    kept = {name: 5 * weight.to(getattr(torch, dtype)) for name, weight in weights.items()}
    safetensors.torch.save_file(kept, folder / "model.safetensors")
    return folder


def write_csv(folder, text, name="table.csv"):
    """A file of comma-separated values."""
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def flowers(rows=60):
    """A table whose class follows from a number and a colour."""
    lines = [f"{k % 7 + 0.5},{('red', 'blue')[k % 2]},{('rose', 'iris')[k % 2]}" for k in range(rows)]
    return "\n".join(["height,colour,kind", *lines]) + "\n"
