"""`PrivateSFTTrainer`: TRL prepares completions and chats, and the steps are those of `training.step`."""

import pytest
import torch
from torch.utils.data import DataLoader

import qclip

datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
import transformers  # noqa: E402

from qclip.integrations.transformers import causal_lm_loss  # noqa: E402
from qclip.integrations.trl import PrivateSFTTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
WORDS = ("[pad]", "[unknown]", "[end]", "user", "assistant", "who", "sleeps", "the", "fox", "owl", "sings")
TEMPLATE = """{% for message in messages %}{% if message.role == 'assistant' %}
assistant {% generation %}{{ message.content }} [end]{% endgeneration %}
{% else %}user {{ message.content }}{% endif %}{% endfor %}{% if add_generation_prompt %} assistant{% endif %}"""
NOISE = {"noise_multiplier": 1.0, "delta": 1e-3, "privacy_seed": 3, "threshold": qclip.Constant(1.0)}
END, ANSWER = WORDS.index("[end]"), [WORDS.index(word) for word in ("the", "fox", "[end]")]


@pytest.fixture(autouse=True)
def _without_a_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")


def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    ids = {word: k for k, word in enumerate(WORDS)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="[unknown]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "[unknown]", "pad_token": "[pad]", "eos_token": "[end]"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    made.chat_template = TEMPLATE
    return made


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), **sizes, num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.4
    )
    return transformers.LlamaForCausalLM(config)


def completions():
    return datasets.Dataset.from_list(
        [{"prompt": "who sleeps " * (1 + k % 3), "completion": "the fox" if k % 2 else "owl sings"} for k in range(40)]
    )


def chats():
    turns = [{"role": "user", "content": "who sleeps"}, {"role": "assistant", "content": "the fox"}]
    return datasets.Dataset.from_list([{"messages": turns * (1 + k % 2)} for k in range(40)])


@pytest.fixture
def arguments(tmp_path):
    def make(**changes):
        settings = {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 3,
            "max_steps": 3,
            "learning_rate": 0.1,
            "lr_scheduler_type": "constant",
            "optim": "sgd",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
        }
        return trl.SFTConfig(str(tmp_path / "out"), **settings | changes)

    return make


def test_completions_take_the_steps_of_a_loop_of_ones_own(arguments):
    trainer = PrivateSFTTrainer(
        llama(),
        arguments(),
        train_dataset=completions(),
        eval_dataset=completions(),
        processing_class=tokenizer(),
        **NOISE,
    )
    rows = [{name: row[name] for name in ("input_ids", "labels")} for row in trainer.train_dataset]
    assert all(sum(label != -100 for label in row["labels"]) == 3 for row in rows)  # two words and the end
    trainer.train()
    assert all("epsilon" in row and "loss" not in row for row in trainer.state.log_history)
    assert trainer.evaluate()["eval_loss"] > 0

    model = llama()
    training = qclip.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(rows, collate_fn=trainer.data_collator),
        per_example_loss=causal_lm_loss,
        batch_size=12,
        steps=3,
        physical_batch_size=4,
        noise_multiplier=1.0,
        delta=1e-3,
        threshold=qclip.Constant(1.0),
        seed=3,
    )
    for batch in training.loader:
        training.step(batch)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, trainer.model.state_dict()[name]), name


def test_answers_in_chats_move_adapters_only(arguments):
    peft = pytest.importorskip("peft")
    trainer = PrivateSFTTrainer(
        llama(),
        arguments(assistant_only_loss=True),
        train_dataset=chats(),
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]),
        **NOISE,
    )
    labels = trainer.train_dataset[1]["labels"]
    assert [label for label in labels if label != -100] == 2 * ANSWER
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainable = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    assert {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])} == trainable
    assert all("lora" in name for name in trainable)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing": True}, "packing = True is refused by PrivateSFTTrainer: an example has to be a row of its own"),
        ({"padding_free": True}, "padding_free = True is refused"),
        ({"activation_offloading": True}, "activation_offloading = True is refused"),
        ({"loss_type": "dft"}, "loss_type = 'dft' must be 'nll'"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(arguments, changes, message):
    with pytest.raises(qclip.Refusal, match=message):
        PrivateSFTTrainer(
            llama(), arguments(**changes), train_dataset=completions(), processing_class=tokenizer(), **NOISE
        )
