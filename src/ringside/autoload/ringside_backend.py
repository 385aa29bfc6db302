"""Makes "ringside" a backend of torch.distributed, without loading anything before somebody makes a group.

torch calls `register` by an entry point: when somebody asks for the backend (since 2.14), or when torch is imported
(since 2.5, by way of `ringside_entry`); `import ringside` calls `offer`, for older ones and where
TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ringside.autoload.after_import import after_import
from ringside.installation import warn_of_namesake

NAME = "ringside"
TARGET = "torch.distributed.distributed_c10d"


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


def make(options: Any, backend_options: Any) -> Any:
    """Make a process group; torch calls it for `init_process_group("ringside")` and `new_group`."""
    from ringside.pytorch.process_group import creation

    return creation.make(options, backend_options)
