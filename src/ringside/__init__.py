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
    from ringside import survive as survive
    from ringside.engine import Communicator as Communicator
    from ringside.engine import HostCommunicator as HostCommunicator
    from ringside.engine import Work as Work
    from ringside.engine import init as init
    from ringside.monitor import Verdict as Verdict
    from ringside.pytorch import Attachment as Attachment
    from ringside.pytorch import attach as attach
    from ringside.pytorch import log_step as log_step
    from ringside.pytorch import watch as watch
    from ringside.pytorch.communicator.communicator import GroupCommunicator as GroupCommunicator
    from ringside.pytorch.communicator.communicator import communicator as communicator
    from ringside.view.run.recorded import Run as Run

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
    "init": "ringside.engine",
    "Communicator": "ringside.engine",
    "HostCommunicator": "ringside.engine",
    "GroupCommunicator": "ringside.pytorch.communicator.communicator",
    "communicator": "ringside.pytorch.communicator.communicator",
    "Run": "ringside.view.run.recorded",
    "attach": "ringside.pytorch",
    "log_step": "ringside.pytorch",
    "watch": "ringside.pytorch",
    "Attachment": "ringside.pytorch",
    "Verdict": "ringside.monitor",
    "Work": "ringside.engine",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name == "survive":
        return importlib.import_module("ringside.survive")
    raise AttributeError(f"module 'ringside' has no attribute {name!r}")


warn_of_namesake()
offer()
