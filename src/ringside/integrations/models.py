"""The DistributedDataParallel model inside what a framework hands out, and Ringside's hold on it."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringside import pytorch as sync
from ringside.isolation import Guard
from ringside.pytorch import Attachment

# -------------------------------------------------------------------------------------------------
# How much work a batch is: tokens where it shows them, else samples.

TOKENS = "input_ids"
"""What Hugging Face calls a batch's tokens."""


def work_of(*given: Any) -> int:
    """Return the tokens of a batch, padding included, since that is computed, too; without tokens its samples.

    Args:
        given: What a model is called with: tensors, or mappings and sequences of them however nested. Tokens are a
            mapping's integer tensor `input_ids`, [samples, tokens]; samples are the first dimension of the first tensor
            that has one.

    Returns:
        The number; 0 where there is no tensor.
    """
    samples = 0
    for name, tensor in _tensors("", given):
        if name == TOKENS:
            return tensor.numel()
        samples = samples or tensor.shape[0]
    return samples


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.dim() > 0:
            yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(str(key), inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _tensors(name, inner)


class WorkCount:
    """Records in a session how much work every step of a model is, summed over its micro-batches.

    Args:
        attachment: Ringside's hold on the model.

    Attributes:
        count: Called with the arguments of every forward pass; never raises.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._session = attachment.session
        self._step, self._sum = -1, 0
        self.count = Guard("counting the work of this rank's batches").guard(self._count)

    def _count(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        session = self._session
        if session is None or not torch.is_grad_enabled():
            return
        # Micro-batches of one step add up: the step's samples are recorded anew with each.
        if session.clock.step != self._step:
            self._step, self._sum = session.clock.step, 0
        self._sum += work_of(args, kwargs)
        if self._sum:
            session.log(samples=self._sum)


_log = logging.getLogger(__name__)


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


class ModelHolder:
    """What callbacks of frameworks have in common: the script's options, and the hold on its model.

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
        self._options: dict[str, Any] = {"engine": engine, "run_dir": run_dir, "digest_every": digest_every}
        self.attachment: Attachment | None = None

    def attach_model(self, model: Any, ddp: DistributedDataParallel | None) -> None:
        """Attach a framework's model by the DistributedDataParallel around it; where there is none, watch its groups.

        Raises:
            UsageError: As `ringside.attach`.
        """
        if ddp is None:
            watch_groups(model, self._options["run_dir"])
        else:
            self.attachment = hold(ddp, **self._options)


def hold(model: DistributedDataParallel, **options: Any) -> Attachment:
    """Attach a framework's model, and count the tokens or samples of its batches. A collective.

    Where it is attached already (by `ringside run`, or by an earlier line) that stays as it is.

    Args:
        model: The model, wrapped.
        options: `engine`, `run_dir` and `digest_every`, as of `ringside.attach`.

    Raises:
        UsageError: As `ringside.attach`.
    """
    attachment = sync.attach(model, **options)
    if attachment.count_work is None:
        attachment.count_work = WorkCount(attachment).count
    return attachment


def attachment_of(model: Any) -> Attachment | None:
    """Return Ringside's hold on a model that a framework has wrapped; None where there is none."""
    ddp = ddp_of(model)
    return sync.attachment_of(ddp) if ddp is not None else None


def watch_groups(model: Any, run_dir: str | os.PathLike[str] | None) -> None:
    """Watch the process groups of a training whose model is none of DDP's; where that cannot be, log it on rank 0.

    Args:
        model: What the framework has wrapped.
        run_dir: As of `ringside.watch`.
    """
    if sync.watch_unasked(run_dir=run_dir) is not None:
        return
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if several and dist.get_rank() == 0:
        _log.warning(
            "ringside does not watch this training: on torch %s it supports DistributedDataParallel and the process "
            "group ringside, from 2.14 on every job, and this is a %s over %s",
            torch.__version__,
            type(model).__name__,
            dist.get_backend(),
        )
