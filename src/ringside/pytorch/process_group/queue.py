"""The engine of one process group: its communicator, and the queue of its collectives."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from torch.distributed.distributed_c10d import Store

from ringside.engine import HostCommunicator
from ringside.engine.buffers import Flat
from ringside.engine.runtime.lifecycle import AtExit, Closeable
from ringside.engine.runtime.queue import PATIENCE_S, CollectiveQueue, QueuedCollective
from ringside.engine.settings import Settings
from ringside.errors import ClosedError
from ringside.pytorch.communicator.communicator import GroupCommunicator
from ringside.pytorch.communicator.options import Options

PATIENT_INSIDE_BYTES = 1 << 20
PATIENT_BYTES = 64 << 10
"""Of results, inside a host and between hosts: up to there to change threads takes longer than the patience costs."""

_REFUSAL = (
    "the process group is closed on rank {rank}, or this is a forked child: make a new one with init_process_group"
)


class Engine(Closeable):
    """Runs a group's collectives one after the other, on threads that wait for them or one of its own.

    Making one is a collective of the group.

    Args:
        store: A part of the job's store that only this group uses.
        rank: This rank.
        size: Number of ranks.
        timeout_s: Longest wait for other ranks in one collective, seconds; None: as the environment says.

    Attributes:
        communicator: What runs them; only jobs given to `run` and `start` may use it.
        inside: The host's communicator, where all ranks share memory and no algorithm is requested.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float | None) -> None:
        self.rank, self.size = rank, size
        self.communicator: Any
        if size == 1:
            settings = Settings.of_environment(timeout=timeout_s)
            self.communicator = HostCommunicator(f"alone/{uuid.uuid4()}", 0, 1, settings)
        else:
            options, problem = Options.or_problem(timeout_s, None, None, None, False)
            self.communicator = GroupCommunicator(store, rank, size, options, problem=problem)
        self.inside = self.communicator.inside if size > 1 else self.communicator
        self._turns = CollectiveQueue(f"ringside-{rank}", _REFUSAL.format(rank=rank))
        self._patient_bytes = PATIENT_INSIDE_BYTES if self.inside is not None else PATIENT_BYTES
        self._begin()
        _at_exit.add(self)

    @property
    def is_here(self) -> bool:
        """Tell whether the caller is inside a collective, as in a callback of a future: no other thread can run one."""
        return self._turns.is_here

    def run(self, job: Callable[[], None]) -> None:
        """Run a collective now, after those called before it; raise what goes wrong."""
        if self._closed or self._is_forked():
            raise ClosedError(_REFUSAL.format(rank=self.rank))
        self._turns.run(job)

    def start(self, job: Callable[[], None], size_bytes: int) -> QueuedCollective:
        """Queue a collective for the thread that waits for it, or the engine's; return what can be waited for.

        Args:
            job: Runs it.
            size_bytes: Of its results: large ones the thread starts at once.
        """
        return self._turns.start(job, PATIENCE_S if size_bytes <= self._patient_bytes else 0.0)

    def post(self, flat: Flat, op: int, scale: float) -> QueuedCollective | None:
        """Start a small all-reduce, which waits for nobody, here and now; None where something else is under way.

        Arguments as for `post` of the host's communicator. Between hosts nothing is begun ahead: it gained nothing.
        """
        if self._closed or self.inside is None:
            return None
        return self._turns.post(self.inside.post, flat, op, scale)

    def _release(self, finish_s: float) -> None:
        self._turns.close(self.communicator.close if finish_s else self.communicator.abort, finish_s)


_at_exit = AtExit()
