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
from ringside.monitor.alerts.settings import digest_steps
from ringside.pytorch.communicator.communicator import Communicator as GroupCommunicator
from ringside.pytorch.ddp.bucket_memory import finish_backward
from ringside.pytorch.ddp.cuda_events import marker_of
from ringside.pytorch.ddp.ddp_methods import change_methods, holders, own_hook, put_hook
from ringside.pytorch.ddp.hook import GradientHook
from ringside.pytorch.ddp.reducers import BucketReducer, NativeReducer, RingsideReducer, UserHook
from ringside.pytorch.hang_watch.watch import board_of
from ringside.pytorch.isolation import Guard
from ringside.pytorch.recording import session as sessions
from ringside.pytorch.recording.parameter_digests import ParameterDigests, agree_on_digests, shared_parameters
from ringside.pytorch.recording.session import Session
from ringside.pytorch.store import EngineDecision, OwnTimeout, decide, first_problem

ENGINES = ("auto", "ringside", "native")

_log = logging.getLogger("ringside")


class Attachment:
    """What `attach()` returns: Ringside's hold on one model.

    Attributes:
        engine: Who carries gradients: `ringside`, or the process group's backend (`gloo`, `nccl`).
        why: Why it is not ringside, where it is not.
        session: The monitor of this process; None where `monitor=False` or RINGSIDE=off.
        count_work: Called with the arguments of every forward pass, to count how much work a batch is; never raises.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        decision: EngineDecision,
        carrier: BucketReducer,
        session: Session | None,
        digest_every: int = 0,
    ) -> None:
        self._model = weakref.ref(model)  # whose attachment it is in `ddp_methods.holders` while it lives
        self._group = model.process_group
        self.session = session
        self._digests: ParameterDigests | None = None
        if session is not None and digest_every and session.size > 1:
            self._digests = session.compare(shared_parameters(model), digest_every, type(model.module).__name__)
        self.why = decision.why
        self.engine = "ringside" if decision.engine == "ringside" else str(dist.get_backend(self._group))
        self.count_work: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None
        self._clock = session.clock if session is not None else _idle_clock()
        self._fuse = session.fuse if session is not None else Guard("timing the steps of this rank")
        static, leaves = model.static_graph, model.static_graph or not model.find_unused_parameters
        self._hook = own_hook(model) or GradientHook(carrier, self._clock, delayed=static, leaves=leaves)
        change_methods()
        self._take_place(model, carrier)
        holders[model] = self

    @property
    def attached(self) -> bool:
        """Tell whether the model is still watched."""
        model = self._model()
        return model is not None and holders.get(model) is self

    @property
    def counters(self) -> dict[str, int]:
        """Collectives so far by who carried them, such as `{"ringside/push": 120}` or `{"gloo": 120}`."""
        return dict(self._hook.carrier.counters)

    def detach(self) -> None:
        """Stop watching; gradients are carried by the process group again (DDP cannot drop its hook)."""
        model = self._model()
        if model is not None:
            if holders.get(model) is not self:
                return
            del holders[model]
        if self._digests is not None and self.session is not None:
            self.session.forget_digests(self._digests)
        self._hook.rest(self._group, _idle_clock())
        if model is not None and self._hook.is_unfinished:
            finish_backward(model)
            self._hook.is_unfinished = False

    def serves(self, wish: str, monitor: bool) -> bool:
        """Tell whether another `attach` with these wishes would change nothing."""
        if not self.attached or (self.session is not None) != monitor or self._hook.given_up:
            return False
        if self.session is not None and self.session is not sessions.current():
            return False
        return wish == "auto" or (wish == "ringside") == (self.engine == "ringside")

    def _take_place(self, model: DistributedDataParallel, carrier: BucketReducer) -> None:
        """Let our hook carry the model's gradients, unless the script has put one of its own there first."""
        hook = self._hook
        marker = marker_of(model) if self.session is not None else None
        if marker is not None and self.session is not None:
            hook.marks = self.session.time_by(marker)
        if own_hook(model) is None and model._comm_hooks:
            self._clock.always_synced = True
            self._only_watch("the model already has a communication hook, which carries its gradients unseen")
            return
        hook.clock, hook.fuse = self._clock, self._fuse
        watch = self.session.watch if self.session is not None else None
        hook.board = board_of(watch)
        if watch is not None and any(parameter.is_cuda for parameter in model.parameters()):
            watch.pending = hook.pending
        for watched in (carrier, hook.carrier):
            if isinstance(watched, NativeReducer):
                watched.marks = hook.marks
        if hook.user is not None:
            self._only_watch("the script registered its own communication hook")
            return
        hook.carrier = carrier
        reducer = model.reducer
        if isinstance(carrier, RingsideReducer):
            carrier.share_buckets(model, lambda: hook.backwards)
            if self.session is not None:
                carrier.on_memory = functools.partial(
                    self.session.gradient_memory, _numbers.setdefault(model, next(_count))
                )
        if own_hook(model) is None or model.reducer is not reducer:  # sharing may take another one
            put_hook(model, hook)

    def _only_watch(self, why: str) -> None:
        self.engine, self.why = str(dist.get_backend(self._group)), why

    # -------------------------------------------------------------------------------- called by the model's methods

    def forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell the clock, and compare replicas if it is time to."""
        model = self._model()
        self._hook.forward_begins(model is not None and model.require_backward_grad_sync)
        self._fuse.run(self._forward_begins, args, kwargs)
        if self.count_work is not None:
            self.count_work(args, kwargs)  # the step that it is told of is open now

    def forward_ends(self) -> None:
        """Tell the clock."""
        self._fuse.run(self._clock.forward_ends)
        self._hook.forward_ends()

    def buffers_begin(self) -> None:
        """Tell the clock."""
        self._fuse.run(self._clock.blocks)

    def buffers_end(self, seconds: float) -> None:
        """Tell the clock."""
        self._fuse.run(self._clock.blocked, seconds)

    def yields(self, hook: UserHook) -> None:
        """Say that the script's own hook carries the gradients from now on."""
        self._only_watch(f"the script registered its own communication hook {getattr(hook, '__qualname__', hook)}")
        if dist.get_rank() == 0:
            _log.warning("ringside only watches this model: %s", self.why)

    def _compare_replicas(self, digests: ParameterDigests) -> None:
        """Before a forward pass all updates are done, and buffers not yet touched: replicas must be the same."""
        # With a communication hook of the script's own replicas may rightly differ, as with local SGD.
        if self._hook.user is not None or self.session is None or self.session.is_aside:
            return
        began = time.perf_counter()
        if digests.look(self._hook.backwards, self._clock.step - 1):
            self._clock.instrumented(time.perf_counter() - began)

    def _forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            self._clock.forward_begins(0)
            return
        self._clock.forward_begins(_samples(args, kwargs))
        if self._digests is not None:
            self._compare_replicas(self._digests)


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
    best (`ringside.Communicator`). For CUDA models the process group's own collective carries them and Ringside only
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
    wish = engine or os.environ.get("RINGSIDE_ENGINE") or "auto"
    if wish not in ENGINES:
        raise UsageError(f"there is no engine {wish!r}; there are {', '.join(ENGINES)}")
    if os.environ.get("RINGSIDE", "").lower() in ("off", "0"):
        return _Detached(model, "RINGSIDE=off")
    if getattr(model, "_use_python_reducer", False):
        why = "torch.compile has its gradients reduced as they are compiled (optimize_ddp = 'python_reducer')"
        if wish == "ringside":
            raise UnsupportedError(f"the ringside engine cannot carry this model: {why}")
        if dist.get_rank() == 0:
            _say_once(f"ringside leaves this model alone: {why}")
        return _Detached(model, why)
    every = digest_steps(digest_every)
    earlier = attachment_of(model)
    if earlier is not None:
        if earlier.serves(wish, monitor):
            return earlier
        earlier.detach()
    decision, carrier = _open(model, wish)
    if wish == "ringside" and decision.engine != "ringside":
        raise UnsupportedError(f"the ringside engine cannot carry this model: {decision.why}")
    if decision.engine != "ringside" and wish != "native" and dist.get_rank() == 0:
        _say_once(f"ringside only watches this model: {decision.why}")
    if monitor and dist.get_world_size(model.process_group) < dist.get_world_size():
        # Ranks of different groups do different work, and nobody may be compared with them (or wait for their records).
        if dist.get_rank(model.process_group) == 0:
            _say_once("steps of a model that only some ranks train are not recorded yet, only synchronised")
        monitor = False
    every = agree_on_digests(model.process_group, every) if monitor else 0
    session = _watched(run_dir, decision.engine) if monitor else None
    _leave_at_exit(carrier)
    return Attachment(model, decision, carrier, session, every)


def attachment_of(model: DistributedDataParallel) -> Attachment | None:
    """Return the hold on a model; None where it is not attached."""
    found: Attachment | None = holders.get(model)
    return found


def _watched(run_dir: str | os.PathLike[str] | None, engine: str) -> Session | None:
    """Return this process's session; where it cannot be made, training goes on without."""
    try:
        return sessions.begin(run_dir, engine)
    except Exception as error:
        Guard("watching this rank").blow(error)
        return None


_count = itertools.count()
_numbers: Any = WeakIdKeyDictionary()
"""What runs call each model that was attached."""
_said: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()


def _say_once(message: str) -> None:
    """Warn, but not again for the next model of the same job."""
    assert dist.group.WORLD is not None  # there is a model with a process group
    said = _said.setdefault(dist.group.WORLD, set())
    if message not in said:
        said.add(message)
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


def _objection(model: DistributedDataParallel) -> str:
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices - {"cpu"}:
        return f"its parameters are on {', '.join(sorted(devices))}, and shared memory is for CPU tensors"
    hook = own_hook(model)
    if (hook is not None and hook.user is not None) or (hook is None and model._comm_hooks):
        return "the model already has a communication hook"
    return ""


def _open(model: DistributedDataParallel, wish: str) -> tuple[EngineDecision, BucketReducer]:
    """Agree on who carries the gradients and open it; where one rank cannot, nobody does. A collective."""
    group = model.process_group
    decision = decide(group, wish, _objection(model))
    if decision.engine != "ringside":
        return decision, NativeReducer(group)
    communicator: HostCommunicator | GroupCommunicator | None = None
    problem = ""
    try:
        communicator = _communicator(group, decision)
    except Exception as error:  # whatever it is: the others wait to hear of it
        problem = str(error) or type(error).__name__
    problem = first_problem(group, problem)
    if communicator is not None and not problem:
        return decision, RingsideReducer(communicator, group)
    if communicator is not None:
        communicator.close()
    return EngineDecision("native", why=problem), NativeReducer(group)


def _communicator(group: dist.ProcessGroup, decision: EngineDecision) -> HostCommunicator | GroupCommunicator:
    timeout_s = OwnTimeout(group).seconds()
    if decision.hosts > 1:
        return GroupCommunicator(group, timeout_s=timeout_s)
    settings = Settings.of_environment(timeout_s=timeout_s)
    return HostCommunicator(decision.key, dist.get_rank(group), dist.get_world_size(group), settings)


_carriers: weakref.WeakSet[BucketReducer] = weakref.WeakSet()


def _leave_at_exit(carrier: BucketReducer) -> None:
    """See to it that at exit peers learn that this rank leaves before its session says its good-byes to them."""
    _carriers.add(carrier)
    atexit.unregister(_leave)  # exit handlers run last to first, and the session's must come after this one
    atexit.register(_leave)


def _leave() -> None:
    for carrier in list(_carriers):
        carrier.close(at_once=True)  # every backward has been waited for, or it was given up


def _idle_clock() -> Any:
    from ringside.monitor.step_clock.clock import StepClock

    return StepClock(dist.get_rank(), lambda record: None)


def _samples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the length of the first tensor's first dimension: the usual place of the batch."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return value.shape[0]
    return 0
