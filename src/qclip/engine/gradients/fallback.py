"""Fallbacks for functions without a rule.

They are, in this order: vmap of the site's vjp, vmap of the whole model's gradient, and one example at a time.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from qclip.engine import batch as batches
from qclip.engine.gradients.layouts import Layout
from qclip.engine.gradients.sites import Call, Site, results_of
from qclip.engine.randomness import RandomState


@contextmanager
def _replayed(state: RandomState | None) -> Iterator[None]:
    """Replay the random numbers of the call, and silence vmap's warning that an operation is slow.

    Attention runs unfused: vmap of a GPU's fused kernels refuses a mask without a batch dimension.
    """
    again = state.replayed() if state is not None else nullcontext()
    with warnings.catch_warnings(), again, sdpa_kernel(SDPBackend.MATH):
        warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
        yield


def carriers(call: Call, layout: Layout, batch_size: int, dims: int | None) -> list[Tensor]:
    """Return the call's tensors that hold examples; with ``dims`` only those with that number of dimensions."""
    return [
        x
        for x, _ in call.versions
        if id(x) not in call.fixed and layout.holds(x, batch_size) and (dims is None or x.dim() == dims)
    ]


def site_gradients(
    site: Site, layout: Layout, grads: Sequence[Tensor], carrying: list[Tensor], batch_size: int
) -> dict[int, Tensor]:
    """Compute each source's per-example gradients by vmap of the site's vjp.

    Args:
        site: The site.
        layout: The layout of its examples.
        grads: The gradients of its outputs.
        carrying: The tensors that hold examples (`carriers`).
        batch_size: B.

    Returns:
        The gradients [B, *shape], by the id of the tensor that stands for the source in the call.
    """
    function = _example_function(site, carrying)
    sources = site.call.source_tensors

    def one(data: list[Tensor], cotangents: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        pull_back = torch.func.vjp(lambda *values: function(data, values), *sources)[1]
        return pull_back(cotangents)

    data = [layout.by_example(x, batch_size) for x in carrying]
    cotangents = tuple(layout.by_example(grad, batch_size) for grad in grads)
    with _replayed(site.random_state):
        source_grads = torch.vmap(one, randomness="different")(data, cotangents)
    return {id(x): grad for x, grad in zip(sources, source_grads, strict=True)}


def replay_agrees(site: Site, layout: Layout, carrying: list[Tensor], batch_size: int) -> bool:
    """Return whether the call, run again example by example with the same random numbers, gives the same output."""
    assert site.value is not None
    function = _example_function(site, carrying)
    sources = site.call.source_tensors
    data = [layout.by_example(x, batch_size) for x in carrying]
    with _replayed(site.random_state), torch.no_grad():
        again = torch.vmap(lambda data: function(data, sources)[0], randomness="different")(data)
    value = layout.by_example(site.value, batch_size)
    return again.shape == value.shape and close(again, value)


def close(a: Tensor, b: Tensor, *, rough: bool = False) -> bool:
    """Return whether the tensors are equal up to rounding (``rough``: to 16 bits), and finite in the same places."""
    tolerance = 1e-4 if a.dtype in (torch.float32, torch.float64) and not rough else 3e-2
    is_finite = a.isfinite() & b.isfinite()
    same = (a.isfinite() == b.isfinite()).all()
    scale = torch.where(is_finite, b, 0).abs().amax() if b.numel() else torch.zeros(())
    return bool(same & (torch.where(is_finite, a - b, 0).abs() <= tolerance * (scale + 1e-30)).all())


def _example_function(
    site: Site, carrying: list[Tensor]
) -> Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, ...]]:
    """Return the call as a function of its example-wise tensors and its sources, with its differentiable outputs."""
    call = site.call
    places = {id(x): ("data", k) for k, x in enumerate(carrying)}
    places.update({id(x): ("source", k) for k, x in enumerate(call.source_tensors)})

    def run(data: Sequence[Tensor], sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
        values = {"data": data, "source": sources}

        def fill(x: Tensor) -> Tensor:
            kind, k = places.get(id(x), ("", 0))
            x = values[kind][k] if kind else x
            return x if site.cast_to is None or not x.is_floating_point() else x.to(site.cast_to)

        # vmap does not support every function that autocast does, so the casts happen here.
        with torch.autocast(call.versions[0][0].device.type, enabled=False):
            args, kwargs = call.with_tensors([fill(x) for x, _ in call.versions])
            results = results_of(call.function, args, call.function(*args, **kwargs))
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
    """Compute losses and per-example gradients by vmap over the whole evaluation.

    Args:
        model: The model.
        evaluate: Runs the model on a batch and returns one loss per example.
        batch: The batch.
        batch_size: B.
        names: The parameters to differentiate.
        state: The random numbers of the forward pass.

    Returns:
        The losses [B] and the gradients [B, *shape] by name.
    """
    parameters = dict(model.named_parameters())
    chosen = {name: parameters[name].detach() for name in names}
    leaves, structure = pytree.tree_flatten(batch)
    carrying = [k for k, leaf in enumerate(leaves) if batches.is_example_wise(leaf, batch_size)]

    def loss_of_one(values: dict[str, Tensor], rows: list[Tensor]) -> Tensor:
        example = list(leaves)
        for k, row in zip(carrying, rows, strict=True):
            example[k] = row
        with substituted(model, values):
            return evaluate(pytree.tree_unflatten(example, structure)).sum()

    rows = [leaves[k].unsqueeze(1) for k in carrying]
    with _replayed(state):
        gradient = torch.func.grad_and_value(loss_of_one)
        grads, losses = torch.vmap(gradient, in_dims=(None, 0), randomness="different")(chosen, rows)
    return losses, grads


def one_by_one_gradients(
    evaluate: Callable[[Any], Tensor],
    batch: Any,
    is_counted: Tensor,
    parameters: Mapping[str, Tensor],
    draws: Callable[[int], AbstractContextManager[None]],
    *,
    in_copies: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute losses and per-example gradients by autograd, one example at a time.

    Guarantees:

    - The gradient of an example depends on no other example, whatever the model does: it never runs together with one.

    Args:
        evaluate: Runs the model on a batch and returns one loss per example.
        batch: The batch.
        is_counted: Which examples are wanted, [B]; others get zeros.
        parameters: The parameters to differentiate, by name.
        draws: Returns a context with the random numbers of an example, by its index.
        in_copies: Whether an example runs in a batch of B copies of itself, so that its row of the batch gets the same
            random numbers as before; otherwise it runs alone.

    Returns:
        The losses [B] and the gradients [B, *shape] by name.
    """
    batch_size = len(is_counted)
    chosen = list(parameters.values())
    losses: list[Tensor] = []
    grads: list[list[Tensor]] = [[] for _ in chosen]
    for i, counts in enumerate(is_counted.tolist()):
        if not counts:
            losses.append(torch.zeros((), device=is_counted.device))
            gradients: Sequence[Tensor | None] = [None] * len(chosen)
        else:
            index = torch.full((batch_size if in_copies else 1,), i)
            with draws(i):
                own = evaluate(batches.select(batch, index, batch_size))
                if own.shape != index.shape:
                    raise ValueError(f"its loss has shape {list(own.shape)}, not {list(index.shape)}")
                loss = own[i if in_copies else 0]
                gradients = torch.autograd.grad(loss, chosen, allow_unused=True)
            losses.append(loss.detach())
        for found, gradient, parameter in zip(grads, gradients, chosen, strict=True):
            found.append(torch.zeros_like(parameter) if gradient is None else gradient.detach().to_dense())
    return torch.stack(losses), {name: torch.stack(found) for name, found in zip(parameters, grads, strict=True)}


@contextmanager
def substituted(model: nn.Module, substitutes: Mapping[str, Tensor]) -> Iterator[None]:
    """Put other tensors in the place of the named parameters and buffers, wherever the model holds them.

    On exit every module is as it was, attributes included: a forward pass may leave something there that was made from
    the substitutes, such as a cached table. (`torch.func.functional_call` does not restore a module that is registered
    in two places.)
    """
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    substitute = {id(own[name]): x for name, x in substitutes.items()}
    modules = list(model.modules())  # each once, however many names it has
    attributes = [(vars(module), dict(vars(module))) for module in modules]
    # A scripted module has no dicts here, and refuses to be written to: only what changes is written.
    registries: list[Any] = [registry for module in modules for registry in (module._parameters, module._buffers)]
    registered = [(registry, dict(registry.items())) for registry in registries]
    try:
        for registry, before in registered:
            for name, x in before.items():
                if id(x) in substitute:
                    registry[name] = substitute[id(x)]
        for current, before in attributes:
            if isinstance(flat := before.get("_flat_weights"), list):  # recurrent layers have a list of their own
                current["_flat_weights"] = [substitute.get(id(x), x) for x in flat]
        yield
    finally:
        for current, before in attributes:
            current.clear()
            current.update(before)
        for registry, before in registered:
            for name in [name for name in registry.keys() if name not in before]:  # noqa: SIM118
                del registry[name]
            for name, x in before.items():
                if name not in registry or registry[name] is not x:
                    registry[name] = x
