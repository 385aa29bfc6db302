"""Ray Train: `TorchTrainer(watched(train), ...)`, where `train` is the training loop of a worker."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ringside.integrations import package
from ringside.integrations.models import hold
from ringside.pytorch.recording import session as sessions

Loop = Callable[..., Any]


def watched(
    train: Loop,
    *,
    engine: str | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    digest_every: int | None = None,
) -> Loop:
    """Return a training loop whose DistributedDataParallel models are synchronised, watched, and recorded to its end.

    Ray ends its workers without their exit handlers, so the recording ends with the loop.

    Args:
        train: What a `TorchTrainer` is to run on every worker; it makes its model by `prepare_model` or by itself.
        engine, digest_every: As of `ringside.attach`.
        run_dir: Where the worker of rank 0 writes the run, made absolute here, for workers run elsewhere (default:
            RINGSIDE_RUN_DIR, else a new directory under `runs/`).

    Raises:
        UsageError: Ray is not installed; the message has the pip command.
    """
    package("ray.train")
    path = run_dir or os.environ.get("RINGSIDE_RUN_DIR") or Path("runs") / f"ray-{time.strftime('%Y%m%d-%H%M%S')}"
    options = {"engine": engine, "run_dir": os.path.abspath(path), "digest_every": digest_every}

    @functools.wraps(train)
    def loop(*args: Any) -> Any:
        with _attaching(options):
            return train(*args)

    return loop


@contextlib.contextmanager
def _attaching(options: dict[str, Any]) -> Iterator[None]:
    """Within it, models are attached as they are made; with it, the recording ends."""
    # `prepare_model` makes the model deep inside of Ray: only its constructor is on every path.
    made = DistributedDataParallel.__init__

    @functools.wraps(made)
    def make_and_attach(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        hold(self, **options)

    DistributedDataParallel.__init__ = make_and_attach  # type: ignore[method-assign]
    try:
        yield
    finally:
        DistributedDataParallel.__init__ = made  # type: ignore[method-assign]
        session = sessions.current()
        if session is not None:
            session.end()
