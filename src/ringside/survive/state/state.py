"""What moves together: parameters, buffers, optimizer, scheduler and the step; its digest, and how it is given away.

The sampler's cursor is the step, and random numbers are keyed by it, so the step stands for both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from ringside.decoding import UNDECODABLE
from ringside.engine.transports.base import Bytes
from ringside.errors import MismatchError, RingsideError, UnsupportedError
from ringside.pytorch.recording.parameter_digests import digest
from ringside.survive.data.samples import Position

# -------------------------------------------------------------------------------------------------
# State as a tree of plain values with tensors at its leaves: taken apart, packed into bytes, and put together again.
#
# Nothing here is a pickle: what a peer or a file holds can at most be wrong, never be run.

_TENSOR = "\0tensor"
_ALIGN = 64
_LENGTH = 8
_MOST_BYTES = 1 << 26
_PLAIN = (bool, int, float, str, bytes, type(None))


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


def _walk(node: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(node, torch.Tensor):
        while path in tensors:
            path += "'"  # a key with a dot in it may read like two
        tensors[path] = node.detach()
        return {_TENSOR: path}
    below = f"{path}." if path else ""
    if isinstance(node, dict):
        return {key: _walk(value, f"{below}{key}", tensors) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_walk(value, f"{below}{place}", tensors) for place, value in enumerate(node)]
    if not isinstance(node, _PLAIN):
        raise UnsupportedError(f"{path} is a {type(node).__name__}: a state consists of tensors and plain values")
    return node


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


def unpack_checked(memory: Bytes, digest: int) -> dict[str, Any]:
    """Return the tree that `pack` wrote, if it has this digest.

    Raises:
        RingsideError: It has another, or is not whole.
    """
    tree: dict[str, Any] = unpack(memory)
    if digest_of(tree) != digest:
        raise RingsideError("its content is not what was written")
    return tree


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
    leaves, placed, end = list[_Leaf](), list[tuple[int, torch.Tensor]](), 0
    for name, tensor in tensors.items():
        leaves.append(_Leaf(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end))
        placed.append((end, tensor))
        end += tensor.numel() * tensor.element_size()
        end += -end % _ALIGN
    return msgspec.msgpack.encode(_Head(skeleton, leaves)), placed, end


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


_POSITION, _UNSAVED = "position", "buffers"


class JobState:
    """A worker's training state.

    Args:
        model: The model.
        optimizer: Its optimizer.
        scheduler: Moves along, and is stepped after every step; None: there is none.
        position: Says where the job is in its samples, which copies tell and which is compared when one is loaded.

    Attributes:
        step: The next step to be trained; every step before it is in the parameters, once.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        position: Position | None = None,
    ) -> None:
        self.model, self.optimizer, self.scheduler, self.position = model, optimizer, scheduler, position
        self._unsaved = _unsaved(model)
        self.step = 0

    def advance(self) -> None:
        """Go on to the next step, once the optimizer has made this one."""
        if self.scheduler is not None:
            self.scheduler.step()
        self.step += 1

    def tree(self) -> dict[str, Any]:
        """Return the state as it is now; its tensors are the live ones."""
        parts: dict[str, Any] = {} if self.scheduler is None else {"scheduler": self.scheduler.state_dict()}
        if self._unsaved:
            parts[_UNSAVED] = self._unsaved
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step, **parts}

    def copied(self) -> dict[str, Any]:
        """Return the state as it is now, with tensors of its own, and where it is in the samples."""
        skeleton, tensors = take_apart(self.tree())
        tree: dict[str, Any] = put_together(skeleton, {name: t.clone() for name, t in tensors.items()})
        if self.position is not None:
            tree[_POSITION] = self.position.before(self.step)
        return tree

    def resume(self, tree: dict[str, Any]) -> None:
        """Take a state over that was saved by another job, perhaps, to go on from there.

        Raises:
            MismatchError: It is another model's, or belongs to other samples, or does not say to which.
        """
        if self.position is not None and _POSITION not in tree:
            raise MismatchError(
                f"the checkpoint of step {tree['step']} has no position in the samples: with another batch, seed or "
                "order samples would be lost and others counted twice. Give the job another checkpoint_dir, and load "
                "the parameters before (torch.distributed.checkpoint reads them)"
            )
        self.load(tree)

    def load(self, tree: dict[str, Any]) -> None:
        """Take a state over: from a rank of this job, which need not say where it is in the samples.

        Raises:
            MismatchError: It is another model's, or belongs to other samples.
        """
        if self.position is not None and _POSITION in tree:
            self.position.refuse_others(tree[_POSITION])
        try:
            self.model.load_state_dict(tree["model"])
            self.optimizer.load_state_dict(tree["optimizer"])
            if self.scheduler is not None:
                self.scheduler.load_state_dict(tree["scheduler"])
            for name, buffer in self._unsaved.items() if _UNSAVED in tree else ():
                buffer.copy_(tree[_UNSAVED][name])
        except (LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise MismatchError(f"this state is another model's or optimizer's: {error}") from None
        self.step = int(tree["step"])

    def digest(self) -> int:
        """Return 64 bits over all of it."""
        return digest_of(self.tree())


def _unsaved(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that move with the others and are not in a model's `state_dict` (persistent=False)."""
    return {
        f"{path}.{name}": buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name in module._non_persistent_buffers_set
    }
