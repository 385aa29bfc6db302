"""Methods of DistributedDataParallel, changed once for the class, which look up whether a model is attached.

Nothing of Ringside's lies in a model: it would be copied and pickled with it, as `AveragedModel(ddp)`,
`copy.deepcopy(ddp)` and `torch.save(ddp)` do. A copy is a model that is not attached, and trains as stock DDP's does.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ringside.autoload.after_import import after_import
from ringside.pytorch.ddp.hook import GradientHook
from ringside.pytorch.ddp.reducers import UserHook


class MethodHolder(Protocol):
    """What holds a model, and must not keep it alive."""

    def forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before each forward pass, with what the model is called with."""

    def forward_ends(self) -> None:
        """Called after each forward pass that did not raise."""

    def buffers_begin(self) -> None:
        """Called before buffers are sent to all ranks."""

    def buffers_end(self, seconds: float) -> None:
        """Called when they have been, with what that took."""

    def hook_registered(self, hook: UserHook) -> None:
        """Called when a communication hook of the script's own has taken the place of ours."""


holders: Any = WeakIdKeyDictionary()
"""What holds each attached model."""

_hooks: Any = WeakIdKeyDictionary()
"""Our hook in each model that has one, attached or not any more: DDP takes one hook in its life."""

_groups: list[dist.ProcessGroup] = []
"""Groups of models that have our hook, until they are destroyed and another model gets it.

A DDP model that outlives its group would free it, with the GIL held, and the group waits for Gloo's threads, one of
which may want the GIL to be rid of a callback of ours.
"""


def own_hook(model: DistributedDataParallel) -> GradientHook | None:
    """Return our hook, if this model has one."""
    hook: GradientHook | None = _hooks.get(model)
    return hook


def put_hook(model: DistributedDataParallel, hook: GradientHook) -> None:
    """Have DDP call our hook; it is not among those that the model lists, and copies with it."""
    dist._register_comm_hook(model.reducer, weakref.ref(model), hook.run)  # type: ignore[attr-defined]
    _hooks[model] = hook
    # Those that were destroyed meanwhile are freed here, by Python: that lets other threads have the GIL.
    live = distributed_c10d._world.pg_map
    _groups[:] = [each for each in _groups if each in live and each is not model.process_group]
    _groups.append(model.process_group)


@functools.cache
def change_methods() -> None:
    """Change the class, the first time this is called."""
    ddp: Any = DistributedDataParallel
    for name, changed in (
        ("forward", _watch_forward),
        ("_sync_buffers", _time_buffers),
        ("register_comm_hook", _watch_comm_hook),
        ("_register_builtin_comm_hook", _watch_builtin_hook),
    ):
        if hasattr(ddp, name):
            setattr(ddp, name, functools.wraps(getattr(ddp, name))(changed(getattr(ddp, name))))
    # The all-reduce by which a rank learns how many go on under `model.join()` is what our hook divides by.
    Join.notify_join_context = staticmethod(_note_join(Join.notify_join_context))  # type: ignore[method-assign]
    # What torch.compile runs calls our Python, and must not look into it.
    after_import("torch._dynamo.trace_rules", lambda rules: rules.add("ringside"))


def _watch_forward(stock: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
        holder: MethodHolder | None = holders.get(self)
        if holder is None:
            output = stock(self, *inputs, **kwargs)
            ours = own_hook(self)
            if ours is not None:  # it was attached, and DDP still calls the hook
                ours.forward_ends()
            return output
        holder.forward_begins(inputs, kwargs)
        output = stock(self, *inputs, **kwargs)
        holder.forward_ends()
        return output

    return forward


def _time_buffers(stock: Callable[..., None]) -> Callable[..., None]:
    def _sync_buffers(self: DistributedDataParallel) -> None:
        holder: MethodHolder | None = holders.get(self)
        if holder is None:
            stock(self)
            return
        began = time.perf_counter()
        holder.buffers_begin()
        stock(self)
        holder.buffers_end(time.perf_counter() - began)

    return _sync_buffers


def _note_join(stock: Callable[..., dist.Work | None]) -> Callable[..., dist.Work | None]:
    """DDP itself divides by the number of ranks that go on, where there is no hook."""

    @functools.wraps(stock)
    def notify_join_context(joinable: Joinable) -> dist.Work | None:
        work = stock(joinable)
        ours = _hooks.get(joinable)
        if ours is not None:
            ours.ranks_left = work.get_future() if work is not None else None
        return work

    return notify_join_context


# DDP calls one hook, and that is ours: the script's runs inside it. DDP itself refuses a second one.


def _watch_comm_hook(stock: Callable[..., None]) -> Callable[..., None]:
    def register_comm_hook(self: DistributedDataParallel, state: object, hook: UserHook) -> None:
        ours = own_hook(self)
        if ours is None or ours.user is not None:
            stock(self, state, hook)
            return
        self._check_comm_hook(hook)  # type: ignore[no-untyped-call]
        _use_user_hook(self, ours, state, hook, hook.__qualname__)
        self._comm_hooks.append((hook, state))

    return register_comm_hook


def _watch_builtin_hook(stock: Callable[..., None]) -> Callable[..., None]:
    def _register_builtin_comm_hook(self: DistributedDataParallel, comm_hook_type: BuiltinCommHookType) -> None:
        ours = own_hook(self)
        if ours is None or ours.user is not None:
            stock(self, comm_hook_type)
            return
        halves = comm_hook_type == BuiltinCommHookType.FP16_COMPRESS
        hook = default_hooks.fp16_compress_hook if halves else default_hooks.allreduce_hook
        _use_user_hook(self, ours, self.process_group, hook, str(comm_hook_type))

    return _register_builtin_comm_hook


def _use_user_hook(
    model: DistributedDataParallel, ours: GradientHook, state: object, hook: UserHook, name: str
) -> None:
    ours.use_user_hook(model.process_group, state, hook)
    model.logger._set_comm_hook_name(name)  # type: ignore[union-attr]
    holder: MethodHolder | None = holders.get(model)
    if holder is not None:
        holder.hook_registered(hook)
