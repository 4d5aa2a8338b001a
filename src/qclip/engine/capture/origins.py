"""Origins: where the rows of a tensor came from, once indices that depend on data have moved them.

In a mixture of experts rows are sorted by expert, run through grouped products, and put back. The indices that move
them say at every pass which example a row belongs to, so neither the proof nor the gradients have to find out. Rows are
followed from one call to the next by the length of the first dimension. A wrong guess cannot do harm: ownership at the
sites is proven by gradients, with the layouts that come from here.

It is assumed that examples are in front, one row each, or several in a row: ``[B, ...]`` or ``[B T, ...]``.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qclip.engine.capture.invocation import Invocation
from qclip.engine.capture.routing import moved_dimensions

_T = torch.Tensor
_SORTS: Final = {torch.sort, _T.sort, torch.argsort, _T.argsort}
_GATHERS: Final = {_T.__getitem__, torch.index_select, _T.index_select, F.embedding, torch.embedding}
_SELECTIONS: Final = {torch.masked_select, _T.masked_select}
_MASKED_WRITES: Final = {torch.masked_scatter, _T.masked_scatter, _T.masked_scatter_}
_REPEATS: Final = {torch.repeat_interleave, _T.repeat_interleave}
_INDEXED_WRITES: Final = {
    torch.index_add, _T.index_add, _T.index_add_, torch.index_copy, _T.index_copy, _T.index_copy_,
}  # fmt: skip


class _Moved(NamedTuple):
    """A tensor whose rows are not where those of the examples were."""

    tensor: Tensor  # kept alive so that its id stays its own
    origin: Tensor
    """The row that each row was, [S]."""
    length: int
    """The number of rows that there were."""
    owners: Tensor
    """The example of each row, [S]."""
    order: Tensor
    """Indices [S] that put the rows back in their order, as many for each example."""


class Origins:
    """Follows rows through the calls of a forward pass.

    Args:
        batch_size: The number of examples, B.
    """

    def __init__(self, batch_size: int) -> None:
        self.lost = ""
        """A call after which it is not known which rows belong to which example, in words; empty if there is none."""
        self._batch_size = batch_size
        self._moved: dict[int, _Moved] = {}

    def order(self, x: Tensor) -> Tensor | None:
        """Return indices [S] that put a tensor's rows back, example by example; None if they were not moved."""
        moved = self._moved.get(id(x))
        return None if moved is None else moved.order

    def follow(
        self, call: Invocation, results: Sequence[Tensor], is_data: Callable[[Tensor], bool], *, moves: bool
    ) -> str:
        """Follow rows through a call.

        Args:
            call: The call, which has run.
            results: The tensors that it computed.
            is_data: Whether a tensor may depend on data.
            moves: Whether data decide where rows go in it.

        Returns:
            What became of rows that it moved: "home", "moved" or "lost"; empty if it moved none.
        """
        if not results:
            return ""
        if moves and any(0 in dims for _, _, dims in moved_dimensions(call)):
            outcome = self._follow_move(call, results[0])
        elif call.function in _SORTS and call.tensors[0].dim() == 1 and is_data(call.tensors[0]):
            outcome = self._follow_sort(call, results)
        else:
            outcome = self._carry(call, results, is_data)
        if outcome == "lost" and not self.lost:
            self.lost = getattr(call.function, "__name__", "a call")
        return outcome

    # What calls do to rows

    def _follow_move(self, call: Invocation, result: Tensor) -> str:
        """Follow rows that a call moved along the first dimension."""
        if any(isinstance(x, Tensor) for x in call.kwargs.values()):
            return "lost"
        if call.function in _GATHERS:
            return self._follow_gather(call.function, call.args, result)
        if call.function in _REPEATS:
            origin, length = self._origin(call.args[0])
            return self._settle(result, origin.repeat_interleave(call.args[1]), length)
        return _home_if(self._leaves_home(call.function, call.args))

    def _leaves_home(self, function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Return whether a call writes every row over one of its own example, or takes as many from each example."""
        if function in _SELECTIONS:
            return self._is_even(args[0], args[1])
        if function in _MASKED_WRITES:
            return self._is_plain(args[2]) and self._is_even(args[0], args[1], of=args[2].numel())
        if function in _INDEXED_WRITES:
            return self._writes_home(args[0], args[2], args[3])
        return function is _T.__setitem__ and self._sets_home(*args)

    def _follow_gather(self, function: Callable[..., Any], args: tuple[Any, ...], result: Tensor) -> str:
        table, index = _table_and_index(function, args)
        first, *others = index if isinstance(index, tuple) else (index,)
        others = [x for x in others if isinstance(x, Tensor)]
        if not isinstance(first, Tensor) or first.dtype == torch.uint8:
            return "lost"
        origin, length = self._origin(table)
        if first.dtype == torch.bool:
            if others or (first.dim() > 1 and id(table) in self._moved):
                return "lost"
            rows, length = first.flatten().nonzero().flatten(), length * first.shape[1:].numel()
            return self._settle(result, origin[rows] if first.dim() == 1 else rows, length)
        if any(x.dtype == torch.bool or x.dim() > first.dim() for x in others):
            return "lost"
        origin = origin[first.remainder(len(table))]
        if first.dim() == 1:
            return self._settle(result, origin, length)
        return _home_if(result.shape[:1] == origin.shape[:1] and self._is_in_order(origin.flatten(1), length))

    def _follow_sort(self, call: Invocation, results: Sequence[Tensor]) -> str:
        """Follow the values of a sorted vector; its indices lie as these do."""
        origin, length = self._origin(call.tensors[0])
        if length % self._batch_size:
            return ""
        return max((self._settle(x, origin[results[-1]], length) for x in results), key=("home", "moved", "lost").index)

    def _carry(self, call: Invocation, results: Sequence[Tensor], is_data: Callable[[Tensor], bool]) -> str:
        """Follow moved rows through a call that leaves them where they are."""
        moved = [self._moved[id(x)] for x in call.tensors if id(x) in self._moved]
        if not moved:
            return ""
        first = moved[0]
        together = all(m.owners is first.owners or torch.equal(m.owners, first.owners) for m in moved)
        others = [x for x in call.read if id(x) not in self._moved and x.requires_grad and is_data(x)]
        together &= not any(x.shape[:1] == first.owners.shape for x in others)
        outcome = ""
        for x in results:
            if together and x.shape[:1] == first.owners.shape:
                self._moved[id(x)] = first._replace(tensor=x)
                continue
            self._moved.pop(id(x), None)
            if x.requires_grad and any(m.tensor.requires_grad for m in moved):
                outcome = "lost"
        return outcome

    # Rows and examples

    def _origin(self, x: Tensor) -> tuple[Tensor, int]:
        """Return which row each row of a tensor was, and how many rows there were."""
        moved = self._moved.get(id(x))
        return (torch.arange(len(x), device=x.device), len(x)) if moved is None else (moved.origin, moved.length)

    def _settle(self, x: Tensor, origin: Tensor, length: int) -> str:
        """Note where the rows of a tensor came from."""
        self._moved.pop(id(x), None)
        origin = origin.to(x.device)  # an index may lie elsewhere
        if x.shape[:1] != origin.shape or length % self._batch_size or len(origin) % self._batch_size:
            return "lost"
        if self._is_in_order(origin[:, None], length):
            return "home"
        owners = origin // max(1, length // self._batch_size)
        counts = torch.bincount(owners, minlength=self._batch_size)
        if bool((counts != len(origin) // self._batch_size).any()):
            return "lost"
        self._moved[id(x)] = _Moved(x, origin, length, owners, origin.argsort(stable=True))
        return "moved"

    def _is_in_order(self, origin: Tensor, length: int) -> bool:
        """Return whether rows that came from there, [S, *], lie as examples do: as many of each, in a row."""
        if length % self._batch_size or len(origin) % self._batch_size:
            return False
        own = torch.arange(len(origin), device=origin.device) // max(1, len(origin) // self._batch_size)
        return bool((origin // max(1, length // self._batch_size) == own[:, None]).all())

    def _is_even(self, x: Tensor, mask: Tensor, *, of: int | None = None) -> bool:
        """Return whether a mask marks as many elements of each example, and as many in all as there are (``of``)."""
        if not self._is_plain(x) or mask.dtype != torch.bool:
            return False
        counts = mask.expand(x.shape).reshape(self._batch_size, -1).sum(1)
        wanted = counts[0] if of is None or not counts.any() else of // self._batch_size
        return bool((counts == wanted).all())

    def _is_plain(self, x: Any) -> bool:
        """Return whether a tensor has the rows of the examples in front, where they belong."""
        return isinstance(x, Tensor) and id(x) not in self._moved and x.dim() > 0 and len(x) % self._batch_size == 0

    def _writes_home(self, x: Tensor, index: Tensor, values: Any) -> bool:
        """Return whether the rows of ``values`` are written over rows of their own examples."""
        if not self._is_plain(x) or not isinstance(values, Tensor) or values.shape[:1] != index.shape:
            return False
        origin, length = self._origin(values)
        if length % self._batch_size:
            return False
        owners = origin.to(index.device) // max(1, length // self._batch_size)
        return bool((owners == index.remainder(len(x)) // max(1, len(x) // self._batch_size)).all())

    def _sets_home(self, x: Tensor, index: Any, values: Any) -> bool:
        """The same of ``x[index] = values``."""
        first, *others = index if isinstance(index, tuple) else (index,)
        others = [other for other in others if isinstance(other, Tensor) or not _is_whole(other)]
        if not isinstance(first, Tensor) or not isinstance(values, Tensor):
            return False
        if first.dtype != torch.bool:
            are_rows = first.dim() == 1 and all(isinstance(x, Tensor) for x in others)
            return are_rows and self._writes_home(x, first, values)
        marked = first.reshape(*first.shape, *[1] * (x.dim() - first.dim()))
        is_row_each = values.dim() == x.dim() - first.dim() + 1 and len(values) == int(first.sum())
        return not others and is_row_each and self._is_plain(values) and self._is_even(x, marked)


def _table_and_index(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Tensor, Any]:
    if function is F.embedding:
        return args[1], args[0]
    return args[0], args[1] if function in (torch.embedding, _T.__getitem__) else args[2]


def _is_whole(index: Any) -> bool:
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))


def _home_if(holds: bool) -> str:
    return "home" if holds else "lost"
