"""Totals: the unclipped sums of the contributions must be autograd's gradients."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from qclip._validate import Refusal
from qclip.engine.gradients.clipping import squared_norms, sum_dtype, weighted_sum
from qclip.engine.gradients.parts import Parts
from qclip.engine.gradients.sites import Site


def plain_gradients(losses: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return autograd's gradients of the sum of the losses; the graph is retained."""
    grads = torch.autograd.grad([losses.sum()], list(parameters.values()), retain_graph=True, allow_unused=True)
    pairs = zip(parameters.items(), grads, strict=True)
    return {name: torch.zeros_like(p) if grad is None else grad.to_dense() for (name, p), grad in pairs}


def require_totals(
    parts: Parts,
    expected: Mapping[str, Tensor],
    sites: Sequence[Site],
    parameters: Mapping[str, Tensor],
    batch_size: int,
) -> None:
    """Refuse contributions whose sums are not autograd's: the last check against a wrong rule or a wrong capture.

    Args:
        parts: The contributions by parameter.
        expected: Autograd's gradients (`plain_gradients`).
        sites: The sites, for the tolerance and the message.
        parameters: The trainable parameters by name.
        batch_size: B.
    """
    tolerance, overall = (3e-2, 3e-3) if any(map(is_rough, sites)) else (1e-4, 1e-6)
    # Some gradients are zero but for rounding, such as those of the keys' biases in attention.
    noise = overall * float(sum(torch.linalg.vector_norm(grad) for grad in expected.values()))
    for name, grad in expected.items():
        contributions = parts[name]
        ones = grad.new_ones(batch_size, dtype=sum_dtype(grad))
        total = weighted_sum(name, contributions, ones, None, parameters)
        difference = torch.linalg.vector_norm(total - grad.to(total.dtype))
        if bool(difference <= tolerance * torch.linalg.vector_norm(grad) + noise):
            continue
        # The contributions of the examples may be much larger than their sum.
        squares = squared_norms(contributions).norms if contributions else ones.new_zeros(1)
        if bool(difference > tolerance * (squares.sqrt().sum() + torch.linalg.vector_norm(grad)) + noise):
            functions = ", ".join(sorted({str(site) for site in sites if name in site.parameters}))
            raise Refusal(
                f"the gradients of {name!r} do not add up to autograd's: a rule for {functions or 'it'} is wrong, or "
                "the model does something that the engine does not see; compare with qclip.engine.oracle"
            )


def is_rough(site: Site) -> bool:
    """Return whether autograd rounds to 16 bits between the site and the parameters."""
    sources = list(site.call.sources.values())
    dtypes = {x.dtype for x, _ in site.call.versions}
    while sources:
        source = sources.pop()
        dtypes.add(source.dtype)
        sources.extend(source.parents)
    return site.cast_to is not None or not dtypes.isdisjoint((torch.bfloat16, torch.float16))
