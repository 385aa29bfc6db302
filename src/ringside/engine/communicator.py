"""`Communicator`: what the communicator of one host and that over a process group both can do, with its types.

The types of the collectives are written down here, once; `typed_as` gives them to the implementations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar, overload

from ringside.engine.dtypes import Op
from ringside.engine.runtime.worker import Work
from ringside.schedule import Schedule

if TYPE_CHECKING:
    from typing_extensions import Unpack

Tensor = TypeVar("Tensor")
"""A torch CPU tensor (for all-reduces between ranks of a process group, one on a GPU too) or a NumPy array."""

_Self = TypeVar("_Self")
_Signature = TypeVar("_Signature", bound=Callable[..., Any])


def typed_as(signature: _Signature) -> Callable[[Callable[..., Any]], _Signature]:
    """Give a method the types of one of `Communicator`; nothing else changes.

    Args:
        signature: The protocol's method.
    """

    def typed(method: Callable[..., Any]) -> _Signature:
        return method  # type: ignore[return-value]

    return typed


class AllReduceOptions(TypedDict, total=False):
    """How an all-reduce is done; see `ringside.HostCommunicator.all_reduce`."""

    scale: float
    algorithm: str | Schedule | None
    weights: float | Sequence[float] | None


class Communicator(Protocol):
    """Collectives of a group of ranks, of which every rank calls the same ones in the same order.

    `ringside.init()` and `ringside.communicator(group)` return one. What each collective does stands with
    `ringside.HostCommunicator`. With `async_op=True` a collective returns a `Work` at once.

    Attributes:
        rank: This rank.
        size: Number of ranks.
    """

    rank: int
    size: int

    @overload
    def all_reduce(
        self, x: Tensor, op: Op = "sum", async_op: Literal[False] = False, **how: Unpack[AllReduceOptions]
    ) -> Tensor: ...
    @overload
    def all_reduce(
        self, x: Any, op: Op = "sum", *, async_op: Literal[True], **how: Unpack[AllReduceOptions]
    ) -> Work: ...
    @overload
    def all_reduce(self, x: Any, op: Op = "sum", async_op: bool = False, **how: Unpack[AllReduceOptions]) -> Any: ...
    def all_reduce(self, x: Any, op: Any = "sum", async_op: bool = False, **how: Any) -> Any:
        """Reduce a tensor over all ranks, in place."""

    @overload
    def reduce_scatter(
        self, x: Tensor, op: Op = "sum", async_op: Literal[False] = False, *, out: Tensor | None = None
    ) -> Tensor: ...
    @overload
    def reduce_scatter(self, x: Any, op: Op = "sum", *, async_op: Literal[True], out: Any = None) -> Work: ...
    def reduce_scatter(self, x: Any, op: Any = "sum", async_op: bool = False, *, out: Any = None) -> Any:
        """Reduce a tensor over all ranks and give each rank its part of the result."""

    @overload
    def all_gather(self, x: Tensor, async_op: Literal[False] = False, *, out: Tensor | None = None) -> Tensor: ...
    @overload
    def all_gather(self, x: Any, async_op: Literal[True], *, out: Any = None) -> Work: ...
    def all_gather(self, x: Any, async_op: bool = False, *, out: Any = None) -> Any:
        """Give every rank the tensors of all ranks."""

    @overload
    def gather(
        self, x: Tensor, root: int = 0, async_op: Literal[False] = False, *, out: Tensor | None = None
    ) -> Tensor | None: ...
    @overload
    def gather(self, x: Any, root: int = 0, *, async_op: Literal[True], out: Any = None) -> Work: ...
    def gather(self, x: Any, root: int = 0, async_op: bool = False, *, out: Any = None) -> Any:
        """Give one rank the tensors of all ranks."""

    @overload
    def all_to_all(self, x: Tensor, async_op: Literal[False] = False, *, out: Tensor | None = None) -> Tensor: ...
    @overload
    def all_to_all(self, x: Any, async_op: Literal[True], *, out: Any = None) -> Work: ...
    def all_to_all(self, x: Any, async_op: bool = False, *, out: Any = None) -> Any:
        """Give row j of every rank's tensor to rank j."""

    @overload
    def broadcast(self, x: Tensor, root: int = 0, async_op: Literal[False] = False) -> Tensor: ...
    @overload
    def broadcast(self, x: Any, root: int = 0, *, async_op: Literal[True]) -> Work: ...
    def broadcast(self, x: Any, root: int = 0, async_op: bool = False) -> Any:
        """Copy one rank's tensor into those of all others."""

    @overload
    def reduce(self, x: Tensor, root: int = 0, op: Op = "sum", async_op: Literal[False] = False) -> Tensor: ...
    @overload
    def reduce(self, x: Any, root: int = 0, op: Op = "sum", *, async_op: Literal[True]) -> Work: ...
    def reduce(self, x: Any, root: int = 0, op: Any = "sum", async_op: bool = False) -> Any:
        """Reduce a tensor over all ranks into that of one rank."""

    @overload
    def scatter(
        self, out: Tensor, x: Tensor | None = None, root: int = 0, async_op: Literal[False] = False
    ) -> Tensor: ...
    @overload
    def scatter(self, out: Any, x: Any = None, root: int = 0, *, async_op: Literal[True]) -> Work: ...
    def scatter(self, out: Any, x: Any = None, root: int = 0, async_op: bool = False) -> Any:
        """Give every rank its row of one rank's tensor."""

    @overload
    def reduce_scatter_(
        self,
        x: Tensor,
        bounds: Sequence[int],
        op: Op = "sum",
        async_op: Literal[False] = False,
        *,
        scale: float = 1.0,
        own_scale: bool = False,
    ) -> Tensor: ...
    @overload
    def reduce_scatter_(
        self,
        x: Any,
        bounds: Sequence[int],
        op: Op = "sum",
        *,
        async_op: Literal[True],
        scale: float = 1.0,
        own_scale: bool = False,
    ) -> Work: ...
    def reduce_scatter_(
        self, x: Any, bounds: Sequence[int], op: Any = "sum", async_op: bool = False, **how: Any
    ) -> Any:
        """Reduce a tensor over all ranks, in place, each rank its own lane of it."""

    @overload
    def all_gather_(self, x: Tensor, bounds: Sequence[int], async_op: Literal[False] = False) -> Tensor: ...
    @overload
    def all_gather_(self, x: Any, bounds: Sequence[int], async_op: Literal[True]) -> Work: ...
    def all_gather_(self, x: Any, bounds: Sequence[int], async_op: bool = False) -> Any:
        """Copy every rank's lane of a tensor to all ranks, in place."""

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def empty(self, shape: int | Sequence[int], dtype: Any = ...) -> Any:
        """Return a new zero-filled tensor in memory that the ranks of this host have mapped."""

    def split(self, color: int | None, key: int | None = None) -> Communicator | None:
        """Return a communicator over the ranks that give the same color."""

    def set_timeout(self, timeout: float | timedelta) -> None:
        """Wait at most so long for other ranks in one collective from now on."""

    def close(self) -> None:
        """Finish what is under way, within seconds, and close."""

    def abort(self) -> None:
        """Close at once."""

    def __enter__(self: _Self) -> _Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
