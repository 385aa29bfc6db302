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
from collections.abc import Callable
from typing import Any, Protocol

from ringside.fault_parse import parse_fault
from ringside.fault_slow import NEVER, Burn, Clock, Slower, work
from ringside.fault_specs import Diverge, Fault, Hang, Input, Kill, Pause, Slow, Stop, Uneven, first_step

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
