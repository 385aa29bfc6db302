"""`attach()`: one line that synchronises and watches a DistributedDataParallel model."""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ringside.engine import HostCommunicator, Settings
from ringside.errors import UnsupportedError, UsageError
from ringside.isolation import Guard
from ringside.monitor.alerts.live import digest_steps
from ringside.pytorch.communicator.communicator import GroupCommunicator
from ringside.pytorch.communicator.communicator import communicator as group_communicator
from ringside.pytorch.ddp.bucket_memory import finish_backward
from ringside.pytorch.ddp.cuda_events import marker_of
from ringside.pytorch.ddp.ddp_methods import change_methods, holders, own_hook, put_hook
from ringside.pytorch.ddp.hook import GradientHook
from ringside.pytorch.ddp.reducers import BucketReducer, NativeReducer, UserHook
from ringside.pytorch.ddp.ringside_reducer import RingsideReducer
from ringside.pytorch.hang_watch.watch import board_of
from ringside.pytorch.recording import session as sessions
from ringside.pytorch.recording.parameter_digests import ParameterDigests, agree_on_digests, shared_parameters
from ringside.pytorch.recording.session import Session
from ringside.pytorch.store import EngineDecision, OwnTimeout, agree_on_engine, first_error

ENGINES = ("auto", "ringside", "native")

_log = logging.getLogger("ringside")


class Attachment:
    """What `attach()` returns: Ringside's hold on one model.

    Attributes:
        engine: What reduces gradients: `ringside`, or the process group's backend (`gloo`, `nccl`).
        why: Why it is not ringside, where it is not.
        session: The monitor of this process; None where `monitor=False` or RINGSIDE=off.
        count_work: Called with the arguments of every forward pass, to count how much work a batch is; never raises.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        decision: EngineDecision,
        reducer: BucketReducer,
        session: Session | None,
        digest_every: int = 0,
    ) -> None:
        self._model = weakref.ref(model)  # whose attachment it is in `ddp_methods.holders` while it lives
        self._group = model.process_group
        self.session = session
        self._digests: ParameterDigests | None = None
        if session is not None and digest_every and session.size > 1:
            self._digests = session.add_model(shared_parameters(model), digest_every, type(model.module).__name__)
        self.why = decision.why
        self.engine = "ringside" if decision.engine == "ringside" else str(dist.get_backend(self._group))
        self.count_work: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None
        self._clock = session.clock if session is not None else _idle_clock()
        self._guard = session.guard if session is not None else Guard("timing the steps of this rank")
        static, defers = model.static_graph, model.static_graph or not model.find_unused_parameters
        # DDP takes one hook in its life: a model that was attached before has ours already.
        self._hook = own_hook(model) or GradientHook(reducer, self._clock, delayed=static, defers=defers)
        change_methods()
        self._install(model, reducer)
        holders[model] = self

    @property
    def attached(self) -> bool:
        """Tell whether the model is still watched."""
        model = self._model()
        return model is not None and holders.get(model) is self

    @property
    def counters(self) -> dict[str, int]:
        """Collectives so far by what reduced them, such as `{"ringside/push": 120}` or `{"gloo": 120}`."""
        return dict(self._hook.reducer.counters)

    def detach(self) -> None:
        """Stop watching; the process group reduces the gradients again (DDP cannot drop its hook)."""
        model = self._model()
        if model is not None:
            if holders.get(model) is not self:
                return
            del holders[model]
        if self._digests is not None and self.session is not None:
            self.session.remove_model(self._digests)
        self._hook.stop(self._group, _idle_clock())
        if model is not None and self._hook.is_unfinished:
            finish_backward(model)
            self._hook.is_unfinished = False

    def satisfies(self, requested: str, monitor: bool) -> bool:
        """Tell whether another `attach` with these arguments would change nothing."""
        if not self.attached or (self.session is not None) != monitor or self._hook.abort_reason:
            return False
        if self.session is not None and self.session is not sessions.current():
            return False
        return requested == "auto" or (requested == "ringside") == (self.engine == "ringside")

    def _install(self, model: DistributedDataParallel, reducer: BucketReducer) -> None:
        """Let our hook reduce the model's gradients, unless the script has put one of its own there first."""
        hook = self._hook
        marker = marker_of(model) if self.session is not None else None
        if marker is not None and self.session is not None:
            hook.marks = self.session.use_device_events(marker)
        if own_hook(model) is None and model._comm_hooks:
            self._clock.always_synced = True
            self._only_watch("the model already has a communication hook, which carries its gradients unseen")
            return

        # What watches: the step clock, the hang watch, and on GPUs events of the device.
        hook.clock, hook.guard = self._clock, self._guard
        watch = self.session.watch if self.session is not None else None
        hook.board = board_of(watch)
        if watch is not None and any(parameter.is_cuda for parameter in model.parameters()):
            watch.pending = hook.pending
        for watched in (reducer, hook.reducer):
            if isinstance(watched, NativeReducer):
                watched.marks = hook.marks
        if hook.user is not None:
            self._only_watch("the script registered its own communication hook")
            return

        # What reduces.
        hook.reducer = reducer
        ddp_reducer = model.reducer
        if isinstance(reducer, RingsideReducer):
            reducer.share_buckets(model, lambda: hook.backwards)
            if self.session is not None:
                reducer.on_memory = functools.partial(
                    self.session.gradient_memory, _numbers.setdefault(model, next(_count))
                )
        if own_hook(model) is None or model.reducer is not ddp_reducer:  # sharing may make another one
            put_hook(model, hook)

    def _only_watch(self, why: str) -> None:
        self.engine, self.why = str(dist.get_backend(self._group)), why

    # -------------------------------------------------------------------------------- called by the model's methods

    def forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record it, and compare replicas if it is time to."""
        model = self._model()
        self._hook.forward_begins(model is not None and model.require_backward_grad_sync)
        self._guard.run(self._record_forward, args, kwargs)
        if self.count_work is not None:
            self.count_work(args, kwargs)  # after the clock, which has opened the step that the work is counted for

    def forward_ends(self) -> None:
        """Record it."""
        self._guard.run(self._clock.forward_ends)
        self._hook.forward_ends()

    def buffers_begin(self) -> None:
        """Record it."""
        self._guard.run(self._clock.blocks)

    def buffers_end(self, seconds: float) -> None:
        """Record it."""
        self._guard.run(self._clock.blocked, seconds)

    def hook_registered(self, hook: UserHook) -> None:
        """The script's own hook reduces the gradients from now on: watch, and warn once."""
        self._only_watch(f"the script registered its own communication hook {getattr(hook, '__qualname__', hook)}")
        if dist.get_rank() == 0:
            _log.warning("ringside only watches this model: %s", self.why)

    def _record_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What may break here is no matter of training's: the guard runs it."""
        if not torch.is_grad_enabled():
            self._clock.forward_begins(0)
            return
        # The first tensor's first dimension is where the batch usually lies.
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.dim() > 0)
        first = next(tensors, None)
        self._clock.forward_begins(0 if first is None else first.shape[0])

        # Before a forward pass all updates are done, and buffers not yet touched: replicas must be the same. With a
        # communication hook of the script's own they may rightly differ, as with local SGD.
        digests = self._digests
        if digests is None or self._hook.user is not None or self.session is None or self.session.is_paused:
            return
        began = time.perf_counter()
        if digests.check(self._hook.backwards, self._clock.step - 1):
            self._clock.instrumented(time.perf_counter() - began)


def attach(
    model: DistributedDataParallel,
    *,
    engine: str | None = None,
    monitor: bool = True,
    run_dir: str | os.PathLike[str] | None = None,
    digest_every: int | None = None,
) -> Attachment:
    """Synchronise a DDP model's gradients with Ringside's engine and watch every step. A collective.

    On one host, gradients travel through shared memory without copies; between hosts, by the algorithm that measured
    best (`ringside.communicator`). For CUDA models the process group's own collective carries them and Ringside only
    watches. Nobody waits longer for another rank than the process group would: the timeout that it was made with counts
    before RINGSIDE_TIMEOUT_S, and that where the script gave none.

    Args:
        model: The model, wrapped. Attached before its first backward, nothing is copied; a model that is attached
            already is left as it is.
        engine: `auto` (the default; RINGSIDE_ENGINE overrides it), `ringside` (an error where it cannot be) or
            `native` (only watch).
        monitor: Record steps, watch for slow ranks and write a run directory.
        run_dir: Where rank 0 writes the run (default: RINGSIDE_RUN_DIR, else a new directory under `runs/`).
        digest_every: Compare the parameters of all ranks to the last bit every so many synchronised steps (default:
            RINGSIDE_DIGEST_EVERY, else 100); 0: never. Rank 0's counts for all.

    Returns:
        The `Attachment`. With RINGSIDE=off in the environment it does nothing at all.

    Raises:
        UsageError: `model` is not a DistributedDataParallel model, `engine` is unknown, or `digest_every` is no number
            of steps.
        UnsupportedError: `engine="ringside"` and some rank cannot.
    """
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"attach() needs a model wrapped in DistributedDataParallel, not a {type(model).__name__}: "
            "attach(DistributedDataParallel(model))"
        )

    # 1. What is requested, and what stands in the way.
    requested = engine or os.environ.get("RINGSIDE_ENGINE") or "auto"
    if requested not in ENGINES:
        raise UsageError(f"there is no engine {requested!r}; there are {', '.join(ENGINES)}")
    if os.environ.get("RINGSIDE", "").lower() in ("off", "0"):
        return _Detached(model, "RINGSIDE=off")
    if getattr(model, "_use_python_reducer", False):
        why = "torch.compile has its gradients reduced as they are compiled (optimize_ddp = 'python_reducer')"
        if requested == "ringside":
            raise UnsupportedError(f"the ringside engine cannot carry this model: {why}")
        if dist.get_rank() == 0:
            _warn_once(f"ringside leaves this model alone: {why}")
        return _Detached(model, why)
    every = digest_steps(digest_every)
    earlier = attachment_of(model)
    if earlier is not None:
        if earlier.satisfies(requested, monitor):
            return earlier
        earlier.detach()

    # 2. Agree on the engine: a collective, as is all that follows.
    decision, reducer = _open_reducer(model, requested)
    if requested == "ringside" and decision.engine != "ringside":
        raise UnsupportedError(f"the ringside engine cannot carry this model: {decision.why}")
    if decision.engine != "ringside" and requested != "native" and dist.get_rank() == 0:
        _warn_once(f"ringside only watches this model: {decision.why}")
    if monitor and dist.get_world_size(model.process_group) < dist.get_world_size():
        # Ranks of different groups do different work, and nobody may be compared with them (or wait for their records).
        if dist.get_rank(model.process_group) == 0:
            _warn_once("steps of a model that only some ranks train are not recorded yet, only synchronised")
        monitor = False

    # 3. The monitor; where it cannot be made, training goes on without.
    every = agree_on_digests(model.process_group, every) if monitor else 0
    session = None
    if monitor:
        try:
            session = sessions.begin(run_dir, decision.engine)
        except Exception as error:
            Guard("watching this rank").trip(error)
    _close_at_exit(reducer)
    return Attachment(model, decision, reducer, session, every)


def attachment_of(model: DistributedDataParallel) -> Attachment | None:
    """Return the hold on a model; None where it is not attached."""
    found: Attachment | None = holders.get(model)
    return found


_count = itertools.count()
_numbers: Any = WeakIdKeyDictionary()
"""What runs call each model that was attached."""
_warned: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()


def _warn_once(message: str) -> None:
    """Warn, but not again for the next model of the same job."""
    assert dist.group.WORLD is not None  # there is a model with a process group
    warned = _warned.setdefault(dist.group.WORLD, set())
    if message not in warned:
        warned.add(message)
        _log.warning("%s", message)


class _Detached(Attachment):
    """What `attach` returns where it does nothing."""

    def __init__(self, model: DistributedDataParallel, why: str) -> None:
        self.engine, self.why, self.session = str(dist.get_backend(model.process_group)), why, None

    @property
    def attached(self) -> bool:
        """It never is."""
        return False

    @property
    def counters(self) -> dict[str, int]:
        """Nothing is counted."""
        return {}

    def detach(self) -> None:
        """There is nothing to detach."""


def _open_reducer(model: DistributedDataParallel, requested: str) -> tuple[EngineDecision, BucketReducer]:
    """Agree on what reduces the gradients and open it; where one rank cannot, no rank does. A collective."""
    group, hook = model.process_group, own_hook(model)

    # 1. What this rank has against our engine; ranks agree on what all of them can.
    objection = ""
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices - {"cpu"}:
        objection = f"its parameters are on {', '.join(sorted(devices))}, and shared memory is for CPU tensors"
    elif (hook is not None and hook.user is not None) or (hook is None and model._comm_hooks):
        objection = "the model already has a communication hook"
    decision = agree_on_engine(group, requested, objection)
    if decision.engine != "ringside":
        return decision, NativeReducer(group)

    # 2. Open the communicator. Whatever goes wrong, the others wait to hear of it in step 3.
    communicator: HostCommunicator | GroupCommunicator | None = None
    problem = ""
    try:
        timeout_s = OwnTimeout(group).seconds()
        if decision.hosts > 1:
            communicator = group_communicator(group, timeout=timeout_s)
        else:
            settings = Settings.of_environment(timeout=timeout_s)
            communicator = HostCommunicator(decision.key, dist.get_rank(group), dist.get_world_size(group), settings)
    except Exception as error:
        problem = str(error) or type(error).__name__

    # 3. All have one, or none has.
    problem = first_error(group, problem)
    if communicator is not None and not problem:
        return decision, RingsideReducer(communicator, group)
    if communicator is not None:
        communicator.close()
    return EngineDecision("native", why=problem), NativeReducer(group)


_reducers: weakref.WeakSet[BucketReducer] = weakref.WeakSet()


def _close_at_exit(reducer: BucketReducer) -> None:
    """See to it that at exit peers learn that this rank leaves before its session waits for theirs."""
    _reducers.add(reducer)
    atexit.unregister(_close_reducers)  # exit handlers run last to first, and the session's must come after this one
    atexit.register(_close_reducers)


def _close_reducers() -> None:
    for reducer in list(_reducers):
        reducer.close(at_once=True)  # every backward has been waited for, or was aborted


def _idle_clock() -> Any:
    from ringside.monitor.step_clock import StepClock

    return StepClock(dist.get_rank(), lambda record: None)
