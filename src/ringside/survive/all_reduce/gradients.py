"""A model's gradients as one piece of memory: where each parameter's lies, and how runs of one dtype are added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ringside.engine.dtypes import OP_CODES, dtype_code
from ringside.engine.net.reduction import fold
from ringside.engine.transports.base import Bytes
from ringside.errors import UnsupportedError

ALIGN_BYTES = 64


@dataclass(frozen=True)
class AttemptRun:
    """Neighbouring elements of one dtype.

    Args:
        dtype: Code of the element type.
        item_bytes: Size of an element.
        start: First byte.
        elements: How many.
    """

    dtype: int
    item_bytes: int
    start: int
    elements: int


class FlatGradient:
    """Where the gradient of every parameter lies in a piece of memory.

    Args:
        parameters: The parameters that are trained, in the model's order; on the host.

    Attributes:
        size_bytes: How much memory one gradient of the model takes.
        runs: Its elements by dtype.

    Raises:
        UnsupportedError: A parameter is on a device, or sparse, or of a dtype that cannot be added up.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        for parameter in self._parameters:
            if parameter.device.type != "cpu":
                raise UnsupportedError(
                    f"a parameter is on {parameter.device}: exactly-once training keeps gradients in host memory, so "
                    "move the model to the CPU"
                )
            if parameter.layout != torch.strided:
                raise UnsupportedError(f"a parameter is {parameter.layout}: exactly-once training takes dense ones")
            dtype_code(parameter.dtype)  # raises for a dtype that cannot be added up

        # Laid out by dtype, each dtype's elements in one run, so that one kernel call adds them all.
        self._places = [0] * len(parameters)
        self.runs: list[AttemptRun] = []
        end = 0
        for dtype in sorted({str(p.dtype) for p in self._parameters}):
            start = end
            members = [k for k, p in enumerate(self._parameters) if str(p.dtype) == dtype]
            for k in members:
                self._places[k] = end
                end += self._parameters[k].numel() * self._parameters[k].element_size()
            first = self._parameters[members[0]]
            count = (end - start) // first.element_size()
            self.runs.append(AttemptRun(dtype_code(first.dtype), first.element_size(), start, count))
            end += -end % ALIGN_BYTES
        self.size_bytes = end

    def views(self, memory: Bytes) -> list[torch.Tensor]:
        """Return the gradient of every parameter as a view of memory (uint8 [size_bytes]), in the model's order."""
        raw = torch.from_numpy(memory)
        return [
            raw[place : place + p.numel() * p.element_size()].view(p.dtype).view(p.shape)
            for p, place in zip(self._parameters, self._places, strict=True)
        ]


def add_up(runs: Sequence[AttemptRun], sources: Sequence[Bytes], target: Bytes, first: int, last: int) -> None:
    """Add gradients up from left to right, ((g0 + g1) + g2) + ..., for the bytes from `first` to before `last`.

    Args:
        runs: What lies where.
        sources: Gradients, uint8 [size] each, in the order in which they are added; at least one.
        target: Where the sum goes, uint8 [size]; none of the sources.
        first: A multiple of `ALIGN_BYTES`.
        last: Another one, or the size.
    """
    for run in runs:
        start = max(run.start, first)
        end = min(run.start + run.elements * run.item_bytes, last)
        if start < end:
            places = [source[start:end].ctypes.data for source in sources]
            fold(places, target[start:end].ctypes.data, (end - start) // run.item_bytes, run.dtype, OP_CODES["sum"])


def slice_of(size_bytes: int, part: int, parts: int) -> tuple[int, int]:
    """Return the first byte of one of `parts` nearly equal slices and the one behind its last."""
    blocks = -(-size_bytes // ALIGN_BYTES)
    first, last = (min(blocks * (part + i) // parts * ALIGN_BYTES, size_bytes) for i in (0, 1))
    return first, last
