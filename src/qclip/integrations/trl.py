"""TRL's `SFTTrainer` with differentially private steps, for completions and chats: `PrivateSFTTrainer`."""

from typing import Any

from qclip import _validate as check
from qclip.integrations.transformers.trainer import PrivateTrainer

try:
    from trl import SFTTrainer
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("trl is not installed; pip install 'qclip[trl]'") from missing

__all__ = ["PrivateSFTTrainer"]


class PrivateSFTTrainer(PrivateTrainer, SFTTrainer):
    """`trl.SFTTrainer` with differentially private steps.

        trainer = PrivateSFTTrainer(model, SFTConfig("out"), train_dataset=chats, peft_config=lora, epsilon=8)
        trainer.train()

    `SFTTrainer` prepares the data and the model: chat templates, prompts and completions
    (``completion_only_loss``), answers only (``assistant_only_loss``), adapters (``peft_config``). Steps, logs and
    checkpoints are those of `qclip.integrations.transformers.PrivateTrainer`. An example is a row of the data set: a
    text, a prompt with its completion, or a whole chat.

    Args:
        model: A causal language model, or the name of one.
        args: An `SFTConfig`. Without packing, padding-free batches, activation offloading, and with the loss "nll".
        *others: Further arguments of `SFTTrainer`.
        **kwargs: Those of `SFTTrainer`, and ``epsilon`` and the other private ones of `PrivateTrainer`.

    Raises:
        qclip.Refusal: For arguments that contradict private steps, by name.
    """

    def __init__(self, model: Any, args: Any = None, *others: Any, **kwargs: Any) -> None:
        _refuse_unsupported(args)
        super().__init__(model, args, *others, **kwargs)


def _refuse_unsupported(args: Any) -> None:
    packed = "an example has to be a row of its own: leave it out, texts are padded"
    refused = {
        "packing": packed,
        "padding_free": packed,
        "activation_offloading": "pass gradient_checkpointing=True to save memory",
    }
    for name, remedy in refused.items():
        if getattr(args, name, False):
            raise check.Refusal(f"{name} = True is refused by PrivateSFTTrainer: {remedy}")
    loss_type = getattr(args, "loss_type", "nll")
    if loss_type != "nll":
        raise check.refuse("loss_type", loss_type, "'nll'", "for another loss of one example pass per_example_loss=")
