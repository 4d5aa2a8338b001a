"""Hugging Face's `Trainer` with private steps: `PrivateTrainer`."""

import copy
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import get_last_checkpoint, has_length

from qclip import _validate as check
from qclip.accounting import Accountant, steps_per_epoch
from qclip.engine.groups import GroupSpec
from qclip.engine.randomness import RandomState
from qclip.integrations.release_log import released_norms
from qclip.integrations.transformers import (
    causal_lm_loss,
    classification_loss,
    question_answering_loss,
    seq2seq_loss,
    token_classification_loss,
)
from qclip.thresholds import BalancedThreshold, Threshold
from qclip.training import checkpoint
from qclip.training.dataset import dataset_size as examples_in
from qclip.training.make import make_private
from qclip.training.run import PrivateTraining

STATE_FILE = "private_training.pt"
"""The state of the run in a checkpoint folder: as secret as the data until the run is complete."""
LENGTHS_APART = 32
"""Texts are padded to multiples of this many tokens where the collate function would pad to the longest."""
KEPT = (
    "collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "prefetch_factor", "persistent_workers",
)  # fmt: skip
"""The settings of Trainer's own loader that private steps keep."""
log = logging.getLogger("qclip")

LOSSES: Mapping[str, Callable[..., Tensor]] = {
    "ForCausalLM": causal_lm_loss,
    "ForConditionalGeneration": causal_lm_loss,
    "ForMaskedLM": token_classification_loss,
    "ForTokenClassification": token_classification_loss,
    "ForSequenceClassification": classification_loss,
    "ForImageClassification": classification_loss,
    "ForVideoClassification": classification_loss,
    "ForAudioClassification": classification_loss,
    "ForQuestionAnswering": question_answering_loss,
}
"""The loss of one example, by a model's ``loss_type``; encoder-decoder models that generate take `seq2seq_loss`."""


class PrivateTrainer(Trainer):
    """`transformers.Trainer` with differentially private steps.

        trainer = PrivateTrainer(model, args, train_dataset=train, eval_dataset=test, epsilon=3, delta=1e-5)
        trainer.train()

    The loop, its arguments, callbacks, evaluation, saving and resuming are those of `Trainer`. A step of it is a
    logical step: ``per_device_train_batch_size * gradient_accumulation_steps`` (times the processes) is the expected
    number of examples, and ``per_device_train_batch_size`` the most that go through the model at once.

    - Other trainers take private steps the same way: ``class PrivateSeq2SeqTrainer(PrivateTrainer, Seq2SeqTrainer)``.
    - Arguments that cannot be kept, such as fp16, are refused by name when the trainer is made.
    - The logs have epsilon, the threshold tau, and the norm of the released gradient. They have no training loss,
      which is raw, unless ``log_raw_loss=True``.
    - A checkpoint folder has one more file, ``private_training.pt``. It holds the seeds with which the noise could be
      subtracted, until the run is complete: keep it as secret as the data.

    Args:
        *args: The arguments of `Trainer`. ``compute_loss_func`` must return one loss per example, [B].
        epsilon: The privacy budget of a call of `train`. Exactly one of ``epsilon`` and ``noise_multiplier``.
        delta: By default 1 / (10 examples).
        noise_multiplier: The noise of gradient and counts together.
        accountant: "pld" (tight) or "rdp".
        dataset_size: A public stand-in for the number of examples (`qclip.make_private`).
        threshold: The clip norm, or how to learn it.
        groups: The parameters that are clipped together.
        rescale_to_unit_norm: Whether to divide the released gradient by the clip norm.
        per_example_loss: ``f(model, batch)`` that returns one loss per example, [B]. By default the loss that the class
            of the model computes, with a mean over each example's own labels.
        physical_batch_size: The most examples that go through the model at once; by default
            ``per_device_train_batch_size``.
        compile: Whether to compile each physical batch: True, or a mode of torch.compile.
        data_independent_buffers: Patterns of buffers that a forward pass may change.
        log_raw_loss: Whether to log the training loss as ``raw_loss``. Epsilon does not cover such a log.
        privacy_seed: The seed of sampling and noise. Leave it out except in tests: ``args.seed`` is not used for it,
            because whoever knows it can subtract the noise.
        **kwargs: The arguments of `Trainer`.

    Raises:
        qclip.Refusal: For arguments that contradict private steps, by name.
    """

    def __init__(
        self,
        *args: Any,
        epsilon: float | None = None,
        delta: float | None = None,
        noise_multiplier: float | None = None,
        accountant: Accountant = "pld",
        dataset_size: int | None = None,
        threshold: Threshold[Any] = BalancedThreshold(),  # noqa: B008 - immutable
        groups: GroupSpec = "flat",
        rescale_to_unit_norm: bool = False,
        per_example_loss: Callable[[nn.Module, Any], Tensor] | None = None,
        physical_batch_size: int | None = None,
        compile: bool | str = False,
        data_independent_buffers: Sequence[str] = (),
        log_raw_loss: bool = False,
        privacy_seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if (epsilon is None) == (noise_multiplier is None):
            raise check.Refusal(
                f"exactly one of epsilon and noise_multiplier must be given, not epsilon = {epsilon!r} and "
                f"noise_multiplier = {noise_multiplier!r}: pass the privacy budget, such as epsilon=3, delta=1e-5"
            )
        self.training: PrivateTraining | None = None
        """The private run of the last call of `train`, with its history and its plan; None before the first."""
        _refuse_unsupported(self)
        given = self.args
        per_process = given.per_device_train_batch_size
        self._batch_size = per_process * given.gradient_accumulation_steps * given.world_size
        if physical_batch_size is None and threshold.raw_access != "batch":
            physical_batch_size = per_process
        if given.max_grad_norm != type(given).max_grad_norm:
            log.warning(
                "max_grad_norm = %g is not used: every example is clipped by itself, at the norm that threshold= "
                "chooses (threshold=qclip.Constant(%g) for a fixed one)",
                *(given.max_grad_norm, given.max_grad_norm),
            )
        # The loop of Trainer sees one batch for each logical step, and gradients that are clipped already.
        self.args = copy.copy(given)
        self.args.gradient_accumulation_steps, self.args.max_grad_norm = 1, 0.0
        self.data_collator = _with_few_lengths(self.data_collator, self.processing_class, self.model)
        self._loss = _per_example_loss(self, per_example_loss)
        self._privacy: dict[str, Any] = {
            "epsilon": epsilon,
            "delta": delta,
            "noise_multiplier": noise_multiplier,
            "accountant": accountant,
            "dataset_size": dataset_size,
            "threshold": threshold,
            "groups": groups,
            "rescale_to_unit_norm": rescale_to_unit_norm,
            "physical_batch_size": physical_batch_size,
            "compile": compile,
            "data_independent_buffers": data_independent_buffers,
            "seed": privacy_seed,
        }
        self._log_raw_loss = log_raw_loss
        self._folder: str | None = None  # of the checkpoint that train() resumes from
        self._pass: Iterator[Any] | None = None
        self._random: RandomState | None = None

    def epsilon(self) -> float:
        """Return the epsilon spent by the last call of `train`, for the steps taken so far; 0 before the first."""
        return 0.0 if self.training is None else self.training.epsilon()

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, or go on from a checkpoint of `PrivateTrainer` as the run that would have been."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        self._folder = resume_from_checkpoint if isinstance(resume_from_checkpoint, str) else None
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: the budget of each trial would be spent on the same data."""
        raise check.Refusal(
            "hyperparameter_search is not private: every trial spends the whole epsilon again, and the epsilons add "
            "up; choose the settings on public data, or make a PrivateTrainer for each trial and add their epsilons"
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader with one empty batch for each logical step of an epoch: `training_step` fetches the data."""
        prepared = super().get_train_dataloader()
        # Without the sampler, which private steps replace.
        self._source = DataLoader(prepared.dataset, **{name: getattr(prepared, name) for name in KEPT})
        size = self._privacy["dataset_size"] or examples_in(self._source)
        if self._batch_size > size:
            raise check.Refusal(
                f"the expected batch size {self._batch_size} (per_device_train_batch_size * "
                f"gradient_accumulation_steps * processes) must be at most the {size} examples; lower one of them"
            )
        return _Steps(steps_per_epoch(self._batch_size / size))

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> Any:
        """Create the scheduler, and the private run: model, optimizer and number of steps are settled by now."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if self.is_in_train:
            self._start(num_training_steps)
        return scheduler

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Clip the examples of a logical step, physical batch by physical batch, and release their noisy gradient."""
        training, optimizer = self.training, self.optimizer
        if training is None:
            raise check.Refusal(
                "the private run was not made: let create_scheduler call super().create_scheduler, which makes it"
            )
        model.train()
        if callable(switch := getattr(optimizer, "train", None)):
            switch()  # of a schedule-free optimizer
        total, count = 0.0, 0
        with self._own_random_numbers():
            if self._pass is None:
                self._pass = iter(training.loader)
            for batch in self._pass:
                ticket = training.loader.tickets.front
                assert ticket is not None
                loss = training.loss(batch)
                loss.backward()
                total, count = total + loss.item() * ticket.num_slots, count + ticket.num_examples
                if training.updated:
                    break
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            torch.cuda.empty_cache()
        return torch.tensor(total / max(count, 1), device=self.args.device)

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Return the number of examples behind a loader."""
        return examples_in(self._source) if isinstance(dataloader, _Steps) else super().num_examples(dataloader)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the expected number of examples of a logical step."""
        return self._batch_size

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: the exact number would tell how many examples were drawn."""
        return 0

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log released values: epsilon and the threshold, but the raw training loss only with ``log_raw_loss``."""
        training = self.training
        if training is not None and logs.keys() & {"loss", "train_loss"}:
            at_end = "train_loss" in logs
            raw_loss = logs.pop("train_loss" if at_end else "loss")
            if self._log_raw_loss:
                logs["raw_loss"] = raw_loss
            epsilon = training.epsilon() if at_end else training.epsilon_curve(len(training.history))
            logs |= {"epsilon": epsilon}
            if training.history:
                logs |= released_norms(training, training.history[-1])
        super().log(logs, *args, **kwargs)

    def _start(self, num_steps: int) -> None:
        model: Any = self.model
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # torch's own, in that of accelerate
        self._pass = self._random = None
        self.training = make_private(
            model,
            optimizer,
            self._source,
            per_example_loss=self._loss,
            batch_size=self._batch_size,
            steps=num_steps,
            **self._privacy,
        )
        if self._folder is not None:
            self._load(self._folder)

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Go on with the random numbers where the last step left off, whatever was drawn in between.

        An evaluation or a callback after a checkpoint would otherwise change the dropout of the next step. Resumed
        from that checkpoint, the step would be released again with the same noise and another sum.
        """
        outside = RandomState.now()
        if self._random is not None:
            self._random.restore()
        try:
            yield
        finally:
            self._random = RandomState.now()
            outside.restore()

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        # Written first: a checkpoint that is complete for Trainer has it.
        if self.training is not None and not self.args.save_only_model:
            with self._own_random_numbers():
                state = self.training.state_dict()
            if self.args.should_save:
                folder = os.path.join(self._get_output_dir(trial=None), f"checkpoint-{self.state.global_step}")
                os.makedirs(folder, exist_ok=True)
                checkpoint.write(os.path.join(folder, STATE_FILE), {"training": state})
        super()._save_checkpoint(*args, **kwargs)

    def _load(self, folder: str) -> None:
        assert self.training is not None
        path = os.path.join(folder, STATE_FILE)
        if not os.path.isfile(path):
            raise check.Refusal(
                f"{folder} has no {STATE_FILE}: it was not written by PrivateTrainer, or with save_only_model=True; "
                "start a new run from its weights with from_pretrained, whose epsilon adds to that of the old run"
            )
        state = checkpoint.read(path)["training"]
        steps = len(state["history"])
        if steps != self.state.global_step:
            raise check.Refusal(
                f"{path} has {steps} steps, and trainer_state.json beside it {self.state.global_step}: the folder is "
                "a mixture; take another checkpoint"
            )
        self.training.load_state_dict(state)
        self._random = RandomState.now()

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Leave the released gradients alone: they are clipped, and a change would be refused."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        """Return the norm of the released gradient."""
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return float(nn.utils.get_total_norm(grads))


class _Steps(DataLoader[Any]):
    """The logical steps of an epoch, as a loader of empty batches that Trainer can count and skip."""

    def __init__(self, num_steps: int) -> None:
        steps: Any = range(num_steps)
        super().__init__(steps, collate_fn=_nothing, generator=torch.Generator())  # moves no global generator


def _nothing(_: Sequence[int]) -> dict[str, Any]:
    return {}


def _per_example_loss(trainer: Any, given: Callable[[nn.Module, Any], Tensor] | None) -> Callable[..., Tensor]:
    """Return the loss to clip by, of the arguments or of the model's class."""
    function, smoother = trainer.compute_loss_func, trainer.label_smoother
    for name, value in ("compute_loss_func", function), ("label_smoothing_factor", smoother):
        if given is not None and value is not None:
            raise check.Refusal(f"per_example_loss and {name} both say how to compute the loss; leave one of them out")
    if given is not None:
        return given
    if function is not None:
        return partial(_by_function, function)
    model = trainer.model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    is_known = type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()  # GPT2LMHeadModel names no loss
    loss = LOSSES.get(getattr(base, "loss_type", None) or ("ForCausalLM" if is_known else ""))
    if loss is causal_lm_loss and base.config.is_encoder_decoder:
        loss = seq2seq_loss
    if loss is None:
        raise check.Refusal(
            f"the loss of one example of {type(base).__name__} is not known (it is for models {', '.join(LOSSES)}): "
            "pass per_example_loss=f, where f(model, batch) returns one loss per example, [B]"
        )
    if smoother is None:
        return loss
    if loss is question_answering_loss:
        raise check.refuse("label_smoothing_factor", smoother.epsilon, "0 for positions of answers", "leave it out")
    return partial(loss, label_smoothing=smoother.epsilon)


def _by_function(function: Callable[..., Tensor], model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    outputs = model(**{name: value for name, value in batch.items() if name != "labels"})
    return function(outputs, batch.get("labels"), num_items_in_batch=None)


def _with_few_lengths(collate: Any, tokenizer: Any, model: Any) -> Any:
    """Return a collate function that pads to multiples of a length where it would pad to the longest text.

    A batch of a new length has to be proven, which takes as long as many steps. Padding is masked, so it changes
    nothing else.
    """
    pads_to_longest = getattr(collate, "padding", True) in (True, "longest")
    if not (hasattr(collate, "pad_to_multiple_of") and collate.pad_to_multiple_of is None and pads_to_longest):
        return collate
    longest = [
        getattr(getattr(collate, "tokenizer", tokenizer), "model_max_length", None),
        getattr(getattr(model, "config", None), "max_position_embeddings", None),
    ]
    apart = math.gcd(LENGTHS_APART, min((each for each in longest if each is not None), default=0))
    collate = copy.copy(collate)
    collate.pad_to_multiple_of = apart
    log.info("%s pads to multiples of %d tokens: each new length costs a proof", type(collate).__name__, apart)
    return collate


def _refuse_unsupported(trainer: Any) -> None:
    """Refuse, by name, arguments that private steps cannot keep."""
    args, model, data = trainer.args, trainer.model, trainer.train_dataset
    checkpointing = (args.gradient_checkpointing and args.gradient_checkpointing_kwargs) or {}
    sharding = "leave it out; launch with torchrun to train on several processes, each with the whole model"
    refused = {
        "fp16": (args.fp16, "its range is too small for gradients without a loss scale; take bf16=True"),
        "deepspeed": (trainer.is_deepspeed_enabled, sharding),
        "fsdp": (trainer.is_fsdp_enabled or args.fsdp, f"{sharding}, or fully_shard with qclip.make_private"),
        "parallelism_config": (args.parallelism_config, sharding),
        "n_gpu": (
            args.n_gpu > 1 and args.n_gpu,
            "DataParallel splits the batch unseen; launch with torchrun, or set CUDA_VISIBLE_DEVICES to one GPU",
        ),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "a run that starts again spends its budget again; lower per_device_train_batch_size and raise "
            "gradient_accumulation_steps, which keeps the expected batch",
        ),
        "torch_compile": (args.torch_compile, "pass compile=True to the trainer, which compiles the whole step"),
        "use_liger_kernel": (args.use_liger_kernel, "its kernels hide the examples; pass compile=True instead"),
        "neftune_noise_alpha": (args.neftune_noise_alpha, "the clipped sum gets noise already; leave it out"),
        "train_sampling_strategy": (
            args.train_sampling_strategy not in ("random", None) and args.train_sampling_strategy,
            "examples are drawn independently, as epsilon requires; leave it out",
        ),
        "include_num_input_tokens_seen": (
            args.include_num_input_tokens_seen != "no" and args.include_num_input_tokens_seen,
            "the number of tokens drawn is not released; leave it out",
        ),
        "hub_strategy": (
            args.push_to_hub and "checkpoint" in args.hub_strategy and str(args.hub_strategy),
            "a checkpoint holds the seeds of the noise; take 'end' or 'every_save'",
        ),
        "enable_jit_checkpoint": (args.enable_jit_checkpoint, "it saves in the middle of a step; set save_steps"),
        "optim": (
            ("lomo" in args.optim or "layerwise" in args.optim) and str(args.optim),
            "it applies raw gradients during the backward pass; take one that steps afterwards, such as 'adamw_torch'",
        ),
        "use_reentrant": (checkpointing.get("use_reentrant"), "pass gradient_checkpointing_kwargs without it"),
        "split_batches": (args.accelerator_config.split_batches, "leave it out: the batch is that of all processes"),
        "dispatch_batches": (args.accelerator_config.dispatch_batches, "leave it out: each process draws its share"),
        "padding_free": (
            getattr(trainer.data_collator, "padding_free", False)
            or "Flattening" in type(trainer.data_collator).__name__,
            "rows that hold several examples cannot be clipped for each of them; pad instead",
        ),
        "quantization": (getattr(model, "is_loaded_in_8bit", False), "load the model in bfloat16"),
    }  # fmt: skip
    for name, (value, remedy) in refused.items():
        if value:
            raise check.Refusal(f"{name} = {value!r} is refused by PrivateTrainer: {remedy}")
    if data is not None and (isinstance(data, IterableDataset) or not has_length(data)):
        raise check.Refusal(
            f"train_dataset = {type(data).__name__} is refused by PrivateTrainer: examples of a stream cannot be drawn "
            "independently; load it as a data set with a length and indices"
        )
    own = type(trainer).__mro__.index(PrivateTrainer)
    for each in type(trainer).__mro__[:own]:
        if "compute_loss" in vars(each):
            raise check.Refusal(
                f"{each.__name__}.compute_loss is refused by PrivateTrainer: private steps need one loss per example; "
                "pass per_example_loss=f, where f(model, batch) returns [B] (compute_loss would serve evaluation only)"
            )
