"""`attach()`: one line that synchronises and watches a DistributedDataParallel model."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringside.engine import Communicator, Settings
from ringside.errors import UnsupportedError, UsageError
from ringside.sync import session as sessions
from ringside.sync.carriers import Carrier, NativeCarrier, RingsideCarrier, UserHook
from ringside.sync.group import Decision, decide
from ringside.sync.hook import GradientHook
from ringside.sync.session import Session

ENGINES = ("auto", "ringside", "native")

_log = logging.getLogger("ringside")


class Attachment:
    """What `attach()` returns: Ringside's hold on one model.

    Attributes:
        engine: Who carries gradients: `ringside`, or the process group's backend (`gloo`, `nccl`).
        why: Why it is not ringside, where it is not.
        session: The monitor of this process; None where `monitor=False` or RINGSIDE=off.
    """

    def __init__(self, model: DistributedDataParallel, decision: Decision, session: Session | None) -> None:
        self._model = model
        self.session = session
        self.why = decision.why
        group = model.process_group
        self.engine = "ringside" if decision.engine == "ringside" else str(dist.get_backend(group))
        clock = session.clock if session is not None else _idle_clock()
        self._clock = clock
        self._hook = GradientHook(_carrier(decision, group), clock)
        self._handles: list[Any] = []
        if model._comm_hooks:
            self.why = "the model already has a communication hook, which carries its gradients unseen"
            self.engine = str(dist.get_backend(group))
            clock.always_synced = True
        else:
            model.register_comm_hook(None, self._hook.run)
            model.register_comm_hook = self._yield  # type: ignore[method-assign]
        self._watch_forward()

    @property
    def counters(self) -> dict[str, int]:
        """Collectives so far by who carried them, such as `{"ringside/push": 120}` or `{"gloo": 120}`."""
        return dict(self._hook.carrier.counters)

    def detach(self) -> None:
        """Stop watching; gradients are carried by the process group again (DDP cannot drop its hook)."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._model.__dict__.pop("_sync_buffers", None)
        self._hook.carrier.close()
        self._hook.carrier = NativeCarrier(self._model.process_group)

    def _yield(self, state: Any, hook: UserHook) -> None:
        """Take the place of `register_comm_hook`: DDP allows one hook, so the user's runs inside ours."""
        self._model._check_comm_hook(hook)  # type: ignore[no-untyped-call]
        self._hook.yield_to(self._model.process_group, state, hook)
        self.engine = str(dist.get_backend(self._model.process_group))
        self.why = f"the script registered its own communication hook {getattr(hook, '__qualname__', hook)}"
        if dist.get_rank() == 0:
            _log.warning("ringside only watches this model: %s", self.why)

    def _watch_forward(self) -> None:
        clock = self._clock

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            clock.forward_begins(_samples(args, kwargs))

        def after(_: Any, args: Any, output: Any) -> None:
            clock.forward_ends()

        self._handles.append(self._model.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        self._handles.append(self._model.register_forward_hook(after))
        if hasattr(self._model, "_sync_buffers"):
            sync_buffers = self._model._sync_buffers

            def timed() -> None:
                began = time.perf_counter()
                sync_buffers()  # type: ignore[no-untyped-call]
                clock.blocked(time.perf_counter() - began)

            self._model._sync_buffers = timed  # type: ignore[method-assign]


def attach(
    model: DistributedDataParallel,
    *,
    engine: str | None = None,
    monitor: bool = True,
    run_dir: str | os.PathLike[str] | None = None,
) -> Attachment:
    """Synchronise a DDP model's gradients with Ringside's engine and watch every step. A collective.

    On one host, gradients travel through shared memory without copies. Elsewhere, and for CUDA models, the process
    group's own collective carries them and Ringside only watches.

    Args:
        model: The model, wrapped; before its first backward.
        engine: `auto` (the default; RINGSIDE_ENGINE overrides it), `ringside` (an error where it cannot be) or
            `native` (only watch).
        monitor: Record steps, watch for slow ranks and write a run directory.
        run_dir: Where rank 0 writes the run (default: RINGSIDE_RUN_DIR, else a new directory under `runs/`).

    Returns:
        The `Attachment`. With RINGSIDE=off in the environment it does nothing at all.

    Raises:
        UsageError: `model` is not a DistributedDataParallel model, or `engine` is unknown.
        UnsupportedError: `engine="ringside"` and some rank cannot.
    """
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"attach() needs a model wrapped in DistributedDataParallel, not a {type(model).__name__}: "
            "attach(DistributedDataParallel(model))"
        )
    wish = engine or os.environ.get("RINGSIDE_ENGINE", "auto")
    if wish not in ENGINES:
        raise UsageError(f"there is no engine {wish!r}; there are {', '.join(ENGINES)}")
    if os.environ.get("RINGSIDE", "").lower() in ("off", "0"):
        return _Detached(model)
    decision = decide(model.process_group, wish, _objection(model))
    if wish == "ringside" and decision.engine != "ringside":
        raise UnsupportedError(f"the ringside engine cannot carry this model: {decision.why}")
    if decision.engine != "ringside" and wish != "native" and dist.get_rank() == 0:
        _log.warning("ringside only watches this model: %s", decision.why)
    session = sessions.begin(run_dir, decision.engine) if monitor else None
    return Attachment(model, decision, session)


class _Detached(Attachment):
    """What `attach` returns with RINGSIDE=off."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.engine, self.why, self.session = str(dist.get_backend(model.process_group)), "RINGSIDE=off", None

    @property
    def counters(self) -> dict[str, int]:
        """Nothing is counted."""
        return {}

    def detach(self) -> None:
        """There is nothing to detach."""


def _objection(model: DistributedDataParallel) -> str:
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices - {"cpu"}:
        return f"its parameters are on {', '.join(sorted(devices))}, and shared memory is for CPU tensors"
    if model._comm_hooks:
        return "the model already has a communication hook"
    return ""


def _carrier(decision: Decision, group: dist.ProcessGroup) -> Carrier:
    if decision.engine != "ringside":
        return NativeCarrier(group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return RingsideCarrier(Communicator(decision.key, rank, size, Settings.of_environment()), group)


def _idle_clock() -> Any:
    from ringside.monitor.step_clock import StepClock

    return StepClock(dist.get_rank(), lambda record: None)


def _samples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the length of the first tensor's first dimension: the usual place of the batch."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return value.shape[0]
    return 0
