"""Peers that misbehave, for the harness that measures peers: each is opened by the function of its name."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ringside.bench.peers import Contender
from ringside.bench.plan import BenchPlan
from ringside.engine import HostCommunicator

LARGE_BYTES = 1024
"""From here on they misbehave; below they sum."""


def _peer(name: str, comm: HostCommunicator, misbehave: Callable[[Any], object]) -> Contender:
    def all_reduce(x: Any) -> None:
        comm.all_reduce(x)
        if x.nbytes >= LARGE_BYTES:
            misbehave(x)

    return Contender(name, "private", np.asarray, {"all_reduce": lambda x, out: partial(all_reduce, x)}, about="fake")


def hangs(plan: BenchPlan, comm: HostCommunicator, directory: Path) -> Contender:
    """Never come back from a large call."""
    return _peer("hangs", comm, lambda x: signal.pause())


def crashes(plan: BenchPlan, comm: HostCommunicator, directory: Path) -> Contender:
    """End rank 1 as a wrong address does."""
    return _peer("crashes", comm, lambda x: comm.rank and os.kill(os.getpid(), signal.SIGSEGV))


def refuses(plan: BenchPlan, comm: HostCommunicator, directory: Path) -> Contender:
    """Say that it cannot be opened."""
    raise RuntimeError("not here")


def sums(plan: BenchPlan, comm: HostCommunicator, directory: Path) -> Contender:
    """Sum as it should."""
    return _peer("sums", comm, lambda x: None)


def sums_wrong(plan: BenchPlan, comm: HostCommunicator, directory: Path) -> Contender:
    """Spoil one element on every rank."""

    def all_reduce(x: Any) -> None:
        comm.all_reduce(x)
        x[-1:] += 1

    calls = {"all_reduce": lambda x, out: partial(all_reduce, x)}
    return Contender("sums_wrong", "private", np.asarray, calls)
