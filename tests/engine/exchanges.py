"""What happens while a communicator's ranks hand symmetric memory around."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ringside.engine import HostCommunicator


@contextlib.contextmanager
def before_its_exchange(comm: HostCommunicator, job: Callable[[], object]) -> Iterator[None]:
    """Inside, `comm.empty` has this rank agree with the others, and do something before it gives and takes memory."""
    allocate = comm.memory.allocate

    def late(size_bytes: int) -> Any:
        job()
        return allocate(size_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm.memory, "allocate", late)
        yield
