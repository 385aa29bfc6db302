"""A worker's own work: gradients of micro-batches, as sums in memory that is given, and the optimizer's step.

What is added up over micro-batches is one piece of memory: the gradients, how far each buffer was moved (running
statistics and the like), and the loss. A buffer is put back after every micro-batch, and moves in the end by the mean
of what all micro-batches moved it by; so buffers, too, do not depend on who computed what. A flag of bools counts as 0
or 1: it changes when all micro-batches change it. A module may write into a buffer or put another tensor in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ringside.engine.transports.base import Bytes
from ringside.errors import UsageError
from ringside.survive.all_reduce.gradients import FlatGradient
from ringside.survive.data.samples import Samples, drawing_from

Loss = Callable[[nn.Module, Any], Tensor]
Collate = Callable[[list[Any]], Any]


class DataSet(Protocol):
    """A map-style data set."""

    def __len__(self) -> int:
        """Return how many samples there are."""

    def __getitem__(self, index: int) -> Any:
        """Return one; it may draw random numbers."""


@dataclass(frozen=True)
class KeptBatch:
    """A sum that an earlier attempt at a step computed.

    Args:
        step: The step.
        micro_batches: What is in it.
        memory: It, uint8 [size_bytes].
    """

    step: int
    micro_batches: frozenset[int]
    memory: Bytes


class StepWork:
    """Computes micro-batches.

    Args:
        model: The model.
        loss: Returns the sum of a batch's losses, a scalar.
        dataset: The samples.
        samples: Which samples belong to which micro-batch.
        seed: What random numbers are keyed by, together with step and micro-batch.
        collate: Makes a batch of samples.

    Attributes:
        flat: How what is added up lies in memory.

    Raises:
        UnsupportedError: A parameter cannot be added up.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, dataset: DataSet, samples: Samples, seed: int, collate: Collate
    ) -> None:
        self._model, self._loss, self._dataset, self._collate = model, loss, dataset, collate
        self._samples, self._seed = samples, seed
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._known = [(module, dict(module._buffers)) for module in model.modules()]
        self._buffers = [buffer for buffer in model.buffers() if buffer.numel()]
        moves = [buffer.to(torch.int32) if buffer.dtype == torch.bool else buffer for buffer in self._buffers]
        self._total = torch.zeros((), dtype=torch.float64)
        self.flat = FlatGradient([*self._parameters, *moves, self._total])

    def begin(self, step: int) -> None:
        """Draw a step's samples, so that their order is compared also where none of them are computed."""
        self._samples.of_step(step)

    def add(self, step: int, micro_batch: int, into: Bytes) -> None:
        """Compute a micro-batch and add it to what memory holds, uint8 [flat.size_bytes].

        Raises:
            UsageError: The loss is no scalar.
        """
        indices = self._samples.of_micro_batch(step, micro_batch)
        if not len(indices):
            return
        views = self.flat.views(into)
        before = [buffer.clone() for buffer in self._buffers]
        with drawing_from(self._seed, step, micro_batch):
            batch = self._collate([self._dataset[index] for index in indices.tolist()])
            loss = self._backward(batch, views)
        views[-1] += loss
        # Buffers are put back, and what they moved by is added up: every micro-batch begins with the same ones.
        self._restore_replaced_buffers()
        for buffer, was, moved in zip(self._buffers, before, views[len(self._parameters) : -1], strict=True):
            moved += buffer.to(moved.dtype) - was.to(moved.dtype)
            buffer.copy_(was)

    def _restore_replaced_buffers(self) -> None:
        """Have every buffer that a module replaced (`self.ema = ...`) hold the new value, and be the module's again.

        Raises:
            UsageError: A buffer of the model's state came, went, or became one of another kind.
        """
        for module, known in self._known:
            for name in {**known, **module._buffers} if known or module._buffers else ():
                buffer, new = known.get(name), module._buffers.get(name)
                if new is buffer:
                    continue
                if buffer is not None and new is not None and (new.shape, new.dtype) == (buffer.shape, buffer.dtype):
                    buffer.copy_(new.detach())
                elif name not in module._non_persistent_buffers_set:
                    raise UsageError(
                        f"the buffer {name} of a {type(module).__name__} was {_kind(buffer)} and became {_kind(new)} "
                        "in the loss: register it before training as it will be, or with persistent=False if it only "
                        "keeps what can be computed again"
                    )
                module._buffers[name] = buffer

    def _backward(self, batch: Any, views: Sequence[Tensor]) -> float:
        for parameter, view in zip(self._parameters, views, strict=False):
            parameter.grad = view
        loss = self._loss(self._model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UsageError("loss(model, batch) must return one number, the sum over the batch (reduction='sum')")
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter, view in zip(self._parameters, views, strict=False):
            if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
                view += parameter.grad  # the loss made new gradients in place of those it was given
            parameter.grad = None
        return float(loss.detach())

    def fill(self, step: int, micro_batches: Sequence[int], into: Bytes, kept: Sequence[KeptBatch] = ()) -> int:
        """Have memory hold the sum over some micro-batches; return how many had to be computed.

        Args:
            step: The step.
            micro_batches: Their numbers, in the order in which they are added.
            into: Memory, uint8 [flat.size_bytes].
            kept: What earlier attempts computed.
        """
        known = next((k for k in kept if k.step == step and k.micro_batches <= set(micro_batches)), None)
        into[:] = 0 if known is None else known.memory
        missing = [number for number in micro_batches if known is None or number not in known.micro_batches]
        for micro_batch in missing:
            self.add(step, micro_batch, into)
        return len(missing)

    def apply(self, step: int, total: Bytes, divisor: int, optimizer: torch.optim.Optimizer) -> float:
        """Make the optimizer's step with a sum over all micro-batches; return the mean loss of a sample.

        Args:
            step: The step.
            total: The sum, uint8 [flat.size_bytes]; it is used up.
            divisor: What gradients are divided by.
            optimizer: The optimizer.
        """
        *views, loss = self.flat.views(total)
        for parameter, view in zip(self._parameters, views, strict=False):
            parameter.grad = view if divisor == 1 else view.div_(divisor)
        optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None

        # Buffers move by the mean over the micro-batches that had samples; whole numbers are rounded towards 0.
        samples = len(self._samples.of_step(step))
        counted = min(self._samples.micro_batches, samples)
        for buffer, moved in zip(self._buffers, views[len(self._parameters) :], strict=True):
            mean = moved.div(counted, rounding_mode=None if buffer.is_floating_point() else "trunc")
            buffer.copy_(buffer.to(mean.dtype) + mean)
        return float(loss) / samples


def _kind(buffer: Tensor | None) -> str:
    return "nothing" if buffer is None else f"{buffer.dtype} of shape {tuple(buffer.shape)}"
