"""Names that other libraries give to arguments of `make_private`, and what to write instead."""

import difflib
from collections.abc import Collection, Mapping
from typing import Any, Final

from qclip._validate import Refusal

_CLIP_NORM: Final = (
    "threshold=qclip.Constant(1.0) for a clip norm of 1, or nothing: by default the clip norm is learnt, at little cost"
)
_QUANTILE: Final = "threshold=qclip.PrivateQuantile(0.7), or nothing: by default the clip norm is learnt"
_ALWAYS_POISSON: Final = 'nothing: batches are Poisson samples wherever there is noise (sampling="uniform" without)'
_OWN_CHOICE: Final = "nothing: the engine chooses for each layer, and refuses what it cannot prove"

MEANINGS: Final[Mapping[str, str]] = {
    # Opacus
    "module": "model=",
    "data_loader": "dataset=, a data set or the DataLoader",
    "criterion": "loss=",
    "target_epsilon": "epsilon=",
    "target_delta": "delta=",
    "max_grad_norm": _CLIP_NORM,
    "poisson_sampling": _ALWAYS_POISSON,
    "clipping": 'groups="flat" or groups="per-layer"; for "adaptive", nothing: the clip norm is learnt by default',
    "grad_sample_mode": _OWN_CHOICE,
    "loss_reduction": "nothing: clipped gradients are summed, and divided by the expected batch size once",
    "batch_first": "nothing: where the examples are is found and proven",
    "max_physical_batch_size": "physical_batch_size=",
    "expected_batch_size": "batch_size=",
    "sample_rate": "batch_size=, the sample rate times the number of examples",
    "noise_generator": "nothing: noise has a generator of its own, which no seed of torch's predicts",
    "secure_mode": "nothing: noise is always drawn from a secret key and rounded to a public grid",
    "alphas": 'accountant="rdp"',
    "target_unclipped_quantile": _QUANTILE,
    "clipbound_learning_rate": _QUANTILE,
    "min_clipbound": _QUANTILE,
    "max_clipbound": _QUANTILE,
    "unclipped_num_std": _QUANTILE,
    # TensorFlow Privacy, JAX Privacy and others
    "l2_norm_clip": _CLIP_NORM,
    "l2_clip_norm": _CLIP_NORM,
    "clip_norm": _CLIP_NORM,
    "clipping_norm": _CLIP_NORM,
    "max_norm": _CLIP_NORM,
    "num_microbatches": "nothing: every example is clipped by itself; examples of several rows have rows_per_example=",
    "microbatch_size": "physical_batch_size=",
    "sigma": "noise_multiplier=",
    "noise_scale": "noise_multiplier=",
    "num_epochs": "epochs=",
    "num_train_epochs": "epochs=",
    "num_steps": "steps=",
    "total_steps": "steps=",
    "max_steps": "steps=",
    # Training loops
    "data": "dataset=",
    "dataloader": "dataset=, a data set or the DataLoader",
    "train_loader": "dataset=, a data set or the DataLoader",
    "train_dataset": "dataset=",
    "loss_fn": "loss=",
    "learning_rate": "the learning rate of the optimizer, or step_size=",
    "lr": "the learning rate of the optimizer, or step_size=",
    "accumulation_steps": "a larger batch_size= with physical_batch_size=",
    "gradient_accumulation_steps": "a larger batch_size= with physical_batch_size=",
}
"""What to write for a name of another library."""


def refuse(given: Mapping[str, Any], own: Collection[str]) -> None:
    """Refuse arguments that `make_private` does not have, if there are any.

    Args:
        given: The unknown arguments.
        own: The names of its arguments.
    """
    named = [f"{name}=: write {MEANINGS[name]}" for name in given if name in MEANINGS]
    if named:
        raise Refusal("make_private has other names for what other libraries call " + "; ".join(named))
    for name in given:
        close = difflib.get_close_matches(name, own, n=1)
        hint = f"; did you mean {close[0]}=?" if close else ""
        raise TypeError(f"make_private() got an unexpected keyword argument {name!r}{hint}")
