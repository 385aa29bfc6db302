"""Make one rank misbehave on purpose: for the demo, for tests, and for users who want to try their alerts.

`inject(parse_fault("slow:rank=1,factor=1.3"), model, rank)` makes it happen on the rank it names; the others carry no
hook at all, and neither does that rank before its time. The monitor knows nothing of what was injected.

The training loop tells the injector when a step begins, before it fetches its batch, and asks how large that is to be:

    for step in range(steps):
        injector.step(step)
        batch = next_batch(injector.batch(size))
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import partial
from typing import Any, ClassVar, get_type_hints

import numpy as np

from ringside.errors import UsageError
from ringside.faults.quota import CpuQuota
from ringside.text import did_you_mean, duration, percent

# -------------------------------------------------------------------------------------------------
# The faults there are, each a value with its words: `slow:rank=1,factor=1.3,from_step=40`.


@dataclass(frozen=True)
class _Fault:
    """A fault is written as it is read: its kind, which is its class's name, and its fields.

    A number of steps between two that is 0 is left out.
    """

    kind: ClassVar[str]
    example: ClassVar[str]
    rank: int

    def __init_subclass__(cls) -> None:
        cls.kind = cls.__name__.lower()

    def __str__(self) -> str:
        values = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return f"{self.kind}:" + ",".join(f"{name}={value!r}" for name, value in values if name != "every" or value)


@dataclass(frozen=True)
class _Halting(_Fault):
    """A rank that halts in its backward pass.

    Args:
        rank: Who.
        at_step: In which training step.
    """

    past: ClassVar[str]
    at_step: int

    def describe(self) -> str:
        """Return it as a sentence, in the past tense."""
        return f"rank {self.rank} {self.past} step {self.at_step}"


@dataclass(frozen=True)
class Slow(_Fault):
    """A rank whose forward and backward passes do more work than the others'.

    Args:
        rank: Who.
        factor: How many times as long the passes take, more than 1.
        from_step: First training step of it.
    """

    example = "slow:rank=1,factor=1.3,from_step=40"
    factor: float = 1.3
    from_step: int = 0

    def describe(self) -> str:
        """Return it as a sentence, in the past tense."""
        more = f"{percent(self.factor - 1)} more work in forward and backward"
        return f"rank {self.rank} was given {more} from step {self.from_step} on"


@dataclass(frozen=True)
class Pause(_Fault):
    """A rank that stands still in its forward pass, once or again and again.

    Args:
        rank: Who.
        at_step: In which training step.
        seconds: How long.
        every: After how many steps again; 0 for only once.
    """

    example = "pause:rank=1,at_step=60,seconds=3"
    at_step: int
    seconds: float = 3.0
    every: int = 0

    def is_in(self, step: int) -> bool:
        """Tell whether the rank stands still in a step."""
        since = step - self.at_step
        return since == 0 or (since > 0 and self.every > 0 and since % self.every == 0)

    def describe(self) -> str:
        """Return it as a sentence, in the past tense."""
        when = f"every {self.every} steps from step {self.at_step} on" if self.every else f"in step {self.at_step}"
        return f"rank {self.rank} paused for {self.seconds:g} s {when}"


@dataclass(frozen=True)
class Kill(_Halting):
    """A rank that is gone from one moment to the next, in its backward pass (SIGKILL).

    Args:
        rank: Who.
        at_step: In which training step.
    """

    example = "kill:rank=1,at_step=60"
    past = "was killed in"


@dataclass(frozen=True)
class Input(_Fault):
    """A rank whose data loader keeps it waiting at the beginning of every step.

    Args:
        rank: Who.
        seconds: How long, per step.
        from_step: First training step of it.
    """

    example = "input:rank=1,seconds=0.02,from_step=40"
    seconds: float = 0.02
    from_step: int = 0

    def describe(self) -> str:
        """Return it as a sentence, in the past tense."""
        each = f"{duration(self.seconds)} longer per step"
        return f"rank {self.rank} waited {each} for its input from step {self.from_step} on"


@dataclass(frozen=True)
class Uneven(_Fault):
    """A rank that is given larger batches than the others; the training script asks `Injector.batch` for its size.

    Args:
        rank: Who.
        factor: How many times as many samples, more than 1.
        from_step: First training step of it.
    """

    example = "uneven:rank=1,factor=1.5,from_step=40"
    factor: float = 1.5
    from_step: int = 0

    def describe(self) -> str:
        """Return it as a sentence, in the past tense."""
        return f"rank {self.rank} was given {percent(self.factor - 1)} more samples from step {self.from_step} on"


@dataclass(frozen=True)
class Hang(_Halting):
    """A rank that stands in its backward pass for good: it never calls the collective that its peers are in.

    Args:
        rank: Who.
        at_step: In which training step.
    """

    example = "hang:rank=1,at_step=60"
    past = "stopped for good in the backward pass of"


@dataclass(frozen=True)
class Stop(_Halting):
    """A rank whose process is stopped from outside, in its backward pass (SIGSTOP).

    Args:
        rank: Who.
        at_step: In which training step.
    """

    example = "stop:rank=1,at_step=60"
    past = "was stopped (SIGSTOP) in"


@dataclass(frozen=True)
class Diverge(_Fault):
    """A rank one number of whose first parameter is changed once: from then on its replica is another model.

    Args:
        rank: Who.
        at_step: Before which training step.
        by: What is added to the number.
    """

    example = "diverge:rank=1,at_step=60,by=0.01"
    at_step: int
    by: float = 0.01

    def describe(self) -> str:
        """Return it as a sentence, in the past tense."""
        return f"one number of rank {self.rank}'s first parameter was changed by {self.by:g} before step {self.at_step}"


@dataclass(frozen=True)
class Quota(_Fault):
    """A rank that may use only so much of a CPU: the kernel halts it for a part of every tenth of a second.

    Args:
        rank: Who.
        cpus: How many CPUs its process may use.
        from_step: First training step of it.
    """

    example = "quota:rank=1,cpus=0.6,from_step=40"
    cpus: float = 0.6
    from_step: int = 0

    def describe(self) -> str:
        """Return it as a sentence, in the past tense."""
        return f"rank {self.rank} was given a quota of {self.cpus:g} CPUs from step {self.from_step} on"


@dataclass(frozen=True)
class Link(_Fault):
    """A link between two hosts that becomes slower; whoever made the network slows it down, no rank can.

    Args:
        rank: At one end.
        to: The rank at the other.
        factor: How many times less it carries, more than 1.
        from_step: First training step of it.
    """

    example = "link:rank=0,to=1,factor=4,from_step=80"
    to: int
    factor: float = 4.0
    from_step: int = 0

    def describe(self) -> str:
        """Return it as a sentence, in the past tense."""
        slower = f"made {self.factor:g} times slower from about step {self.from_step} on"
        return f"the link between ranks {self.rank} and {self.to} was {slower}"


Fault = Slow | Input | Uneven | Quota | Link | Pause | Hang | Stop | Diverge | Kill
LASTING = (Slow, Input, Uneven, Quota, Link)
"""Faults that last from `from_step` on; the others happen once, in `at_step`."""
KINDS: Mapping[str, type[Fault]] = {kind.kind: kind for kind in (*LASTING, Pause, Hang, Stop, Diverge, Kill)}


def first_step(fault: Fault) -> int:
    """Return the first training step in which a fault makes a difference."""
    return fault.from_step if isinstance(fault, LASTING) else fault.at_step


# -------------------------------------------------------------------------------------------------
# Reading a fault from words, such as `slow:rank=1,factor=1.3,from_step=40`.

MOST_FACTOR = 1000.0
LEAST_CPUS = 0.01
"""The kernel's own bound: a millisecond of every tenth of a second."""


def parse_fault(spec: str, ranks: int | None = None) -> Fault | None:
    """Return the fault that `spec` describes; None for `none`.

    Args:
        spec: Such as `slow:rank=1,factor=1.3,from_step=40`.
        ranks: Size of the world, where it is known; the fault's rank must be inside.

    Raises:
        UsageError: There is no such fault, or it cannot be; the message lists what exists.
    """
    name, _, rest = spec.strip().partition(":")
    if name == "none" and not rest:
        return None
    if name not in KINDS:
        raise _refused(spec, f"there is no fault {name!r}{did_you_mean(name, KINDS)}")
    kind, values = KINDS[name], dict[str, Any]()
    types = {key: hint for key, hint in get_type_hints(kind).items() if hint in (int, float)}
    for part in filter(None, rest.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in types or not equals:
            raise _refused(spec, f"{name} takes {', '.join(f'{key}=' for key in types)} not {part!r}")
        if key in values:
            raise _refused(spec, f"{key} is given twice")
        try:
            number = types[key](value)
        except ValueError:
            raise _refused(spec, f"{key}={value!r} is no {'whole ' if types[key] is int else ''}number") from None
        if number < 0 or not math.isfinite(number):
            raise _refused(spec, f"{key}={value}: 0 or more, and finite")
        values[key] = number
    missing = [field.name for field in fields(kind) if field.default is MISSING and field.name not in values]
    if missing:
        raise _refused(spec, f"{name} needs {' and '.join(f'{key}=' for key in missing)}")

    # What a number alone cannot say.
    fault = kind(**values)
    if ranks is not None and fault.rank >= ranks:
        raise _refused(spec, f"there is no rank {fault.rank} among {ranks} ranks (0 to {ranks - 1})")
    if isinstance(fault, Link) and (fault.to == fault.rank or (ranks is not None and fault.to >= ranks)):
        raise _refused(spec, f"a link leads to another rank, not from {fault.rank} to {fault.to}")
    if isinstance(fault, Slow | Uneven | Link) and not 1 < fault.factor <= MOST_FACTOR:
        raise _refused(spec, f"a factor is more than 1 and at most {MOST_FACTOR:g}, not {fault.factor:g}")
    if isinstance(fault, Pause | Input) and fault.seconds <= 0:
        raise _refused(spec, f"{'a pause' if isinstance(fault, Pause) else 'waiting'} takes more than 0 seconds")
    if isinstance(fault, Quota) and fault.cpus < LEAST_CPUS:
        raise _refused(spec, f"a quota is at least {LEAST_CPUS:g} CPUs")
    if isinstance(fault, Diverge) and not fault.by:
        raise _refused(spec, "a change by 0 changes nothing")
    return fault


def _refused(spec: str, why: str) -> UsageError:
    examples = "".join(f"\n  {kind.example}" for kind in KINDS.values())
    return UsageError(f"cannot inject {spec!r}: {why}. There are:{examples}\n  none")


# -------------------------------------------------------------------------------------------------
# Making a fault happen in a model.

Clock = Callable[[], float]
Burn = Callable[[float], float]

_MATRIX = np.full((64, 64), 0.5, dtype=np.float32)


def work(seconds: float, clock: Clock = time.perf_counter) -> float:
    """Do real arithmetic, most of it without the GIL, for about `seconds`; return how long it took, seconds."""
    begin = now = clock()
    result = np.empty_like(_MATRIX)
    while now < begin + seconds:
        np.matmul(_MATRIX, _MATRIX, out=result)
        now = clock()
    return now - begin


class Injector:
    """What `inject` returns. This one does nothing: it is for the ranks that no fault is for.

    Args:
        module: What hooks are put on.
    """

    def __init__(self, module: Any = None) -> None:
        self._module = module
        self._handles: list[Any] = []
        self._removed = False

    def step(self, step: int) -> None:
        """Tell it that training step number `step` begins; the batch is fetched after this."""

    def batch(self, size: int) -> int:
        """Return how many samples to take in this step, where all others take `size`."""
        return size

    def remove(self) -> None:
        """Stop it for good and take all hooks off the model."""
        self._removed = True
        self._take_off()

    def _take_off(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def inject(
    fault: Fault | None,
    model: Any,
    rank: int,
    *,
    clock: Clock = time.perf_counter,
    burn: Burn | None = None,
    stall: Callable[[float], None] = time.sleep,
    halt: Callable[[], object] | None = None,
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

    Raises:
        UnsupportedError: A quota is to be injected and cannot be made here.
    """
    if fault is None or fault.rank != rank or isinstance(fault, Link):
        return Injector()
    # DistributedDataParallel's own forward may wait for other ranks; the module inside only works.
    inner = getattr(model, "module", model) if type(model).__name__ == "DistributedDataParallel" else model
    if isinstance(fault, Slow):
        return _Slow(fault, inner, clock, burn or (lambda seconds: work(seconds, clock)))
    if isinstance(fault, Input):
        return _Input(fault, stall)
    if isinstance(fault, Uneven):
        return _Uneven(fault)
    if isinstance(fault, Quota):
        return _Quota(fault)
    if isinstance(fault, Pause):
        return _Pause(fault, inner, stall)
    if isinstance(fault, Diverge):
        return _Diverge(fault, inner)
    return _Halt(fault.at_step, inner, halt or _HALTS[type(fault)])


_HALTS: dict[type, Callable[[], object]] = {
    Kill: partial(signal.raise_signal, signal.SIGKILL),
    Stop: partial(signal.raise_signal, signal.SIGSTOP),
    Hang: threading.Event().wait,  # signals still reach it: Ctrl-C and SIGTERM end it
}


class _Slow(Injector):
    """Measures forward, and backward between one parameter's gradient and the next, and does the rest on top.

    A parameter's post-accumulate hook runs before DistributedDataParallel sees the gradient, so the extra work of
    backward lies where more work would lie: between one gradient and the next.
    """

    def __init__(self, fault: Slow, module: Any, clock: Clock, burn: Burn) -> None:
        super().__init__(module)
        self._fault, self._clock, self._burn = fault, clock, burn
        self._since: float | None = None
        self._debt = 0.0

    def step(self, step: int) -> None:
        """Put the hooks on once it is time."""
        if step >= self._fault.from_step and not self._handles and not self._removed:
            self._handles = [
                self._module.register_forward_pre_hook(self._forward_begins),
                self._module.register_forward_hook(self._forward_ended),
                *_on_gradients(self._module, self._gradient_is_there),
            ]

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


def _on_gradients(module: Any, hook: Callable[[Any], None]) -> list[Any]:
    """Call `hook` with every parameter that is trained when its gradient is there; return the hooks' handles."""
    return [p.register_post_accumulate_grad_hook(hook) for p in module.parameters() if p.requires_grad]


def _tensors(value: Any) -> list[Any]:
    """Return the tensors in a module's output, however nested."""
    if hasattr(value, "requires_grad"):
        return [value]
    if isinstance(value, tuple | list):
        items = value
    elif isinstance(value, Mapping):
        items = list(value.values())
    else:
        items = [getattr(value, name) for name in getattr(value, "__dataclass_fields__", ())]
    return [tensor for item in items for tensor in _tensors(item)]


class _Input(Injector):
    """Stands still before the batch is fetched, as a loader does that has nothing ready."""

    def __init__(self, fault: Input, stall: Callable[[float], None]) -> None:
        super().__init__()
        self._fault, self._stall = fault, stall

    def step(self, step: int) -> None:
        if step >= self._fault.from_step and not self._removed:
            self._stall(self._fault.seconds)


class _Uneven(Injector):
    def __init__(self, fault: Uneven) -> None:
        super().__init__()
        self._fault, self._step = fault, -1

    def step(self, step: int) -> None:
        self._step = step

    def batch(self, size: int) -> int:
        if self._removed or self._step < self._fault.from_step:
            return size
        return max(round(size * self._fault.factor), size + 1)


class _Quota(Injector):
    def __init__(self, fault: Quota) -> None:
        super().__init__()
        self._fault, self._quota = fault, CpuQuota(fault.cpus)

    def step(self, step: int) -> None:
        if step == self._fault.from_step and not self._removed:
            self._quota.members.write_text(str(os.getpid()))

    def remove(self) -> None:
        super().remove()
        self._quota.close()


class _Diverge(Injector):
    """Changes one number in place between two steps, when nobody but the optimizer has anything to do with it."""

    def __init__(self, fault: Diverge, module: Any) -> None:
        super().__init__(module)
        self._fault = fault

    def step(self, step: int) -> None:
        if step >= self._fault.at_step and not self._removed:
            self._removed = True  # once is enough
            next(iter(self._module.parameters())).detach().view(-1)[0] += self._fault.by


class _Pause(Injector):
    def __init__(self, fault: Pause, module: Any, stall: Callable[[float], None]) -> None:
        super().__init__(module)
        self._fault, self._stall = fault, stall

    def step(self, step: int) -> None:
        self._take_off()
        if self._fault.is_in(step) and not self._removed:
            self._handles = [self._module.register_forward_pre_hook(self._forward_begins)]

    def _forward_begins(self, *_: Any) -> None:
        self._take_off()
        self._stall(self._fault.seconds)


class _Halt(Injector):
    """Halts the process when half of the gradients are there: its peers are then in an all-reduce with it."""

    def __init__(self, at_step: int, module: Any, halt: Callable[[], object]) -> None:
        super().__init__(module)
        self._at_step, self._halt = at_step, halt
        self._left = 0

    def step(self, step: int) -> None:
        self._take_off()
        if step == self._at_step and not self._removed:
            self._handles = _on_gradients(self._module, self._gradient_is_there)
            self._left = (len(self._handles) + 1) // 2

    def _gradient_is_there(self, parameter: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self._halt()
