"""`PrivateTrainer`: transformers' loop takes the steps of `training.step`, and nothing raw is applied or logged."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import qclip
from qclip.training import checkpoint
from ranks import on_ranks

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from qclip.integrations import transformers as integration  # noqa: E402
from qclip.integrations.transformers.trainer import LOSSES, STATE_FILE  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
NOISE = {"noise_multiplier": 1.0, "delta": 1e-3, "privacy_seed": 3, "accountant": "rdp"}
STEPS_PER_EPOCH = 5


class Classifier(nn.Module):
    """A perceptron with dropout, as Trainer expects a model: keyword arguments, and a loss among its outputs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 2))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def losses(model, batch):
    return F.cross_entropy(model(x=batch["x"])["logits"], batch["labels"], reduction="none")


def classifier():
    torch.manual_seed(0)
    return Classifier()


def examples(count=60):
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(count, 4, generator=draw)
    return [{"x": row, "labels": (row[0] > 0).long()} for row in rows]


@pytest.fixture
def arguments(tmp_path):
    """Training arguments: 10 steps of 12 expected examples, in physical batches of at most 4."""

    def make(**changes: Any):
        settings = {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 3,
            "num_train_epochs": 2,
            "learning_rate": 0.1,
            "optim": "sgd",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
        }
        return transformers.TrainingArguments(str(tmp_path / "out"), **settings | changes)

    return make


def trainer_of(args, model=None, **changes):
    settings = NOISE | {"per_example_loss": losses} | changes
    data = settings.pop("train_dataset", examples())
    return integration.PrivateTrainer(model or classifier(), args, train_dataset=data, **settings)


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def by_step(args, *, steps, physical_batch_size, batch_size=12):
    """The weights of the same run in a loop of one's own."""
    transformers.set_seed(args.seed)
    model = classifier()
    transformers.set_seed(args.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    training = qclip.make_private(
        model,
        optimizer,
        DataLoader(examples(), collate_fn=transformers.default_data_collator),
        per_example_loss=losses,
        batch_size=batch_size,
        steps=steps,
        physical_batch_size=physical_batch_size,
        noise_multiplier=1.0,
        delta=1e-3,
        accountant="rdp",
        seed=3,
    )
    for batch in training.loader:
        training.step(batch)
        if training.updated:
            schedule.step()
    return weights(model)


@pytest.mark.parametrize(
    ("per_device", "accumulated", "physical"), [(4, 3, None), (12, 1, None), (12, 1, 5), (6, 2, 100)]
)
def test_a_run_is_that_of_training_step(arguments, per_device, accumulated, physical):
    args = arguments(
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulated,
        eval_strategy="steps",
        eval_steps=3,
    )
    trainer = trainer_of(args, physical_batch_size=physical, eval_dataset=examples(10))
    trainer.train()
    assert trainer.state.global_step == len(trainer.training.history) == 2 * STEPS_PER_EPOCH
    assert_same(weights(trainer.model), by_step(args, steps=10, physical_batch_size=physical or per_device))


@pytest.mark.parametrize("epochs", [0.5, 1.4])
def test_parts_of_epochs_count_in_logical_steps(arguments, epochs):
    trainer = trainer_of(arguments(num_train_epochs=epochs))
    trainer.train()
    assert trainer.training.finished
    assert trainer.training.num_steps == trainer.state.global_step == -(-int(10 * epochs) // 2)


def test_max_steps_are_logical_steps(arguments):
    trainer = trainer_of(arguments(max_steps=7))
    trainer.train()
    assert (trainer.training.finished, trainer.state.global_step) == (True, 7)


@pytest.mark.parametrize("saved", [4, 5])  # in an epoch, and between two
def test_a_resumed_run_is_the_run_that_would_have_been(arguments, saved):
    # The evaluation comes between the checkpoint and the next step, and draws random numbers.
    args = arguments(
        save_strategy="steps", save_steps=saved, eval_strategy="steps", eval_steps=saved, optim="adamw_torch"
    )
    whole = trainer_of(args, eval_dataset=examples(10))
    whole.add_callback(DrawsAfterSaving())
    whole.train()
    torch.rand(3)
    resumed = trainer_of(args, eval_dataset=examples(10), privacy_seed=None)
    resumed.train(resume_from_checkpoint=os.path.join(args.output_dir, f"checkpoint-{saved}"))
    assert_same(weights(whole.model), weights(resumed.model))
    assert tuple(whole.training.history) == tuple(resumed.training.history)
    logged = [[row for row in each.state.log_history if "epsilon" in row][:-1] for each in (whole, resumed)]
    assert logged[0] == logged[1]


class DrawsAfterSaving(transformers.TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        torch.rand(1)


def test_resuming_finds_the_last_checkpoint(arguments):
    args = arguments(save_strategy="steps", save_steps=4)
    whole = trainer_of(args)
    whole.train()
    os.rename(f"{args.output_dir}/checkpoint-10", f"{args.output_dir}/other")
    resumed = trainer_of(args)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.training.finished
    assert_same(weights(whole.model), weights(resumed.model))


def test_a_checkpoint_of_another_trainer_is_refused(arguments):
    args = arguments(save_strategy="steps", save_steps=4)
    trainer_of(args).train()
    folder = f"{args.output_dir}/checkpoint-4"
    state = os.path.join(folder, STATE_FILE)
    os.rename(state, state + ".away")
    with pytest.raises(qclip.Refusal, match=rf"has no {STATE_FILE}: it was not written by PrivateTrainer"):
        trainer_of(args).train(resume_from_checkpoint=folder)
    os.rename(f"{args.output_dir}/checkpoint-8/{STATE_FILE}", state)
    with pytest.raises(qclip.Refusal, match=r"has 8 steps, and trainer_state.json beside it 4"):
        trainer_of(args).train(resume_from_checkpoint=folder)


def test_only_the_owner_can_read_the_seeds_and_a_finished_run_has_none(arguments):
    args = arguments(save_strategy="steps", save_steps=5)
    trainer_of(args).train()
    unfinished, finished = (f"{args.output_dir}/checkpoint-{step}/{STATE_FILE}" for step in (5, 10))
    assert os.stat(unfinished).st_mode & 0o077 == 0
    assert checkpoint.read(unfinished)["training"]["secrets"] is not None
    assert checkpoint.read(finished)["training"]["secrets"] is None


def test_logs_have_released_values_and_no_training_loss(arguments):
    args = arguments(save_strategy="steps", save_steps=10)
    trainer = trainer_of(args)
    result = trainer.train()
    *rows, last = trainer.state.log_history
    for step, row in enumerate(rows):
        record = trainer.training.history[step]
        assert row["tau"] == record.tau[0]
        assert row["noisy_unclipped"] == record.noisy_unclipped[0]
        assert row["epsilon"] >= qclip.accounting.epsilon(
            noise_multiplier=1.0, sample_rate=0.2, steps=step + 1, delta=1e-3, accountant="rdp"
        )
    assert [row["learning_rate"] for row in rows] == pytest.approx([0.1 * (1 - step / 10) for step in range(10)])
    assert last["epsilon"] == result.metrics["epsilon"] == trainer.epsilon() == trainer.training.epsilon()
    written = json.loads(Path(args.output_dir, "checkpoint-10", "trainer_state.json").read_text())
    assert not {"loss", "train_loss", "raw_loss"} & {key for row in written["log_history"] for key in row}
    assert written["total_flos"] == 0


def test_the_raw_loss_is_logged_on_request(arguments):
    trainer = trainer_of(arguments(max_steps=2), log_raw_loss=True)
    result = trainer.train()
    *rows, last = trainer.state.log_history
    assert len(rows) == 2
    assert sum(row["raw_loss"] for row in rows) / 2 == pytest.approx(last["raw_loss"])
    assert last["raw_loss"] == pytest.approx(result.training_loss)


def test_groups_are_logged_by_name(arguments):
    trainer = trainer_of(arguments(max_steps=1), groups={"last": "layers.3.*", "rest": "*"})
    trainer.train()
    assert {"tau/last", "tau/rest"} <= trainer.state.log_history[0].keys()


def test_the_seed_of_the_arguments_does_not_seed_the_noise(arguments):
    runs = [trainer_of(arguments(max_steps=1), privacy_seed=None) for _ in range(2)]
    for trainer in runs:
        trainer.train()
    assert not torch.equal(runs[0].model.layers[0].weight, runs[1].model.layers[0].weight)


def test_empty_draws_are_steps(arguments):
    args = arguments(per_device_train_batch_size=1, gradient_accumulation_steps=1, max_steps=12)
    trainer = trainer_of(args, threshold=qclip.Constant(1.0))
    trainer.train()
    draws = trainer.training.loader.sampler
    assert any(len(draws.draw(step)) == 0 for step in range(12))
    assert len(trainer.training.history) == 12


def test_a_callback_may_stop_the_run(arguments):
    class Stops(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 3

    trainer = trainer_of(arguments(), callbacks=[Stops()])
    trainer.train()
    assert len(trainer.training.history) == 3
    assert trainer.epsilon() == trainer.state.log_history[-1]["epsilon"] == trainer.training.epsilon()


def test_epochs_that_a_callback_ends_go_on_with_the_next_steps(arguments):
    class Skips(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step == 3

    trainer = trainer_of(arguments(), callbacks=[Skips()])
    trainer.train()
    assert [record.step for record in trainer.training.history] == list(range(3 + STEPS_PER_EPOCH))


def test_the_best_model_is_loaded_at_the_end(arguments):
    args = arguments(
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
    )
    trainer = trainer_of(args, eval_dataset=examples(20))
    trainer.train()
    best = min(row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best)


class Raw(transformers.TrainerCallback):
    """Puts a raw gradient in place of the released one, or adds it."""

    def __init__(self, model, adds):
        self.model, self.adds = model, adds

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if not self.adds:
            self.model.zero_grad()
        batch = transformers.default_data_collator(examples(4))
        losses(self.model, batch).mean().backward()


@pytest.mark.parametrize("adds", [False, True])
def test_a_raw_gradient_is_not_applied(arguments, adds):
    model = classifier()
    before = weights(model)
    trainer = trainer_of(arguments(), model, callbacks=[Raw(model, adds)])
    with pytest.raises(qclip.Refusal, match=r"raw gradient|changed after its release"):
        trainer.train()
    assert_same(before, weights(model))


def test_a_raw_training_step_is_not_applied(arguments):
    class Raw(integration.PrivateTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = losses(self.model, transformers.default_data_collator(examples(4))).mean()
            loss.backward()
            return loss.detach()

    model = classifier()
    before = weights(model)
    trainer = Raw(model, arguments(), train_dataset=examples(), per_example_loss=losses, **NOISE)
    with pytest.raises(qclip.Refusal, match="raw gradient"):
        trainer.train()
    assert_same(before, weights(model))


def test_a_loss_function_returns_one_loss_per_example(arguments):
    def each(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs["logits"], labels, reduction="none")

    def mean(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs["logits"], labels)

    args = arguments(max_steps=2)
    trainer = trainer_of(args, per_example_loss=None, compute_loss_func=each, eval_dataset=examples(10))
    trainer.train()
    same = trainer_of(args)
    same.train()
    assert_same(weights(trainer.model), weights(same.model))
    assert trainer.evaluate()["eval_loss"] > 0
    with pytest.raises(qclip.Refusal, match="one value per example"):
        trainer_of(args, per_example_loss=None, compute_loss_func=mean).train()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(examples())


class MeanLoss(integration.PrivateTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size = True is refused"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy = 'group_by_length' is refused"),
        ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy = 'sequential' is refused"),
        ({"torch_compile": True}, "torch_compile = True is refused by PrivateTrainer: pass compile=True"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha = 5.0 is refused"),
        ({"include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen = 'all' is refused"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint = True is refused"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches = True is refused"),
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            "use_reentrant = True is refused",
        ),
    ],
)
def test_arguments_that_cannot_be_kept_are_refused_by_name(arguments, changes, message):
    with pytest.raises(qclip.Refusal, match=message):
        trainer_of(arguments(**changes))


@pytest.mark.parametrize(
    ("name", "value"),
    [("fp16", True), ("fsdp", "full_shard"), ("optim", "lomo"), ("optim", "galore_adamw_layerwise")],
)
def test_arguments_that_need_other_machines_are_refused_by_name(arguments, monkeypatch, name, value):
    trainer = trainer_of(arguments())
    monkeypatch.setattr(trainer.args, name, value)
    with pytest.raises(qclip.Refusal, match=f"{name} = '?{value}"):
        integration_trainer()._refuse_unsupported(trainer)


def test_a_hub_does_not_get_the_seeds(arguments, monkeypatch):
    trainer = trainer_of(arguments())
    monkeypatch.setattr(trainer.args, "push_to_hub", True)
    integration_trainer()._refuse_unsupported(trainer)
    monkeypatch.setattr(trainer.args, "hub_strategy", transformers.trainer_utils.HubStrategy.ALL_CHECKPOINTS)
    with pytest.raises(qclip.Refusal, match=r"hub_strategy = .*(?i:all_checkpoints).*seeds of the noise"):
        integration_trainer()._refuse_unsupported(trainer)


def integration_trainer():
    from qclip.integrations.transformers import trainer

    return trainer


def test_other_contradictions_are_refused(arguments):
    args = arguments()
    with pytest.raises(qclip.Refusal, match="exactly one of epsilon and noise_multiplier"):
        integration.PrivateTrainer(classifier(), args, train_dataset=examples(), per_example_loss=losses)
    with pytest.raises(qclip.Refusal, match="the loss of one example of Classifier is not known"):
        trainer_of(args, per_example_loss=None)
    with pytest.raises(qclip.Refusal, match="Stream is refused"):
        trainer_of(arguments(max_steps=3), train_dataset=Stream())
    with pytest.raises(qclip.Refusal, match=r"MeanLoss.compute_loss is refused"):
        MeanLoss(classifier(), args, train_dataset=examples(), per_example_loss=losses, **NOISE)
    with pytest.raises(qclip.Refusal, match="expected batch size 12"):
        trainer_of(args, train_dataset=examples(11)).train()
    with pytest.raises(qclip.Refusal, match="every trial spends the whole epsilon again"):
        trainer_of(args).hyperparameter_search()


def test_a_second_run_warns_that_epsilons_add_up(arguments):
    trainer = trainer_of(arguments(max_steps=2))
    trainer.train()
    with pytest.warns(UserWarning, match="this model has taken 2 steps in earlier runs"):
        trainer.train()


def test_max_grad_norm_is_not_used_and_says_so(arguments, caplog):
    with caplog.at_level("WARNING", logger="qclip"):
        trainer = trainer_of(arguments(max_steps=2, max_grad_norm=1e-9))
    assert "max_grad_norm = 1e-09 is not used" in caplog.text
    trainer.train()
    plain = trainer_of(arguments(max_steps=2))
    plain.train()
    assert_same(weights(trainer.model), weights(plain.model))


TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12, "vocab_size": 13}


def bert(head, **options):
    torch.manual_seed(0)
    config = transformers.BertConfig(**TINY, max_position_embeddings=24, initializer_range=0.4, **options)
    return getattr(transformers, f"BertFor{head}")(config).eval()


@dataclass(frozen=True)
class Row:
    """A model, and the labels of an example of five tokens."""

    name: str
    build: Any
    labels: dict[str, Any]


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=13, n_positions=24, n_embd=8, n_layer=1, n_head=2, initializer_range=0.4
    )
    return transformers.GPT2LMHeadModel(config).eval()


def t5():
    torch.manual_seed(0)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=13, **sizes, decoder_start_token_id=0)
    ).eval()


def prompted():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(gpt2(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()


TOKENS = {"labels": [-100, 3, 4, -100, 5]}
ROWS = [
    Row("classes", lambda: bert("SequenceClassification", num_labels=3), {"labels": 2}),
    Row("regression", lambda: bert("SequenceClassification", num_labels=1), {"labels": 0.5}),
    Row("tokens", lambda: bert("TokenClassification", num_labels=6), TOKENS),
    Row("masked tokens", lambda: bert("MaskedLM"), TOKENS),
    Row("answers", lambda: bert("QuestionAnswering"), {"start_positions": 1, "end_positions": 3}),
    Row("next tokens", gpt2, TOKENS),
    Row("next tokens behind a prompt", prompted, {"labels": [3, 3, 4, -100, 5]}),
    Row("target tokens", t5, TOKENS | {"decoder_input_ids": [0, 1, 3, 4, 2]}),
]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_loss_of_one_example_is_that_of_trainer(arguments, row, smoothing):
    if smoothing and row.build is prompted:
        pytest.skip("Trainer itself does not know how to smooth these labels")
    model, batch = row.build(), {"input_ids": torch.tensor([[3, 1, 4, 1, 5]])}
    batch |= {name: torch.tensor([value]) for name, value in row.labels.items()}
    args = arguments(label_smoothing_factor=smoothing)
    if smoothing and row.name in ("regression", "answers"):
        with pytest.raises(qclip.Refusal, match="label_smoothing"):
            integration.PrivateTrainer(model, args, **NOISE)._loss(model, batch)
        return
    trainer = integration.PrivateTrainer(model, args, **NOISE)
    own = transformers.Trainer.compute_loss(trainer, model, dict(batch))
    assert trainer._loss(model, batch).tolist() == pytest.approx([own.item()], rel=1e-5)


def test_every_loss_is_that_of_a_kind_of_model_that_transformers_knows():
    from transformers.loss.loss_utils import LOSS_MAPPING

    assert set(LOSSES) <= set(LOSS_MAPPING)


class Tokenizer(SimpleNamespace):
    """The part of a tokenizer that collate functions use."""


def test_padding_to_the_longest_becomes_padding_to_few_lengths(arguments):
    @dataclass
    class Pads:
        tokenizer: Any
        padding: Any = True
        pad_to_multiple_of: int | None = None

        def __call__(self, rows):
            length = max(len(row["input_ids"]) for row in rows)
            length = -(-length // (self.pad_to_multiple_of or 1)) * (self.pad_to_multiple_of or 1)
            seen.add(length)
            ids = [row["input_ids"] + [0] * (length - len(row["input_ids"])) for row in rows]
            mask = [[1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in rows]
            labels = torch.tensor([row["labels"] for row in rows])
            return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "labels": labels}

    seen: set[int] = set()
    rows = [{"input_ids": list(range(1, 2 + k % 9)), "labels": k % 2} for k in range(40)]
    trainer = integration.PrivateTrainer(
        bert("SequenceClassification"),
        arguments(max_steps=2),
        Pads(Tokenizer(model_max_length=10**30)),
        rows,
        **NOISE,
    )
    trainer.train()
    assert seen <= {8, 16}  # 24 positions: multiples of 8 fit
    fixed = Pads(Tokenizer(model_max_length=16), padding="max_length")
    kept = integration.PrivateTrainer(bert("SequenceClassification"), arguments(), fixed, rows, **NOISE)
    assert kept.data_collator is fixed


@pytest.mark.slow
def test_bfloat16_and_seq2seq(arguments):
    class PrivateSeq2SeqTrainer(integration.PrivateTrainer, transformers.Seq2SeqTrainer):
        pass

    args = transformers.Seq2SeqTrainingArguments(**arguments(max_steps=2, bf16=True).to_dict())
    rows = [{"input_ids": [1 + k % 5, 2, 3, 4], "labels": [3, 4, 1 + k % 5]} for k in range(40)]
    trainer = PrivateSeq2SeqTrainer(
        t5(), args, data_collator=integration.fixed_length(0, 4), train_dataset=rows, eval_dataset=rows[:4], **NOISE
    )
    trainer.train()
    assert len(trainer.training.history) == 2
    assert trainer.evaluate()["eval_loss"] > 0


def test_prompts_are_trained(arguments):
    model = prompted()
    before = weights(model)
    rows = [{"input_ids": torch.randint(1, 13, (6,))} for _ in range(40)]
    integration.PrivateTrainer(model, arguments(max_steps=2), integration.fixed_length(0, 6), rows, **NOISE).train()
    moved = {name for name, tensor in weights(model).items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name, p in model.named_parameters() if p.requires_grad}


def test_adapters(arguments):
    peft = pytest.importorskip("peft")
    args = arguments(max_steps=4, save_strategy="steps", save_steps=2)
    rows = [{"input_ids": torch.randint(1, 13, (6,))} for _ in range(40)]

    def trainer():
        torch.manual_seed(1)
        model = peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
        return integration.PrivateTrainer(model, args, integration.fixed_length(0, 6), rows, **NOISE)

    whole = trainer()
    before = weights(whole.model)
    whole.train()
    moved = {name for name, tensor in weights(whole.model).items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name, p in whole.model.named_parameters() if p.requires_grad}
    resumed = trainer()
    resumed.train(resume_from_checkpoint=f"{args.output_dir}/checkpoint-2")
    assert_same(weights(whole.model), weights(resumed.model))


def on_rank(rank, folder, size):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    args = transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=6,
        gradient_accumulation_steps=1,
        num_train_epochs=2,
        learning_rate=0.1,
        optim="sgd",
        logging_steps=1,
        save_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    model = classifier()
    model.layers[2].p = 0.0
    trainer = trainer_of(args, model)
    trainer.train()
    whole = weights(trainer.model)
    again = classifier()
    again.layers[2].p = 0.0
    resumed = trainer_of(args, again)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
    assert_same(whole, weights(resumed.model))
    numbers = {name: tensor.tolist() for name, tensor in whole.items()}
    return trainer.state.global_step, trainer.training.plan.batch_size, trainer.epsilon(), numbers


@pytest.mark.slow
def test_two_processes_share_the_run(arguments, tmp_path):
    outcomes = on_ranks(2, on_rank, str(tmp_path / "ranks"), 2)
    model = classifier()
    model.layers[2].p = 0.0
    alone = trainer_of(arguments(per_device_train_batch_size=12, gradient_accumulation_steps=1), model)
    alone.train()
    for steps, batch_size, epsilon, found in outcomes:
        assert (steps, batch_size, epsilon) == (10, 12, alone.epsilon())
        for name, tensor in weights(alone.model).items():
            torch.testing.assert_close(torch.tensor(found[name]), tensor, rtol=1e-4, atol=1e-5)


SCRIPT = """
import json, sys
import torch, transformers
from integrations import test_trainer
folder, per_device = sys.argv[1], int(sys.argv[2])
args = transformers.TrainingArguments(
    folder, per_device_train_batch_size=per_device, num_train_epochs=2, learning_rate=0.1, optim="sgd",
    save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
)
model = test_trainer.classifier()
model.layers[2].p = 0.0
trainer = test_trainer.trainer_of(args, model)
trainer.train()
if trainer.is_world_process_zero():
    weights = {name: tensor.tolist() for name, tensor in test_trainer.weights(model).items()}
    open(sys.argv[3], "w").write(json.dumps([trainer.args.world_size, trainer.epsilon(), weights]))
"""


@pytest.mark.slow
def test_torchrun_makes_the_run_of_one_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = []
    for launcher, per_device in ([], "12"), (torchrun, "6"):
        written = tmp_path / f"{per_device}.json"
        command = [sys.executable, *launcher, str(script), str(tmp_path / "out"), per_device, str(written)]
        subprocess.run(command, check=True, env=environment, capture_output=True)
        found.append(json.loads(written.read_text()))
    (one, epsilon, alone), (two, shared_epsilon, shared) = found
    assert (one, two, epsilon) == (1, 2, shared_epsilon)
    for name, numbers in alone.items():
        torch.testing.assert_close(torch.tensor(shared[name]), torch.tensor(numbers), rtol=1e-4, atol=1e-5)
