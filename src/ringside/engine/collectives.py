"""The collectives besides all-reduce, for NumPy arrays and torch CPU tensors, in terms of one call into the core."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from ringside.engine.buffers import Flat, flatten, flatten_to_move, flatten_to_read, result_for
from ringside.engine.communicator import Communicator, typed_as
from ringside.engine.dtypes import Op
from ringside.engine.request import KINDS, CoreRequest, bounds_of_one, checked_bounds, checked_op, equal_bounds
from ringside.engine.runtime.worker import Closeable
from ringside.engine.shm.memory import Storage
from ringside.errors import UsageError

_REDUCE_SCATTER, _ALL_GATHER, _ALL_TO_ALL, _BROADCAST, _REDUCE = map(
    KINDS.index, ("reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce")
)


class Collectives(Closeable):
    """Collectives of a group of ranks; every rank must call the same ones in the same order.

    Common to all of them: tensors are NumPy arrays or torch CPU tensors, of equal shape and dtype on all ranks; those
    that are contiguous are not copied, and those in symmetric memory (`empty`) not even through the arena.
    Collectives that reduce take the dtypes of `all_reduce`; those that only move elements take every dtype that holds
    no Python objects. With `async_op` they return a `Work` at once, which has the `result()`; until then the
    tensors must be left alone. They raise `UsageError` or `UnsupportedError` for a call that cannot be, before anything
    is sent; `MismatchError`, on all ranks, where ranks called different things, and then nothing is changed;
    `PeerLostError` and `DeadlineError` where a rank does not take part.

    "Folded in rank order" is said of one host. Between hosts of several ranks each, the ranks of a host are added up
    first (f16 and bf16 are rounded once more for each host), unless the communicator is reproducible.

    Attributes:
        rank: This rank.
        size: Number of ranks.
    """

    rank: int
    size: int

    def _perform_at_once(self, kind: int, x: Any, out: Any = None, op: Op = "sum", root: int = -1) -> bool:
        """Execute a collective by one call into the core, where that is possible; tell whether it was.

        Args:
            kind: Its code, of one with equal shares or with a root.
            x: The tensor.
            out: Where the result goes; None: into `x`.
            op: Of a reduction.
            root: The rank that gives or gets alone, or -1.
        """
        return False

    @abstractmethod
    def _perform(self, call: CoreRequest, result: Callable[[], Any], async_op: bool) -> Any:
        """Execute a collective, here or in the background, and return what `result` gives."""

    @abstractmethod
    def execute(self, call: CoreRequest, stamp_ns: int, background: bool, storage: Storage | None = None) -> None:
        """Execute a collective on the thread that calls, whatever is queued: for jobs given to `submit`."""

    # -------------------------------------------------------------------------------------------- new tensors

    @typed_as(Communicator.reduce_scatter)
    def reduce_scatter(self, x: Any, op: Op = "sum", async_op: bool = False, *, out: Any = None) -> Any:
        """Reduce a tensor over all ranks and give each rank its part of the result.

        Args:
            x: [size * k, ...]; not changed.
            op: As for `all_reduce`; contributions are folded in rank order.
            async_op: Return a `Work`.
            out: A contiguous tensor for the result, [k, ...]; None makes one.

        Returns:
            [k, ...], rows `rank * k` to `(rank + 1) * k` of the reduction.
        """
        if out is not None and not async_op and self._perform_at_once(_REDUCE_SCATTER, x, out, op):
            return out
        flat = flatten_to_read(x)
        code = checked_op(flat, op)
        rows = self._rows(x)
        y, to = result_for(x, flat, (rows, *x.shape[1:]), out)
        bounds = equal_bounds(to.numel, self.size)
        call = CoreRequest("reduce_scatter", flat, flat.numel, bounds, out=to.address, op=code, keeps=to)
        return self._perform(call, lambda: y, async_op)

    @typed_as(Communicator.all_gather)
    def all_gather(self, x: Any, async_op: bool = False, *, out: Any = None) -> Any:
        """Give every rank the tensors of all ranks.

        Args:
            x: [k, ...]; not changed. A tensor of no dimensions counts as [1].
            async_op: Return a `Work`.
            out: A contiguous tensor for the result, [size * k, ...]; None makes one.

        Returns:
            [size * k, ...], the ranks' tensors one after the other along the first dimension.
        """
        if out is not None and not async_op and self._perform_at_once(_ALL_GATHER, x, out):
            return out
        flat, tag = flatten_to_move(x)
        shape = tuple(x.shape) or (1,)
        y, to = result_for(x, flat, (self.size * shape[0], *shape[1:]), out)
        bounds = equal_bounds(flat.numel, self.size)
        call = CoreRequest("all_gather", flat, to.numel, bounds, out=to.address, tag=tag, keeps=to)
        return self._perform(call, lambda: y, async_op)

    @typed_as(Communicator.gather)
    def gather(self, x: Any, root: int = 0, async_op: bool = False, *, out: Any = None) -> Any:
        """Give one rank the tensors of all ranks.

        Args:
            x: Any shape; not changed.
            root: The rank that gets them.
            async_op: Return a `Work`.
            out: On the root a contiguous tensor for the result, [size, *x.shape]; None makes one. Ignored elsewhere.

        Returns:
            On the root [size, *x.shape], a row per rank; None elsewhere.
        """
        self._check_root(root)
        flat, tag = flatten_to_move(x)
        y, to = None, None
        if self.rank == root:
            y, to = result_for(x, flat, (self.size, *x.shape), out)
        bounds = equal_bounds(flat.numel, self.size)
        address = 0 if to is None else to.address
        call = CoreRequest("gather", flat, bounds[-1], bounds, out=address, root=root, tag=tag, keeps=to)
        return self._perform(call, lambda: y, async_op)

    @typed_as(Communicator.all_to_all)
    def all_to_all(self, x: Any, async_op: bool = False, *, out: Any = None) -> Any:
        """Give row j of every rank's tensor to rank j: the transpose of the ranks' rows.

        Args:
            x: [size, ...], row j for rank j; not changed. [size * k, ...] counts as size blocks of k rows.
            async_op: Return a `Work`.
            out: A contiguous tensor for the result, of the shape of `x`; None makes one.

        Returns:
            The shape of `x`: row (block) j is what rank j had for this rank.
        """
        if out is not None and not async_op and self._perform_at_once(_ALL_TO_ALL, x, out):
            return out
        self._rows(x)
        flat, tag = flatten_to_move(x)
        y, to = result_for(x, flat, tuple(x.shape), out)
        bounds = equal_bounds(flat.numel // self.size, self.size)
        call = CoreRequest("all_to_all", flat, flat.numel, bounds, out=to.address, tag=tag, keeps=to)
        return self._perform(call, lambda: y, async_op)

    # -------------------------------------------------------------------------------------------- in place

    @typed_as(Communicator.broadcast)
    def broadcast(self, x: Any, root: int = 0, async_op: bool = False) -> Any:
        """Copy one rank's tensor into those of all others.

        Args:
            x: Any shape; overwritten except on the root.
            root: The rank that gives.
            async_op: Return a `Work`.

        Returns:
            `x`.
        """
        self._check_root(root)
        if not async_op and self._perform_at_once(_BROADCAST, x, root=root):
            return x
        flat, tag = flatten_to_move(x, writes=self.rank != root)
        bounds = bounds_of_one(root, self.size, flat.numel)
        return self._perform(
            CoreRequest("broadcast", flat, flat.numel, bounds, root=root, tag=tag), lambda: x, async_op
        )

    @typed_as(Communicator.reduce)
    def reduce(self, x: Any, root: int = 0, op: Op = "sum", async_op: bool = False) -> Any:
        """Reduce a tensor over all ranks into that of one rank.

        Args:
            x: Any shape; overwritten on the root, unchanged elsewhere.
            root: The rank that gets the result.
            op: As for `all_reduce`; contributions are folded in rank order.
            async_op: Return a `Work`.

        Returns:
            `x`.
        """
        self._check_root(root)
        if not async_op and self._perform_at_once(_REDUCE, x, op=op, root=root):
            return x
        flat = flatten(x) if self.rank == root else flatten_to_read(x)
        call = CoreRequest("reduce", flat, flat.numel, op=checked_op(flat, op), root=root)
        return self._perform(call, lambda: x, async_op)

    @typed_as(Communicator.scatter)
    def scatter(self, out: Any, x: Any = None, root: int = 0, async_op: bool = False) -> Any:
        """Give every rank its row of one rank's tensor.

        Args:
            out: Any shape; overwritten with this rank's row.
            x: On the root [size, *out.shape], a row per rank; not changed. Ignored elsewhere.
            root: The rank that gives.
            async_op: Return a `Work`.

        Returns:
            `out`.
        """
        self._check_root(root)
        to, tag = flatten_to_move(out, writes=True)
        flat = to._replace(copy_back=None)
        if self.rank == root:
            if x is None:
                raise UsageError(f"rank {root} is the root of this scatter: it has to give x, a row per rank")
            given, other = flatten_to_move(x)
            if (given.shape, given.dtype, other) != ((self.size, *to.shape), to.dtype, tag):
                raise UsageError(
                    f"scatter to {self.size} ranks of shape {tuple(to.shape)} needs x of shape "
                    f"{(self.size, *to.shape)} and the same dtype, not {x.dtype}{tuple(x.shape)}"
                )
            flat = given._replace(shape=to.shape)
        bounds = equal_bounds(to.numel, self.size)
        call = CoreRequest("scatter", flat, bounds[-1], bounds, out=to.address, root=root, tag=tag, keeps=to)

        def result() -> Any:
            to.write_back()
            return out

        return self._perform(call, result, async_op)

    # -------------------------------------------------------------------------------------------- lanes, in place

    @typed_as(Communicator.reduce_scatter_)
    def reduce_scatter_(
        self,
        x: Any,
        bounds: Sequence[int],
        op: Op = "sum",
        async_op: bool = False,
        *,
        scale: float = 1.0,
        own_scale: bool = False,
    ) -> Any:
        """Reduce a tensor over all ranks, in place, each rank its own lane of it: half an all-reduce.

        Contributions are folded in rank order; f16 and bf16 are folded in f32 and rounded once.

        Args:
            x: Any shape.
            bounds: size + 1 ascending element offsets into the flattened `x`, from 0 to at most its number of
                elements, equal on all ranks: lane r is `[bounds[r], bounds[r + 1])`. Lanes may be empty, so
                `[0, n, n, n]` reduces n elements to rank 0 of three.
            op: As for `all_reduce`; avg divides by this communicator's size.
            async_op: Return a `Work`.
            scale: Multiply each contribution first (floating dtypes with sum or avg only).
            own_scale: Ranks may give different scales, each for its own contribution; avg then divides by their sum.

        Returns:
            `x`: this rank's lane holds the reduction of that lane over all ranks, all other elements are unchanged.

        Raises:
            As all collectives; `UsageError` for impossible bounds.
        """
        flat = flatten(x)
        code = checked_op(flat, op, scaled=own_scale or scale != 1.0)
        bounds = checked_bounds(bounds, self.size, flat.numel)
        call = CoreRequest("reduce_scatter_", flat, flat.numel, bounds, op=code, scale=scale, own_scale=own_scale)
        return self._perform(call, lambda: x, async_op)

    @typed_as(Communicator.all_gather_)
    def all_gather_(self, x: Any, bounds: Sequence[int], async_op: bool = False) -> Any:
        """Copy every rank's lane of a tensor to all ranks, in place: the other half of an all-reduce.

        Args:
            x: Any shape, and of a dtype that can be reduced (raw bytes are uint8).
            bounds: As for `reduce_scatter_`; `[0, n, n, n]` broadcasts n elements from rank 0 of three.
            async_op: Return a `Work`.

        Returns:
            `x`: every lane holds what its rank had there; elements outside of all lanes are unchanged.

        Raises:
            As all collectives; `UsageError` for impossible bounds.
        """
        flat = flatten(x)
        bounds = checked_bounds(bounds, self.size, flat.numel)
        return self._perform(CoreRequest("all_gather_", flat, flat.numel, bounds), lambda: x, async_op)

    def all_gather_storage_(self, flat: Flat, storage: Storage | None, bounds: Sequence[int]) -> None:
        """`all_gather_` of a tensor in a shareable storage, on the thread that calls.

        Args:
            flat: The tensor.
            storage: The storage it lies in; None: a private tensor, or symmetric memory.
            bounds: As for `all_gather_`.
        """
        bounds = checked_bounds(bounds, self.size, flat.numel)
        self.execute(CoreRequest("all_gather_", flat, flat.numel, bounds), 0, True, storage)

    # -------------------------------------------------------------------------------------------- inside

    def _rows(self, x: Any) -> int:
        """Return how many rows of `x` are each rank's."""
        if not len(x.shape) or x.shape[0] % self.size:
            raise UsageError(
                f"a tensor of shape {tuple(x.shape)} cannot be divided among {self.size} ranks: its first dimension "
                f"must be a multiple of {self.size}"
            )
        return int(x.shape[0]) // self.size

    def _check_root(self, root: int) -> None:
        if not isinstance(root, int) or not 0 <= root < self.size:
            raise UsageError(f"root {root!r} is no rank: ranks are 0 to {self.size - 1}")
