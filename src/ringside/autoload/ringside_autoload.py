"""Attaches Ringside to every DistributedDataParallel model that a script makes, without the script's knowledge.

A script without one is watched by its process groups, from its second step on.

The class is changed when torch has been imported, not before: a process that never imports torch pays nothing.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ringside.autoload.after_import import after_import
from ringside.processes import die_with_parent

FIRST = "RINGSIDE_RANK_PID"
"""Set by a rank for the processes that it starts, which are none."""

TARGET = "torch.nn.parallel.distributed"
OPTIMIZER = "torch.optim.optimizer"

_log = logging.getLogger("ringside")


def install() -> None:
    """Have every DistributedDataParallel model of this process attached when it is made; a rank ends with torchrun."""
    if FIRST not in os.environ:
        os.environ[FIRST] = str(os.getpid())
        die_with_parent(signal.SIGTERM)
    after_import(TARGET, _wrap_ddp)
    after_import(OPTIMIZER, _watch_after_first_update)


def _watch_after_first_update(module: ModuleType) -> None:
    """Watch by process groups a script that has attached no model by its first optimizer update.

    All ranks come to that, and to the forward pass after it, where it is done: hooks of optimizers cannot be changed
    while they are called.
    """
    if not hasattr(module, "register_optimizer_step_post_hook"):
        return
    forward: list[Any] = []

    def updated(*_: Any) -> None:
        torch = sys.modules["torch"]
        if not forward and torch.distributed.is_available() and torch.distributed.is_initialized():
            forward.append(torch.nn.modules.module.register_module_forward_pre_hook(begin))

    def begin(*_: Any) -> None:
        hook.remove()
        forward[0].remove()
        try:
            from ringside import pytorch

            if not pytorch.has_session():
                pytorch.watch_unasked()
        except Exception as error:
            _warn(f"this job is not watched ({type(error).__name__}: {error}); training goes on without Ringside")

    hook = module.register_optimizer_step_post_hook(updated)


def _wrap_ddp(module: ModuleType) -> None:
    made: Callable[..., None] = module.DistributedDataParallel.__init__
    if getattr(made, "_ringside", False):  # a module may be imported anew, and be changed already
        return

    @functools.wraps(made)
    def make_and_attach(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        # A script that knows nothing of Ringside must not end because of it.
        try:
            import ringside

            ringside.attach(self)
        except Exception as error:
            _warn(f"this model is not watched ({type(error).__name__}: {error}); training goes on without Ringside")

    make_and_attach._ringside = True  # type: ignore[attr-defined]
    module.DistributedDataParallel.__init__ = make_and_attach


@functools.cache
def _warn(message: str) -> None:
    """Log it once per process; as a warning on rank 0 alone."""
    _log.log(logging.WARNING if os.environ.get("RANK") == "0" else logging.DEBUG, "%s", message)
