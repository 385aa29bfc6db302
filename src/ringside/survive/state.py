"""What moves together: parameters, buffers, optimizer, scheduler and the step; its digest, and how it is given away.

The sampler's cursor is the step, and random numbers are keyed by it, so the step stands for both.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from ringside.errors import MismatchError
from ringside.survive.memory import OwnArena
from ringside.survive.position import Position
from ringside.survive.trees import Bytes, digest_of, pack, packed_size, put_together, take_apart, unpack

_POSITION, _UNSAVED = "position", "buffers"


class Stateful(Protocol):
    """What has a state: an optimizer, a scheduler, a sampler."""

    def state_dict(self) -> dict[str, Any]:
        """Return it."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take it over."""


class State:
    """A worker's training state.

    Args:
        model: The model.
        optimizer: Its optimizer.
        others: Whatever else moves along, by name: a scheduler, a stateful sampler.
        position: Says where the job is in its samples, which copies tell and which is compared when one is loaded.

    Attributes:
        step: The next step to be trained; every step before it is in the parameters, once.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Stateful,
        others: dict[str, Stateful] | None = None,
        position: Position | None = None,
    ) -> None:
        self.model, self.optimizer, self.others = model, optimizer, others or {}
        self.position = position
        self._unsaved = _unsaved(model)
        self.step = 0

    def tree(self) -> dict[str, Any]:
        """Return the state as it is now; its tensors are the live ones."""
        parts: dict[str, Any] = {name: part.state_dict() for name, part in self.others.items()}
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
                f"the checkpoint of step {tree['step']} does not say where it is in the samples (an older version "
                "wrote it): with another batch, seed or order samples would be lost and others counted twice. Give the "
                "job another checkpoint_dir, and load the parameters before (torch.distributed.checkpoint reads them)"
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
            for name, part in self.others.items():
                part.load_state_dict(tree[name])
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


class Given:
    """A copy of a state in sealed memory, for peers to read; close it when they have.

    Args:
        state: The state.
    """

    def __init__(self, state: State) -> None:
        tree = state.tree()
        self._arena = OwnArena(packed_size(tree))
        pack(tree, self._arena.bytes)
        self.address = self._arena.address

    @property
    def bytes(self) -> Bytes:
        """The packed state, uint8 [n]."""
        return self._arena.bytes

    def close(self) -> None:
        """Let go of it."""
        self._arena.close()


def take_over(state: State, memory: Bytes, digest: int) -> None:
    """Load a packed state, if it is what its digest says.

    Args:
        state: What takes it over.
        memory: The packed state, uint8 [n].
        digest: What all members agreed on.

    Raises:
        RingsideError: It is not whole.
        MismatchError: It is another state than was agreed on, or another model's.
    """
    tree = unpack(memory)
    if digest_of(tree) != digest:
        raise MismatchError("the state that was given is not the one that all agreed on: ask another rank")
    state.load(tree)
