"""A rank that does more work than the others in its forward and backward passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ringside.fault_specs import Slow

Clock = Callable[[], float]
Burn = Callable[[float], float]

_MATRIX = np.full((64, 64), 0.5, dtype=np.float32)
NEVER = 2**62


def work(seconds: float, clock: Clock = time.perf_counter) -> float:
    """Do real arithmetic, most of it without the GIL, for about `seconds`; return how long it took, seconds."""
    begin = now = clock()
    result = np.empty_like(_MATRIX)
    while now < begin + seconds:
        np.matmul(_MATRIX, _MATRIX, out=result)
        now = clock()
    return now - begin


class Slower:
    """Measures forward, and backward between one parameter's gradient and the next, and does the rest on top.

    A parameter's post-accumulate hook runs before DistributedDataParallel sees the gradient, so the extra work of
    backward lies where more work would lie: between one gradient and the next.
    """

    def __init__(self, fault: Slow, module: Any, clock: Clock, burn: Burn) -> None:
        self._fault, self._module, self._clock, self._burn = fault, module, clock, burn
        self._handles: list[Any] = []
        self._since: float | None = None
        self._debt = 0.0

    def step(self, step: int) -> None:
        """Put the hooks on once it is time."""
        if step >= self._fault.from_step and not self._handles:
            self._handles = [
                self._module.register_forward_pre_hook(self._forward_begins),
                self._module.register_forward_hook(self._forward_ended),
                *(
                    parameter.register_post_accumulate_grad_hook(self._gradient_is_there)
                    for parameter in self._module.parameters()
                    if parameter.requires_grad
                ),
            ]

    def batch(self, size: int) -> int:
        """Return `size`."""
        return size

    def remove(self) -> None:
        """Take all hooks off, for good."""
        self._fault = Slow(self._fault.rank, self._fault.factor, from_step=NEVER)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _forward_begins(self, *_: Any) -> None:
        self._since = self._clock()

    def _forward_ended(self, module: Any, inputs: Any, output: Any) -> None:
        self._add_work()
        self._since = None
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._backward_begins)

    def _backward_begins(self, gradient: Any) -> None:
        if self._since is None:
            self._since = self._clock()

    def _gradient_is_there(self, parameter: Any) -> None:
        self._add_work()

    def _add_work(self) -> None:
        """Work (factor − 1) × the time since the last call; what was too much is taken off the next time."""
        if self._since is None or not self._handles:
            return
        self._debt += (self._fault.factor - 1.0) * max(self._clock() - self._since, 0.0)
        if self._debt > 0:
            self._debt -= self._burn(self._debt)
        self._since = self._clock()


def _tensors(value: Any) -> list[Any]:
    """Return the tensors in a module's output, however nested."""
    if hasattr(value, "requires_grad"):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _tensors(item)]
    if hasattr(value, "__dataclass_fields__"):
        return [tensor for name in value.__dataclass_fields__ for tensor in _tensors(getattr(value, name))]
    return []
