"""Make one rank misbehave on purpose: for the demo, for tests, and for users who want to try their alerts.

`inject(parse_fault("slow:rank=1,factor=1.3"), model, rank)` makes it happen on the rank it names; the others carry no
hook at all, and neither does that rank before its time. The monitor knows nothing of what was injected.

The training loop tells the injector when a step begins, before it fetches its batch, and asks how large that is to be:

    for step in range(steps):
        injector.step(step)
        batch = next_batch(injector.batch(size))
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from ringside.faults.specs import Diverge, Fault, Hang, Input, Kill, Pause, Slow, Stop, Uneven, first_step, parse_fault

__all__ = [
    "Diverge",
    "Fault",
    "Hang",
    "Injector",
    "Input",
    "Kill",
    "Pause",
    "Slow",
    "Stop",
    "Uneven",
    "first_step",
    "inject",
    "parse_fault",
    "work",
]


# -------------------------------------------------------------------------------------------------
# A rank that does more work than the others in its forward and backward passes.

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


class Injector(Protocol):
    """What `inject` returns."""

    def step(self, step: int) -> None:
        """Tell it that training step number `step` begins; the batch is fetched after this."""

    def batch(self, size: int) -> int:
        """Return how many samples to take in this step, where all others take `size`."""

    def remove(self) -> None:
        """Stop it for good and take all hooks off the model."""


def inject(
    fault: Fault | None,
    model: Any,
    rank: int,
    *,
    clock: Clock = time.perf_counter,
    burn: Burn | None = None,
    stall: Callable[[float], None] = time.sleep,
    halt: Callable[[], None] | None = None,
) -> Injector:
    """Return the injector that makes `fault` happen in `model`, if it is this rank's.

    Args:
        fault: What `parse_fault` returned.
        model: A `torch.nn.Module`, wrapped in DistributedDataParallel or not.
        rank: This process's rank.
        clock: Seconds; what forward and backward are measured with.
        burn: Does about so many seconds of work and returns how many it were.
        stall: Stands still for so many seconds.
        halt: Stands for what keeps this process from going on: SIGKILL, SIGSTOP, or standing still for good.
    """
    if fault is None or fault.rank != rank:
        return _Nothing()
    # DistributedDataParallel's own forward may wait for other ranks; the module inside only works.
    inner = getattr(model, "module", model) if type(model).__name__ == "DistributedDataParallel" else model
    if isinstance(fault, Slow):
        return Slower(fault, inner, clock, burn or (lambda seconds: work(seconds, clock)))
    if isinstance(fault, Input):
        return _Input(fault, stall)
    if isinstance(fault, Uneven):
        return _Uneven(fault)
    if isinstance(fault, Pause):
        return _Pause(fault, inner, stall)
    if isinstance(fault, Diverge):
        return _Diverge(fault, inner)
    return _Halt(fault.at_step, inner, halt or _HALTS[type(fault)])


def _kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop_myself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _stand_still() -> None:
    threading.Event().wait()  # signals still reach it: Ctrl-C and SIGTERM end it


_HALTS: dict[type, Callable[[], None]] = {Kill: _kill_myself, Stop: _stop_myself, Hang: _stand_still}


class _Nothing:
    def step(self, step: int) -> None:
        pass

    def batch(self, size: int) -> int:
        return size

    def remove(self) -> None:
        pass


class _Input(_Nothing):
    """Stands still before the batch is fetched, as a loader does that has nothing ready."""

    def __init__(self, fault: Input, stall: Callable[[float], None]) -> None:
        self._seconds, self._from_step, self._stall = fault.seconds, fault.from_step, stall

    def step(self, step: int) -> None:
        if step >= self._from_step:
            self._stall(self._seconds)

    def remove(self) -> None:
        self._from_step = NEVER


class _Uneven(_Nothing):
    def __init__(self, fault: Uneven) -> None:
        self._factor, self._from_step, self._step = fault.factor, fault.from_step, -1

    def step(self, step: int) -> None:
        self._step = step

    def batch(self, size: int) -> int:
        return size if self._step < self._from_step else max(round(size * self._factor), size + 1)

    def remove(self) -> None:
        self._from_step = NEVER


class _Diverge(_Nothing):
    """Changes one number in place between two steps, when nobody but the optimizer has anything to do with it."""

    def __init__(self, fault: Diverge, module: Any) -> None:
        self._fault, self._module, self._done = fault, module, False

    def step(self, step: int) -> None:
        if step >= self._fault.at_step and not self._done:
            self._done = True
            next(iter(self._module.parameters())).detach().view(-1)[0] += self._fault.by

    def remove(self) -> None:
        self._done = True


class _Pause(_Nothing):
    def __init__(self, fault: Pause, module: Any, stall: Callable[[float], None]) -> None:
        self._fault, self._module, self._stall = fault, module, stall
        self._handle: Any = None

    def step(self, step: int) -> None:
        self._take_off()
        if self._fault.is_in(step):
            self._handle = self._module.register_forward_pre_hook(self._forward_begins)

    def remove(self) -> None:
        self._fault = Pause(self._fault.rank, -1)
        self._take_off()

    def _forward_begins(self, *_: Any) -> None:
        self._take_off()
        self._stall(self._fault.seconds)

    def _take_off(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = None


class _Halt(_Nothing):
    """Halts the process when half of the gradients are there: its peers are then in an all-reduce with it."""

    def __init__(self, at_step: int, module: Any, halt: Callable[[], None]) -> None:
        self._at_step, self._module, self._halt = at_step, module, halt
        self._handles: list[Any] = []
        self._left = 0

    def step(self, step: int) -> None:
        self._take_off()
        if step == self._at_step:
            trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
            self._left = (len(trained) + 1) // 2
            self._handles = [p.register_post_accumulate_grad_hook(self._gradient_is_there) for p in trained]

    def remove(self) -> None:
        self._at_step = -1
        self._take_off()

    def _gradient_is_there(self, parameter: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self._halt()

    def _take_off(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
