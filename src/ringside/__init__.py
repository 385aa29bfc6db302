"""Ringside: all-reduce algorithms as data; run, seen, predicted and survived.

`ringside.attach(ddp_model)` synchronises and watches a DistributedDataParallel model; `ringside.communicator(group)`
is a communicator over a process group, on one host or several; `ringside.init()` is one without torch, on one host;
`ringside.Run(path)` is what a run recorded. After `import ringside`, `init_process_group("ringside")` makes a process
group of torch.distributed. Nothing heavy is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ringside._version import __version__ as __version__
from ringside.autoload.ringside_backend import offer
from ringside.errors import (
    ClosedError,
    DeadlineError,
    MismatchError,
    PeerLostError,
    RingsideError,
    StoreGoneError,
    SyncError,
    UnsupportedError,
    UsageError,
)
from ringside.installation import warn_of_namesake

if TYPE_CHECKING:
    from ringside import survive
    from ringside.engine import Communicator, HostCommunicator, Work, init
    from ringside.monitor import Verdict
    from ringside.pytorch import Attachment, attach, log_step, watch
    from ringside.pytorch.communicator.communicator import GroupCommunicator, communicator
    from ringside.view.run.recorded import Run

    _kinds: tuple[type[Communicator], ...] = (HostCommunicator, GroupCommunicator)  # mypy: both can do all of it

__all__ = [
    "Attachment",
    "ClosedError",
    "Communicator",
    "DeadlineError",
    "GroupCommunicator",
    "HostCommunicator",
    "MismatchError",
    "PeerLostError",
    "RingsideError",
    "Run",
    "StoreGoneError",
    "SyncError",
    "UnsupportedError",
    "UsageError",
    "Verdict",
    "Work",
    "attach",
    "communicator",
    "init",
    "log_step",
    "survive",
    "watch",
]

_LAZY = {
    "ringside.engine": ("Communicator", "HostCommunicator", "Work", "init"),
    "ringside.monitor": ("Verdict",),
    "ringside.pytorch": ("Attachment", "attach", "log_step", "watch"),
    "ringside.pytorch.communicator.communicator": ("GroupCommunicator", "communicator"),
    "ringside.view.run.recorded": ("Run",),
}


def __getattr__(name: str) -> Any:
    for module, names in _LAZY.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    if name == "survive":
        return importlib.import_module("ringside.survive")
    raise AttributeError(f"module 'ringside' has no attribute {name!r}")


warn_of_namesake()
offer()
