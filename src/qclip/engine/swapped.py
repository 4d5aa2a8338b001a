"""Running a model on other tensors than its own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def swapped(model: nn.Module, others: Mapping[str, Tensor]) -> Iterator[None]:
    """Other tensors in place of the named parameters and buffers, wherever the model holds these.

    Then every module is as it was, attributes included: what a forward pass leaves there, such as a cached table, is
    made of the others. (`torch.func.functional_call` leaves them in a module that is registered in two places.)
    """
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    instead = {id(own[name]): other for name, other in others.items()}
    modules = list(model.modules())  # each once, however many names it has
    attributes = [(vars(module), dict(vars(module))) for module in modules]
    # Of a scripted module these are no dicts, and what is not swapped cannot be written there.
    holders: list[Any] = [held for module in modules for held in (module._parameters, module._buffers)]
    tensors = [(held, dict(held.items())) for held in holders]
    try:
        for held, before in tensors:
            for name, x in before.items():
                if id(x) in instead:
                    held[name] = instead[id(x)]
        for now, before in attributes:
            if isinstance(flat := before.get("_flat_weights"), list):  # recurrent layers have a list of their own
                now["_flat_weights"] = [instead.get(id(x), x) for x in flat]
        yield
    finally:
        for now, before in attributes:
            now.clear()
            now.update(before)
        for held, before in tensors:
            for name in [name for name in held.keys() if name not in before]:  # noqa: SIM118
                del held[name]
            for name, x in before.items():
                if name not in held or held[name] is not x:
                    held[name] = x
