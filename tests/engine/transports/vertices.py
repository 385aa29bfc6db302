"""Runs a function on every vertex of a transport: as threads of this process, or as ranks that are processes."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.ranks import place
from tests.support.thread_transport import Switchboard, Threads, each_on_a_thread

from ringside.engine.transports.base import LinkFailure


def on_threads(size: int, function: Callable[[Threads], Any], timeout_s: float = 20.0) -> list[Any]:
    """Run a function on the vertices of a switchboard; return what each returned, or raise what one raised."""
    board = Switchboard(size, timeout_s)
    return each_on_a_thread(
        size, lambda rank: function(Threads(board, rank)), lambda rank: board.fail(LinkFailure("left", rank))
    )


@contextlib.contextmanager
def store_file() -> Iterator[str]:
    """Yield the path of a file through which ranks can meet."""
    with tempfile.TemporaryDirectory() as directory:
        yield os.path.join(directory, "store")


def peer_to_peer(path: str, timeout_s: float = 30.0, name: str = "", size: int = 0, **options: Any) -> Any:
    """Return this rank's end of a group of the first `size` ranks (0: all) that meet through a file."""
    import torch.distributed as dist

    from ringside.engine.transports.gloo import GlooTransport

    here = place()
    store = dist.PrefixStore(f"{here.job}/{name}", dist.FileStore(path, -1))
    return GlooTransport(store, here.rank, size or here.size, timeout_s=timeout_s, **options)
