"""Attention whose scores have a trained bias, such as of relative positions: products, an addition and a softmax."""

import torch.nn.functional as F
from torch import Tensor


def biased_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute ``F.scaled_dot_product_attention`` in parts, of which the addition of the bias has a rule.

    A position that may attend to nothing gets zeros, and dropout draws what it draws in torch's own function.

    Raises:
        NotImplementedError: If there is no bias with a gradient.
    """
    if attn_mask is None or not attn_mask.requires_grad or is_causal or enable_gqa:
        raise NotImplementedError
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale) + attn_mask
    is_cut_off = scores.isneginf().all(-1, keepdim=True)
    shares = scores.masked_fill(is_cut_off, 0).softmax(-1).masked_fill(is_cut_off, 0)
    return (F.dropout(shares, dropout_p) if dropout_p else shares) @ value
