"""State as a tree of plain values with tensors at its leaves: taken apart, packed into bytes, and put together again.

Nothing here is a pickle: what a peer or a file holds can at most be wrong, never be run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ringside.decoding import UNDECODABLE
from ringside.errors import RingsideError, UnsupportedError
from ringside.sync.digests import digest

_TENSOR = "\0tensor"
_ALIGN = 64
_LENGTH = 8
_MOST_BYTES = 1 << 26
_PLAIN = (bool, int, float, str, bytes, type(None))
Bytes = NDArray[np.uint8]


class _Leaf(msgspec.Struct, array_like=True):
    name: str
    dtype: str
    shape: list[int]
    start: int


class _Head(msgspec.Struct):
    skeleton: Any
    leaves: list[_Leaf]


def take_apart(tree: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a tree's skeleton, plain values with names for tensors, and its tensors by name, such as `model.0.weight`.

    Raises:
        UnsupportedError: A value is neither plain nor a tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _walk(tree, "", tensors), tensors


def _walk(at: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(at, torch.Tensor):
        while path in tensors:
            path += "'"  # a key with a dot in it may read like two
        tensors[path] = at.detach()
        return {_TENSOR: path}
    below = f"{path}." if path else ""
    if isinstance(at, dict):
        return {key: _walk(value, f"{below}{key}", tensors) for key, value in at.items()}
    if isinstance(at, list | tuple):
        return [_walk(value, f"{below}{place}", tensors) for place, value in enumerate(at)]
    if not isinstance(at, _PLAIN):
        raise UnsupportedError(f"{path} is a {type(at).__name__}: a state holds tensors and plain values")
    return at


def put_together(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the tree again; tuples have become lists."""
    if isinstance(skeleton, dict):
        if set(skeleton) == {_TENSOR}:
            return tensors[skeleton[_TENSOR]]
        return {key: put_together(value, tensors) for key, value in skeleton.items()}
    if isinstance(skeleton, list):
        return [put_together(value, tensors) for value in skeleton]
    return skeleton


def packed_size(tree: Any) -> int:
    """Return how many bytes `pack` needs."""
    head, _, end = _planned(tree)
    return _data_start(len(head)) + end


def pack(tree: Any, into: Bytes) -> None:
    """Write a tree into memory, uint8 [packed_size(tree)]."""
    head, placed, _ = _planned(tree)
    into[:_LENGTH] = np.frombuffer(len(head).to_bytes(_LENGTH, "little"), dtype=np.uint8)
    into[_LENGTH : _LENGTH + len(head)] = np.frombuffer(head, dtype=np.uint8)
    first = _data_start(len(head))
    for start, tensor in placed:
        raw = _raw(tensor)
        into[first + start : first + start + len(raw)] = raw


def unpack(memory: Bytes) -> Any:
    """Return the tree that `pack` wrote; its tensors are copies.

    Raises:
        RingsideError: It is not whole.
    """
    try:
        length = int.from_bytes(memory[:_LENGTH].tobytes(), "little")
        if not 0 < length <= min(_MOST_BYTES, len(memory)):
            raise ValueError(f"a head of {length} bytes")
        head = msgspec.msgpack.decode(memory[_LENGTH : _LENGTH + length].tobytes(), type=_Head)
        first = _data_start(length)
        return put_together(head.skeleton, {leaf.name: _tensor(memory[first:], leaf) for leaf in head.leaves})
    except (*UNDECODABLE, TypeError, LookupError, RuntimeError, AttributeError) as error:
        raise RingsideError(f"the state that was received is not whole ({error}): it is fetched from another") from None


def digest_of(tree: Any) -> int:
    """Return 64 bits that stand for a tree: its skeleton and the bits, dtype and shape of every tensor."""
    skeleton, tensors = take_apart(tree)
    whole = hashlib.blake2b(msgspec.msgpack.encode(skeleton), digest_size=8)
    for tensor in tensors.values():
        whole.update(digest(tensor.cpu()).to_bytes(8, "little"))
    return int.from_bytes(whole.digest(), "little")


def _planned(tree: Any) -> tuple[bytes, list[tuple[int, torch.Tensor]], int]:
    """Return the head, every tensor with its place behind the head, and the place behind the last."""
    skeleton, tensors = take_apart(tree)
    *starts, end = _starts(tensors.values())
    leaves = [
        _Leaf(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start)
        for (name, tensor), start in zip(tensors.items(), starts, strict=True)
    ]
    return msgspec.msgpack.encode(_Head(skeleton, leaves)), list(zip(starts, tensors.values(), strict=True)), end


def _starts(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    """Yield where every tensor begins, then where the last has ended."""
    end = 0
    for tensor in tensors:
        yield end
        end += tensor.numel() * tensor.element_size()
        end += -end % _ALIGN
    yield end


def _data_start(head_bytes: int) -> int:
    return _LENGTH + head_bytes + -(_LENGTH + head_bytes) % _ALIGN


def _raw(tensor: torch.Tensor) -> Bytes:
    """Return the bytes of a tensor; of a contiguous one on the host they are its own."""
    flat = tensor.cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if len(flat) else np.empty(0, dtype=np.uint8)


def _tensor(memory: Bytes, leaf: _Leaf) -> torch.Tensor:
    dtype = getattr(torch, leaf.dtype)
    size = int(np.prod(leaf.shape, dtype=np.int64)) * dtype.itemsize
    if leaf.start < 0 or size < 0 or leaf.start + size > len(memory):
        raise ValueError("a tensor lies outside")
    tensor = torch.empty(leaf.shape, dtype=dtype)
    _raw(tensor)[:] = memory[leaf.start : leaf.start + size]
    return tensor
