"""An attached model: what `attach()` returns, and DDP's methods, changed once for the class, that report to it.

Nothing of Ringside's lies in a model: it would be copied and pickled with it, as `AveragedModel(ddp)`,
`copy.deepcopy(ddp)` and `torch.save(ddp)` do. A copy is a model that is not attached, and trains as stock DDP's does.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ringside.autoload.after_import import after_import
from ringside.isolation import Guard
from ringside.monitor.step_clock import StepClock
from ringside.pytorch.ddp.cuda_events import marker_of
from ringside.pytorch.ddp.hook import GradientHook
from ringside.pytorch.ddp.reducers import UserHook
from ringside.pytorch.ddp.ringside_reducer import BucketReducer, RingsideReducer
from ringside.pytorch.ddp.watcher import BackwardWatch
from ringside.pytorch.hang_watch.board import NoBoard
from ringside.pytorch.recording import session as sessions
from ringside.pytorch.recording.parameter_digests import ParameterDigests, shared_parameters
from ringside.pytorch.recording.session import Session
from ringside.pytorch.store import EngineDecision

_log = logging.getLogger(__name__)
Followed = GradientHook | BackwardWatch
"""A backward whose gradients are reduced by us, or only watched."""

_attachments: MutableMapping[Any, Attachment] = WeakIdKeyDictionary()
"""Of each attached model."""

_hooks: MutableMapping[Any, GradientHook] = WeakIdKeyDictionary()
"""Our hook in each model that has one, attached or not any more: DDP takes one hook in its life."""

_groups: list[dist.ProcessGroup] = []
"""Groups of models that have our hook, until they are destroyed and another model gets it.

A DDP model that outlives its group would free it, with the GIL held, and the group waits for Gloo's threads, one of
which may want the GIL to be rid of a callback of ours.
"""

_stock: dict[str, Callable[..., Any]] = {}
"""DDP's own methods by name, and that of its Join."""

_count = itertools.count()
_numbers: MutableMapping[Any, int] = WeakIdKeyDictionary()
"""What runs call each model that was attached."""


class Attachment:
    """What `attach()` returns: Ringside's hold on one model.

    Args:
        model: The model.
        why: Why the engine is not ringside; empty: it is.
        session: The monitor of this process; None: nothing is recorded.
        backward: What reduces or watches the gradients; None: Ringside leaves the model alone.

    Attributes:
        engine: What reduces gradients: `ringside`, or the process group's backend (`gloo`, `nccl`).
        why: Why it is not ringside, where it is not.
        session: The monitor of this process; None where `monitor=False` or RINGSIDE=off.
        count_work: Called with the arguments of every forward pass, to count how much work a batch is; never raises.
    """

    def __init__(
        self, model: DistributedDataParallel, why: str, session: Session | None = None, backward: Followed | None = None
    ) -> None:
        self._model = weakref.ref(model)  # whose attachment it is in `_attachments` while it lives
        self._group = model.process_group
        self.engine, self.why, self.session = str(dist.get_backend(self._group)), why, session
        self.count_work: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None
        self._backward = backward
        self._digests: ParameterDigests | None = None
        self._clock = session.clock if session is not None else _idle_clock()
        self._guard = session.guard if session is not None else Guard("timing the steps of this rank")

    @property
    def attached(self) -> bool:
        """Tell whether the model is still watched."""
        model = self._model()
        return model is not None and _attachments.get(model) is self

    @property
    def counters(self) -> dict[str, int]:
        """Collectives so far by what reduced them, such as `{"ringside/push": 120}` or `{"gloo": 120}`."""
        return {} if self._backward is None else dict(self._backward.counters)

    def detach(self) -> None:
        """Stop watching; the process group reduces the gradients (DDP cannot drop a hook of ours, where it has one)."""
        model, backward = self._model(), self._backward
        if backward is None or (model is not None and not self.attached):
            return
        if model is not None:
            del _attachments[model]
        if self._digests is not None and self.session is not None:
            self.session.remove_model(self._digests)
        backward.stop(self._group, _idle_clock())
        if model is not None and backward.is_unfinished:
            # The next backward is one anew. It may make its buckets once more, a collective: all ranks do this alike.
            model.reducer._reset_state()
        backward.is_unfinished = False

    def _record_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], backward: Followed) -> None:
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
        if digests is None or backward.has_user_hook or self.session is None or self.session.is_paused:
            return
        began = time.perf_counter()
        if digests.check(backward.backwards, self._clock.step - 1):
            self._clock.instrumented(time.perf_counter() - began)


def hold(
    model: DistributedDataParallel,
    decision: EngineDecision,
    reducer: BucketReducer,
    session: Session | None,
    digest_every: int,
) -> Attachment:
    """Attach a model: let our hook reduce its gradients, or only watch its backward.

    Args:
        model: The model.
        decision: Which engine reduces them, and why.
        reducer: Does it, where our hook is what DDP calls.
        session: Watches the steps; None: nobody does.
        digest_every: Steps between two comparisons of the parameters; 0: never.
    """
    _change_methods()
    clock = session.clock if session is not None else _idle_clock()
    # DDP takes one hook in its life: a model that has ours already keeps it. Only watching needs none.
    ours = own_hook(model)
    backward: Followed
    if ours is None and decision.engine != "ringside":
        backward = BackwardWatch(model, clock)
    else:
        defers = model.static_graph or not model.find_unused_parameters
        backward = ours or GradientHook(reducer, clock, delayed=model.static_graph, defers=defers)
    attachment = Attachment(model, decision.why, session, backward)
    backward.clock, backward.guard = clock, attachment._guard
    backward.board = NoBoard()
    if session is not None:
        if digest_every and session.size > 1:
            name = type(model.module).__name__
            attachment._digests = session.add_model(shared_parameters(model), digest_every, name)
        if session.watch is not None:
            backward.board = session.watch.board
        marker = marker_of(model)
        if marker is not None and isinstance(backward, BackwardWatch):
            backward.marks = session.use_device_events(marker)
            if session.watch is not None:
                session.watch.pending = backward.is_pending
    if backward.has_user_hook:
        attachment.why = "the model already has a communication hook"
    elif isinstance(backward, GradientHook):
        backward.reducer = reducer
        attachment.engine = "ringside" if decision.engine == "ringside" else attachment.engine
        _put_hook(model, backward, session)
    _attachments[model] = attachment
    return attachment


def _put_hook(model: DistributedDataParallel, hook: GradientHook, session: Session | None) -> None:
    """Have DDP call our hook, which is not among those that the model lists, and copies with it."""
    ddp_reducer = model.reducer
    if isinstance(hook.reducer, RingsideReducer):
        hook.reducer.share_buckets(model, lambda: hook.backwards)
        if session is not None:
            own = {"model": _numbers.setdefault(model, next(_count))}
            hook.reducer.on_memory = lambda memory: session.put_event("gradient_memory", {**own, **memory})
    if own_hook(model) is None or model.reducer is not ddp_reducer:  # sharing may make another one
        dist._register_comm_hook(model.reducer, weakref.ref(model), hook.run)  # type: ignore[attr-defined]
        _hooks[model] = hook
        # Groups that were destroyed meanwhile are freed here, by Python: that lets other threads have the GIL.
        live = distributed_c10d._world.pg_map
        _groups[:] = [each for each in _groups if each in live and each is not model.process_group]
        _groups.append(model.process_group)


def satisfies(attachment: Attachment, requested: str, monitor: bool) -> bool:
    """Tell whether another `attach` with these arguments would change nothing."""
    session, backward = attachment.session, attachment._backward
    if not attachment.attached or (session is not None) != monitor or backward is None or backward.abort_reason:
        return False
    if session is not None and session is not sessions.current():
        return False
    return requested == "auto" or (requested == "ringside") == (attachment.engine == "ringside")


def attachment_of(model: DistributedDataParallel) -> Attachment | None:
    """Return the hold on a model; None where it is not attached."""
    return _attachments.get(model)


def own_hook(model: DistributedDataParallel) -> GradientHook | None:
    """Return our hook, if this model has one."""
    return _hooks.get(model)


def backward_of(model: DistributedDataParallel) -> Followed | None:
    """Return what reduces or watches a model's gradients; of a detached one our hook, which DDP still calls."""
    attachment = _attachments.get(model)
    return _hooks.get(model) if attachment is None else attachment._backward


def _idle_clock() -> StepClock:
    return StepClock(dist.get_rank(), lambda record: None)


@functools.cache
def _change_methods() -> None:
    """Change the class, the first time this is called."""
    ddp: Any = DistributedDataParallel
    methods: dict[str, Callable[..., Any]] = {
        "forward": _forward,
        "_sync_buffers": _sync_buffers,
        "register_comm_hook": _register_comm_hook,
        "_register_builtin_comm_hook": _register_builtin_comm_hook,
    }
    for name, changed in methods.items():
        _stock[name] = getattr(ddp, name)
        setattr(ddp, name, functools.wraps(_stock[name])(changed))
    # The all-reduce by which a rank learns how many go on under `model.join()` is what our hook divides by.
    stock = _stock["notify_join_context"] = Join.notify_join_context
    Join.notify_join_context = staticmethod(functools.wraps(stock)(_notify_join_context))  # type: ignore[method-assign]
    # What torch.compile runs calls our Python, and must not look into it.
    after_import("torch._dynamo.trace_rules", lambda rules: rules.add("ringside"))


# What takes the place of DDP's methods.


def _forward(self: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
    attachment = _attachments.get(self)
    backward = backward_of(self)
    syncs = self.require_backward_grad_sync
    if attachment is not None and backward is not None:
        backward.forward_begins(syncs)
        attachment._guard.run(attachment._record_forward, inputs, kwargs, backward)
        if attachment.count_work is not None:
            attachment.count_work(inputs, kwargs)  # the clock has opened the step that the work is counted for
    output = _stock["forward"](self, *inputs, **kwargs)
    if attachment is not None:
        attachment._guard.run(attachment._clock.forward_ends)
    if backward is not None:
        backward.forward_ends(output, syncs)
    return output


def _sync_buffers(self: DistributedDataParallel) -> None:
    attachment = _attachments.get(self)
    if attachment is None:
        _stock["_sync_buffers"](self)
        return
    began = time.perf_counter()
    attachment._guard.run(attachment._clock.blocks)
    _stock["_sync_buffers"](self)
    attachment._guard.run(attachment._clock.blocked, time.perf_counter() - began)


def _notify_join_context(joinable: Joinable) -> dist.Work | None:
    """DDP itself divides by the number of ranks that go on, where there is no hook."""
    work: dist.Work | None = _stock["notify_join_context"](joinable)
    ours = _hooks.get(joinable)
    if ours is not None:
        ours.ranks_left = work.get_future() if work is not None else None
    return work


# DDP calls one hook. Where that is ours, the script's runs inside it; DDP itself refuses a second one.


def _register_comm_hook(self: DistributedDataParallel, state: object, hook: UserHook) -> None:
    ours = own_hook(self)
    if ours is None or ours.has_user_hook:
        _stock["register_comm_hook"](self, state, hook)
    else:
        self._check_comm_hook(hook)  # type: ignore[no-untyped-call]
        ours.use_user_hook(self.process_group, state, hook)
        self.logger._set_comm_hook_name(hook.__qualname__)  # type: ignore[union-attr]
        self._comm_hooks.append((hook, state))
    _use_user_hook(self, getattr(hook, "__qualname__", str(hook)))


def _register_builtin_comm_hook(self: DistributedDataParallel, comm_hook_type: BuiltinCommHookType) -> None:
    ours = own_hook(self)
    halves = comm_hook_type == BuiltinCommHookType.FP16_COMPRESS
    hook = default_hooks.fp16_compress_hook if halves else default_hooks.allreduce_hook
    if ours is None or ours.has_user_hook:
        _stock["_register_builtin_comm_hook"](self, comm_hook_type)
    else:
        ours.use_user_hook(self.process_group, self.process_group, hook)
        self.logger._set_comm_hook_name(str(comm_hook_type))  # type: ignore[union-attr]
    _use_user_hook(self, hook.__qualname__)


def _use_user_hook(model: DistributedDataParallel, name: str) -> None:
    """The script's own hook reduces the gradients from now on: watch, and warn once."""
    attachment = _attachments.get(model)
    if attachment is None:
        return
    if isinstance(attachment._backward, BackwardWatch):
        attachment._backward.use_user_hook(name)
    attachment.engine = str(dist.get_backend(model.process_group))
    attachment.why = f"the script registered its own communication hook {name}"
    if dist.get_rank() == 0:
        _log.warning("ringside only watches this model: %s", attachment.why)
