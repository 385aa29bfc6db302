"""Makes a process group for torch.distributed, which calls this on every rank of it.

Parts of torch know their own backends by name: they are changed once, with the first group, so that they know groups of
ours as well. For every other group they do what they did. What torch.compile traces is told to leave our Python alone:
it is to it as the C++ of torch's own groups is, called and not looked into.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed import distributed_c10d as c10d

from ringside.autoload.after_import import after_import
from ringside.errors import UnsupportedError
from ringside.pytorch.process_group.backend import RingsideBackend, RingsideGroup, answer_for_works
from ringside.pytorch.process_group.carrier import Carrier, carrier_of

_log = logging.getLogger("ringside")

NEEDED = ("_set_default_backend", "_register_backend", "shutdown", "abort")

IS_BACKEND = hasattr(c10d.Backend, "_ensure_backend_registered")
"""Whether a backend can be written in Python (torch ≥ 2.14, which finds them by entry points, too)."""


def make(options: Any, pg_options: Any) -> Carrier:
    """Make what torch is to use: a backend of the group that it makes, or (torch ≤ 2.13) a group.

    Args:
        options: torch's: `store`, `group_rank`, `group_size`, `timeout`, `process_group`, ...
        pg_options: The caller's; they are for other backends and mean nothing here.

    Raises:
        MismatchError, DeadlineError: As `Carrier`.
        UnsupportedError: torch is too old.
    """
    too_old = missing()
    if too_old:
        raise UnsupportedError(f'{too_old}: use init_process_group("gloo") and ringside.attach(model)')
    change_torch()
    options.store.set(f"torch/{options.group_rank}", torch.__version__)
    made: Carrier
    if not IS_BACKEND or checks_every_call():
        made = RingsideGroup(options.store, options.group_rank, options.group_size, options.timeout)
    else:
        if torch.cuda.is_available() and dist.is_nccl_available() and options.process_group.name() == "custom":
            # The group was asked for by "ringside" alone: where "cuda:nccl" is named, torch makes NCCL's half itself.
            nccl = c10d.Backend._plugins["NCCL"].creator_fn(options, None)
            options.process_group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
        made = RingsideBackend.made_for(options)
    if options.group_rank == 0:
        _name_other_torch([options.store.get(f"torch/{r}").decode() for r in range(options.group_size)])
    return made


def _name_other_torch(versions: list[str]) -> None:
    """Say on which rank torch differs from rank 0's, whatever device it was built for: it may work, and may not."""
    rank = next((r for r, v in enumerate(versions) if v.partition("+")[0] != versions[0].partition("+")[0]), None)
    if rank is not None:
        _log.warning("rank %d has torch %s, where rank 0 has %s: give all the same", rank, versions[rank], versions[0])


def missing() -> str:
    """Return in words what this torch lacks for a process group of ours; "": nothing."""
    lacks = next((name for name in NEEDED if not hasattr(dist.ProcessGroup, name)), None)
    if lacks is None:
        return ""
    return (
        f"the process group needs a newer torch than {torch.__version__}, whose ProcessGroup has no {lacks} "
        "(2.7 is the first that will do)"
    )


def checks_every_call() -> bool:
    """Tell whether torch puts its wrapper around backends, which does not take one in Python (2.15)."""
    return bool(c10d.get_debug_level() == c10d.DebugLevel.DETAIL)


_stock: dict[str, Callable[..., Any]] = {}
"""What was in the place of each function and method below."""


@functools.cache
def change_torch() -> None:
    """Have the parts of torch that know its own backends by name know groups of ours as well; once."""
    if IS_BACKEND:
        answer_for_works()
    else:
        _patch(c10d, "monitored_barrier", _monitored_barrier)
        dist.monitored_barrier = c10d.monitored_barrier
        _patch(c10d, "_set_pg_timeout", _set_pg_timeout)
    after_import("torch.nn.parallel.distributed", change_ddp)
    # Traced, our methods would end in errors, or in calls of the engine with numbers that are none.
    after_import("torch._dynamo.trace_rules", lambda rules: rules.add("ringside"))


def change_ddp(module: ModuleType) -> None:
    """Have DDP, in torch's module of it, know groups of ours."""
    _patch(module.DistributedDataParallel, "_register_builtin_comm_hook", _register_builtin_comm_hook)
    _patch(module.DistributedDataParallel, "_ddp_init_helper", _ddp_init_helper)


def _patch(owner: Any, name: str, changed: Callable[..., None]) -> None:
    """Put `changed` in the place of what has its parameters; a torch that has none such is left as it is."""
    stock = getattr(owner, name, None)
    if stock is None or list(inspect.signature(stock).parameters) != list(inspect.signature(changed).parameters):
        _log.warning("%s of torch %s is not the one that ringside knows: it stays as it is", name, torch.__version__)
        return
    _stock[name] = stock
    setattr(owner, name, functools.wraps(stock)(changed))


def _monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """torch's refuses every group that is not named "gloo"."""
    own = group if group is not None else c10d._get_default_group()
    if isinstance(own, RingsideGroup):
        own.monitored_barrier(timeout, wait_all_ranks)
    else:
        _stock["monitored_barrier"](group, timeout, wait_all_ranks)


def _set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
    """torch's tells its own backends inside a group, and not the group."""
    own = group if group is not None else c10d._get_default_group()
    _stock["_set_pg_timeout"](timeout, group)
    if isinstance(own, RingsideGroup):
        own.set_timeout(timeout)


def _register_builtin_comm_hook(self: Any, comm_hook_type: Any) -> None:
    """DDP's C++ hook for halves wants futures that Python cannot make; its twin in Python does the same."""
    halves = comm_hook_type == BuiltinCommHookType.FP16_COMPRESS
    if halves and carrier_of(self.process_group) is not None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        self.register_comm_hook(self.process_group, fp16_compress_hook)
    else:
        _stock["_register_builtin_comm_hook"](self, comm_hook_type)


def _ddp_init_helper(
    self: Any, parameters: Any, expect_sparse_gradient: Any, param_to_name_mapping: Any, static_graph: bool
) -> None:
    """Where DDP makes its buckets it knows nothing of groups; over one of ours peers are to map them."""
    given = parameters, expect_sparse_gradient, param_to_name_mapping, static_graph
    make = functools.partial(_stock["_ddp_init_helper"], self, *given)
    carrier = carrier_of(self.process_group)
    if carrier is not None and carrier.shares_buckets:
        from ringside.pytorch.ddp.bucket_memory import make_reducer

        make_reducer(self, make, static_graph)
    else:
        make()
