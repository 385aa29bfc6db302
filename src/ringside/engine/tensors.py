"""A tensor as the core sees it: address, number of elements, dtype code, shape.

Works on torch tensors and NumPy arrays without importing torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ringside import _core
from ringside.engine.dtypes import ITEM_BYTES, dtype_code
from ringside.errors import UnsupportedError, UsageError

# Three times as fast as asking NumPy; 0 where an array is not C-contiguous, not writable or of a dtype without buffers.
_writable_buffer: Callable[[Any], int] = _core.native().writable_buffer if _core.available() else lambda x: 0


class Flat(NamedTuple):
    """A contiguous tensor in host memory.

    Args:
        address: Of the first element.
        numel: Number of elements.
        dtype: Code of the element type.
        shape: A tuple of ints.
        target: The tensor itself, which also keeps its memory alive.
        copy_back: None, or the caller's non-contiguous tensor to copy `target` into afterwards.
    """

    address: int
    numel: int
    dtype: int
    shape: tuple[int, ...]
    target: Any
    copy_back: Any = None

    def write_back(self) -> None:
        """Copy the result into the caller's tensor, where `target` was only a contiguous copy of it."""
        if self.copy_back is not None:
            self.copy_back[...] = self.target


def flatten(x: Any) -> Flat:
    """Return where the elements of a torch CPU tensor or NumPy array are.

    Errors: `UnsupportedError` for other types, devices and dtypes; `UsageError` for a read-only array.
    """
    if isinstance(x, np.ndarray):
        return _flatten_numpy(x)
    try:
        if x.is_cpu and x.is_contiguous():
            return Flat(x.data_ptr(), x.numel(), dtype_code(x.dtype), x.shape, x)
    except (AttributeError, RuntimeError):
        pass
    return _flatten_torch(x)


def _flatten_numpy(x: np.ndarray[Any, Any]) -> Flat:
    code = dtype_code(x.dtype)
    address = _writable_buffer(x)
    if address and address % ITEM_BYTES[code] == 0:
        return Flat(address, x.size, code, x.shape, x)
    if not (x.flags.c_contiguous and x.flags.aligned):
        copy = np.array(x, order="C")
        return Flat(copy.ctypes.data, copy.size, code, x.shape, copy, _writable(x))
    address, _ = _writable(x).__array_interface__["data"]
    return Flat(address, x.size, code, x.shape, x)


def _writable(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if not x.flags.writeable:
        raise UsageError("the array is read-only, and all_reduce works in place: pass a writable copy")
    return x


def _flatten_torch(x: Any) -> Flat:
    if not type(x).__module__.startswith("torch") and not hasattr(x, "data_ptr"):
        raise UnsupportedError(f"{type(x).__name__} is neither a torch tensor nor a NumPy array")
    if not x.is_cpu:
        raise UnsupportedError(
            f"a tensor on {x.device} cannot be reduced by the shared-memory engine: use the NCCL process group "
            "(torch.distributed.all_reduce) for it, or move it to the CPU first"
        )
    if str(x.layout) != "torch.strided":
        raise UnsupportedError(f"a tensor of layout {x.layout} cannot be reduced: call .to_dense() first")
    copy = x.detach().contiguous()
    return Flat(copy.data_ptr(), copy.numel(), dtype_code(copy.dtype), tuple(x.shape), copy, x.detach())
