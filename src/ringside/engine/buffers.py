"""A tensor as the core sees it: address, number of elements, dtype code, shape.

Works on torch tensors and NumPy arrays without importing torch.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ringside import _core
from ringside._core.enums import DType
from ringside.engine.dtypes import ITEM_BYTES, dtype_code
from ringside.errors import UnsupportedError, UsageError

# Three times as fast as asking NumPy; 0 where an array is not C-contiguous, not writable or of a dtype without buffers.
_writable_buffer: Callable[[Any], int] = _core.native().writable_buffer if _core.available() else lambda x: 0


_BYTES = int(DType.uint8)


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
        code = dtype_code(x.dtype)
        # The usual case in one call of the core; else NumPy is asked, and says what is wrong.
        address = _writable_buffer(x)
        if address and address % ITEM_BYTES[code] == 0:
            return Flat(address, x.size, code, x.shape, x)
        target = _contiguous(_writable(x))
        return Flat(address_of(target), x.size, code, x.shape, target, None if target is x else x)
    try:
        if x.is_cpu and x.is_contiguous():
            address, numel = x.data_ptr(), x.numel()
            if numel and not address:
                raise UsageError(f"a tensor of shape {tuple(x.shape)} has no memory: its storage was freed")
            return Flat(address, numel, dtype_code(x.dtype), x.shape, x)
    except (AttributeError, RuntimeError):  # no tensor, or one without memory of its own
        pass
    _check_torch(x)
    copy = x.detach().contiguous()
    return Flat(copy.data_ptr(), copy.numel(), dtype_code(copy.dtype), tuple(x.shape), copy, x.detach())


def flatten_to_read(x: Any) -> Flat:
    """Return where the elements of a tensor are that is only read: it may be read-only."""
    if isinstance(x, np.ndarray):
        copy = _contiguous(x)
        return Flat(address_of(copy), copy.size, dtype_code(x.dtype), x.shape, copy)
    return flatten(x)._replace(copy_back=None)


def flatten_to_move(x: Any, *, writes: bool = False) -> tuple[Flat, int]:
    """Return where the elements of a tensor are that is only moved, and a hash of its dtype.

    Elements of dtypes that cannot be reduced count as bytes, and the hash stands for the dtype (0: the Flat has it).
    With `writes` the tensor is written, else it may be read-only.
    """
    try:
        return flatten(x) if writes else flatten_to_read(x), 0
    except UnsupportedError:
        if not hasattr(x, "dtype") or getattr(x.dtype, "hasobject", False):
            raise
    # A dtype that cannot be reduced, such as complex64: its bytes are moved.
    tag = zlib.crc32(str(x.dtype).encode()) or 1
    if isinstance(x, np.ndarray):
        array = _contiguous(_writable(x) if writes else x)
        copy_back = x if writes and array is not x else None
        return Flat(address_of(array), array.nbytes, _BYTES, x.shape, array, copy_back), tag
    _check_torch(x)
    own = x.detach()
    copy = own.resolve_conj().resolve_neg().contiguous()
    address, size = copy.data_ptr(), copy.numel() * copy.element_size()
    return Flat(address, size, _BYTES, tuple(x.shape), copy, own if writes and address != own.data_ptr() else None), tag


def result_for(x: Any, flat: Flat, shape: tuple[int, ...], out: Any) -> tuple[Any, Flat]:
    """Return a tensor of the kind of `x`, and of the given shape, for a collective to write into.

    Args:
        x: The input.
        flat: The same, flattened.
        shape: Of the result.
        out: The caller's own tensor for it; None: a new one.

    Raises:
        UsageError: `out` has another shape or dtype, is not contiguous, or overlaps the input.
    """
    if out is None:
        out = np.empty(shape, x.dtype) if isinstance(x, np.ndarray) else x.new_empty(shape)
        return out, flatten_to_move(out, writes=True)[0]
    to, _ = flatten_to_move(out, writes=True)
    if tuple(out.shape) != shape or out.dtype != x.dtype or to.copy_back is not None:
        raise UsageError(
            f"out must be a contiguous tensor of shape {shape} and dtype {x.dtype}, not {out.dtype}{tuple(out.shape)}"
        )
    item = ITEM_BYTES[flat.dtype]
    if to.address < flat.address + flat.numel * item and flat.address < to.address + to.numel * item:
        raise UsageError("out must not overlap the input")
    return out, to


def _contiguous(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return x if x.flags.c_contiguous and x.flags.aligned else np.array(x, order="C")


def address_of(x: np.ndarray[Any, Any]) -> int:
    """Return the address of an array's first element."""
    address: int = x.__array_interface__["data"][0]
    return address


def _writable(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if not x.flags.writeable:
        raise UsageError("the array is read-only, and this collective writes into it: pass a writable copy")
    return x


def _check_torch(x: Any) -> None:
    if not type(x).__module__.startswith("torch") and not hasattr(x, "data_ptr"):
        raise UnsupportedError(f"{type(x).__name__} is neither a torch tensor nor a NumPy array")
    if not x.is_cpu:
        raise UnsupportedError(
            f"a tensor on {x.device} is not for shared memory: use ringside.communicator(group).all_reduce (NCCL), the "
            "process group itself, or move it to the CPU first"
        )
    if str(x.layout) != "torch.strided":
        raise UnsupportedError(f"a tensor of layout {x.layout} cannot be reduced: call .to_dense() first")


def tensor_of(raw: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """View bytes as a NumPy array or torch tensor that keeps them alive."""
    if not str(dtype).startswith("torch."):
        return raw.view(np.dtype(dtype)).reshape(shape)
    torch = sys.modules["torch"]  # a torch dtype was given, so torch is there
    if raw.size == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(raw).view(dtype).reshape(shape)
