"""Fallbacks, for what has no rule: vmap of the site's own vjp, then vmap of the whole model's gradient."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from qclip.engine import batch as batches
from qclip.engine.gradients.layouts import Layout
from qclip.engine.gradients.sites import Call, Site, tensors
from qclip.engine.randomness import RandomState
from qclip.engine.swapped import swapped


@contextmanager
def _replayed(state: RandomState | None) -> Iterator[None]:
    """The random numbers of the call again, and no warning of vmap's that an operation is slow.

    Attention is computed step by step: vmap of a GPU's fused kernels refuses a mask that belongs to no example.
    """
    again = state.replayed() if state is not None else nullcontext()
    with warnings.catch_warnings(), again, sdpa_kernel(SDPBackend.MATH):
        warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
        yield


def carriers(call: Call, layout: Layout, batch_size: int, dims: int | None) -> list[Tensor]:
    """The call's tensors that hold examples; with ``dims`` only those with so many dimensions."""
    return [
        x
        for x, _ in call.versions
        if id(x) not in call.fixed and layout.holds(x, batch_size) and (dims is None or x.dim() == dims)
    ]


def site_gradients(
    site: Site, layout: Layout, grads: Sequence[Tensor], carrying: list[Tensor], batch_size: int
) -> dict[int, Tensor]:
    """Each source's per-example gradient, by the id of the tensor that stands for it in the call: vmap of the vjp."""
    function = _example_function(site, carrying)
    sources = site.call.source_tensors

    def one(data: list[Tensor], cotangents: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        pull_back = torch.func.vjp(lambda *values: function(data, values), *sources)[1]
        return pull_back(cotangents)

    data = [layout.by_example(x, batch_size) for x in carrying]
    cotangents = tuple(layout.by_example(grad, batch_size) for grad in grads)
    with _replayed(site.random_state):
        found = torch.vmap(one, randomness="different")(data, cotangents)
    return {id(x): grad for x, grad in zip(sources, found, strict=True)}


def replay_agrees(site: Site, layout: Layout, carrying: list[Tensor], batch_size: int) -> bool:
    """Whether running the call again, example by example, gives the output it gave: same rows, same random numbers."""
    assert site.value is not None
    function = _example_function(site, carrying)
    sources = site.call.source_tensors
    data = [layout.by_example(x, batch_size) for x in carrying]
    with _replayed(site.random_state), torch.no_grad():
        again = torch.vmap(lambda data: function(data, sources)[0], randomness="different")(data)
    value = layout.by_example(site.value, batch_size)
    return again.shape == value.shape and close(again, value)


def close(a: Tensor, b: Tensor, *, rough: bool = False) -> bool:
    """Equal up to rounding in another order (``rough``: to 16 bits); what is not finite must not be finite in both."""
    tolerance = 1e-4 if a.dtype in (torch.float32, torch.float64) and not rough else 3e-2
    finite = a.isfinite() & b.isfinite()
    same = (a.isfinite() == b.isfinite()).all()
    scale = torch.where(finite, b, 0).abs().amax() if b.numel() else torch.zeros(())
    return bool(same & (torch.where(finite, a - b, 0).abs() <= tolerance * (scale + 1e-30)).all())


def _example_function(
    site: Site, carrying: list[Tensor]
) -> Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, ...]]:
    """The call as a function of its example-wise tensors and of its sources, returning its differentiable outputs."""
    call = site.call
    places = {id(x): ("data", k) for k, x in enumerate(carrying)}
    places.update({id(x): ("source", k) for k, x in enumerate(call.source_tensors)})

    def run(data: Sequence[Tensor], sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
        given = {"data": data, "source": sources}

        def fill(x: Tensor) -> Tensor:
            kind, k = places.get(id(x), ("", 0))
            x = given[kind][k] if kind else x
            return x if site.cast_to is None or not x.is_floating_point() else x.to(site.cast_to)

        # vmap does not know every function that autocast does, so the casts are made here.
        with torch.autocast(call.versions[0][0].device.type, enabled=False):
            args, kwargs = call.with_tensors([fill(x) for x, _ in call.versions])
            results = tensors(call.function(*args, **kwargs))
        return tuple(results[output.position] for output in site.outputs)

    return run


def whole_model_gradients(
    model: nn.Module,
    evaluate: Callable[[Any], Tensor],
    batch: Any,
    batch_size: int,
    names: Sequence[str],
    state: RandomState,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The losses and the named parameters' per-example gradients, by vmap over the whole evaluation."""
    parameters = dict(model.named_parameters())
    wanted = {name: parameters[name].detach() for name in names}
    leaves, structure = pytree.tree_flatten(batch)
    carrying = [k for k, leaf in enumerate(leaves) if batches.is_example_wise(leaf, batch_size)]

    def loss_of_one(values: dict[str, Tensor], rows: list[Tensor]) -> Tensor:
        mine = list(leaves)
        for k, row in zip(carrying, rows, strict=True):
            mine[k] = row
        with swapped(model, values):
            return evaluate(pytree.tree_unflatten(mine, structure)).sum()

    rows = [leaves[k].unsqueeze(1) for k in carrying]
    with _replayed(state):
        gradient = torch.func.grad_and_value(loss_of_one)
        grads, losses = torch.vmap(gradient, in_dims=(None, 0), randomness="different")(wanted, rows)
    return losses, grads
