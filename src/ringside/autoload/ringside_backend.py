"""Makes "ringside" a backend of torch.distributed, without loading anything before somebody makes a group.

torch calls `register` by an entry point: when somebody asks for the backend (since 2.14), or when torch is imported
(since 2.5, by way of `ringside_entry`); `import ringside` calls `offer`, for older ones and where
TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from it.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from types import ModuleType
from typing import Any

from ringside.autoload.after_import import after_import
from ringside.installation import warn_of_namesake

NAME = "ringside"
TARGET = "torch.distributed.distributed_c10d"
HELPER = (
    *("group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name"),
    *("backend_options", "timeout", "pg_tag", "device_id", "group_desc"),
)
"""What torch's maker of groups takes, up to 2.13."""

NOT_HERE = 'RINGSIDE_AS_GLOO is not for this torch: "gloo" stays Gloo (torch 2.13 to 2.15 were tested)'

_log = logging.getLogger("ringside")


def offer() -> None:
    """Register as soon as torch.distributed is imported."""
    after_import(TARGET, _register)


def register() -> None:
    """Register now: torch has been imported, and calls this.

    Where another package's `ringside/__init__.py` lies over ours, this is the first code of ours to run.
    """
    if "offer" not in vars(sys.modules["ringside"]):
        warn_of_namesake()
    if TARGET in sys.modules:  # not where torch was built without torch.distributed
        _register(sys.modules[TARGET])


def _register(c10d: ModuleType) -> None:
    if NAME not in c10d.Backend.backend_list:
        # From torch 2.14 on what is made is a backend for CPUs, in a group of torch's own that has NCCL beside it.
        devices = ["cpu"] if hasattr(c10d.Backend, "_ensure_backend_registered") else ["cpu", "cuda"]
        c10d.Backend.register_backend(NAME, make, extended_api=True, devices=devices)
        off = os.environ.get("RINGSIDE", "").lower() in ("off", "0")
        if os.environ.get("RINGSIDE_AS_GLOO", "0").lower() not in ("", "off", "0") and not off:
            serve_gloo(c10d)


def serve_gloo(c10d: ModuleType) -> None:
    """Have the engine carry the groups that are made by the name "gloo"."""
    try:
        if hasattr(c10d.Backend, "_ensure_backend_registered"):
            c10d.Backend._ensure_backend_registered("gloo")
            stock, devices = c10d.Backend._plugins["GLOO"].creator_fn, c10d.Backend.backend_capability["gloo"]
            creator = functools.partial(_make_for_gloo, stock)
            # Of the type CUSTOM: what is of the type GLOO DDP's C++ takes for a ProcessGroupGloo, which ours is not.
            c10d.Backend.register_backend("gloo", creator, extended_api=True, devices=devices)
            return
        # There "gloo" is a branch in torch's one maker of groups, which asks nobody.
        maker = c10d._new_process_group_helper
        names = maker.__code__.co_varnames[: maker.__code__.co_argcount]
        is_known = names == HELPER and hasattr(c10d.AllreduceOptions, "asyncOp")  # up to 2.7 it came to a standstill
    except Exception:  # a torch that is not known here: by its error `import torch` would fail
        is_known = False
    if not is_known:
        _log.warning(NOT_HERE)
        return

    @functools.wraps(maker)
    def make_group(*args: Any, **named: Any) -> Any:
        from ringside.pytorch.process_group import as_gloo

        return as_gloo.make_group(maker, {**dict(zip(HELPER, args, strict=False)), **named})

    vars(c10d)[maker.__name__] = make_group


def _make_for_gloo(stock: Any, options: Any, backend_options: Any) -> Any:
    """Make what torch is to use for "gloo", from torch 2.14 on."""
    from ringside.pytorch.process_group import as_gloo

    return as_gloo.make_backend(stock, options, backend_options)


def make(options: Any, backend_options: Any) -> Any:
    """Make a process group; torch calls it for `init_process_group("ringside")` and `new_group`."""
    from ringside.pytorch.process_group import creation

    return creation.make(options, backend_options)
