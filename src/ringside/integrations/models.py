"""The DistributedDataParallel model inside what a framework hands out, and Ringside's hold on it."""

from __future__ import annotations

import gc
import logging
import os
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringside import pytorch as sync
from ringside.integrations.work import WorkCount
from ringside.pytorch import Attachment

_log = logging.getLogger("ringside")


def ddp_of(model: Any) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel model that this is, compiled or not; None where it is none."""
    inner = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    return inner if isinstance(inner, DistributedDataParallel) else None


def wrapper_of(module: nn.Module) -> DistributedDataParallel | None:
    """Return the newest DistributedDataParallel model around `module`; None where there is none.

    For frameworks that show only what is inside: it walks all objects that Python knows, once per training.
    """
    around = [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), DistributedDataParallel)
        and thing.__dict__.get("_modules", {}).get("module") is module
    ]
    return around[-1] if around else None


class Holder:
    """What callbacks of frameworks have in common: what the script asked for, and the hold on its model.

    Args:
        engine, run_dir, digest_every: As of `ringside.attach`.

    Attributes:
        attachment: Ringside's hold on the model while and after it is trained; None before, and where there is none.
    """

    def __init__(
        self,
        *,
        engine: str | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        digest_every: int | None = None,
    ) -> None:
        self._wishes: dict[str, Any] = {"engine": engine, "run_dir": run_dir, "digest_every": digest_every}
        self.attachment: Attachment | None = None

    def take(self, model: Any, ddp: DistributedDataParallel | None) -> None:
        """Hold a framework's model by the DistributedDataParallel around it; where there is none, say why not.

        Raises:
            UsageError: As `ringside.attach`.
        """
        if ddp is None:
            say_why_not(model)
        else:
            self.attachment = hold(ddp, **self._wishes)


def hold(
    model: DistributedDataParallel,
    *,
    engine: str | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    digest_every: int | None = None,
) -> Attachment:
    """Attach a framework's model, and count the tokens or samples of its batches. A collective.

    Where it is attached already (by `ringside run`, or by an earlier line) that stays as it is.

    Args:
        model, engine, run_dir, digest_every: As of `ringside.attach`.

    Raises:
        UsageError: As `ringside.attach`.
    """
    attachment = sync.attach(model, engine=engine, run_dir=run_dir, digest_every=digest_every)
    if attachment.attached and attachment.count_work is None:
        attachment.count_work = WorkCount(attachment).count
    return attachment


def attachment_of(model: Any) -> Attachment | None:
    """Return Ringside's hold on a model that a framework has wrapped; None where there is none."""
    ddp = ddp_of(model)
    return sync.attachment_of(ddp) if ddp is not None else None


def say_why_not(model: Any, level: int = logging.WARNING) -> None:
    """Say, on rank 0 and only where several processes train, that this model is not watched."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if several and dist.get_rank() == 0:
        _log.log(
            level,
            "ringside does not watch this training: it holds DistributedDataParallel models, and this is a %s "
            "(sharded by FSDP or DeepSpeed?)",
            type(model).__name__,
        )
