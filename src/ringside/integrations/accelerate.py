"""Accelerate: `model, optimizer = attach(accelerator.prepare(model, optimizer))`."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from torch import nn

from ringside.integrations.models import attachment_of as attachment_of
from ringside.integrations.models import ddp_of, hold, watch_groups

Prepared = TypeVar("Prepared")


def attach(
    prepared: Prepared,
    *,
    engine: str | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    digest_every: int | None = None,
) -> Prepared:
    """Synchronise and watch every DistributedDataParallel model among what Accelerate prepared. A collective.

    On one process there is nothing to synchronise, and nothing happens; of models that Accelerate has sharded (FSDP,
    DeepSpeed) the process groups are watched, as by `ringside.watch`, where torch shows them. `attachment_of(model)` is
    the hold on a model.

    Args:
        prepared: What `accelerator.prepare(...)` returned: a model, or a tuple of things with models among them.
        engine, run_dir, digest_every: As of `ringside.attach`.

    Returns:
        `prepared` itself.

    Raises:
        UsageError: As `ringside.attach`.
    """
    # `prepare` returns a tuple for several things, and the thing itself for one.
    things: tuple[Any, ...] = tuple(prepared) if isinstance(prepared, (tuple, list)) else (prepared,)
    for thing in things:
        ddp = ddp_of(thing)
        if ddp is not None:
            hold(ddp, engine=engine, run_dir=run_dir, digest_every=digest_every)
        elif isinstance(thing, nn.Module):
            watch_groups(thing, run_dir)
    return prepared
