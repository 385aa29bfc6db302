"""The engine of one process group: its communicator, and the order in which collectives are carried out."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Any

from torch.distributed.distributed_c10d import Store

from ringside.engine import Communicator as HostCommunicator
from ringside.engine.at_exit import AtExit
from ringside.engine.lifetime import Lifetime
from ringside.engine.settings import Settings
from ringside.engine.tensors import Flat
from ringside.errors import ClosedError
from ringside.sync.communicator import Communicator
from ringside.sync.process_group_posted import Posted


class Engine(Lifetime):
    """Carries out a group's collectives one after the other, on the thread that calls or on one of its own.

    Making one is a collective of the group.

    Args:
        store: A part of the job's store that only this group uses.
        rank: This rank.
        size: Number of ranks.
        timeout_s: Longest wait for other ranks in one collective, seconds; None: as the environment says.

    Attributes:
        communicator: What carries them out; only jobs given to `run` and `start` may use it.
        inside: The host's communicator, where all ranks share memory and nothing else was asked for.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float | None) -> None:
        self.rank, self.size = rank, size
        self.communicator: Any
        if size == 1:
            settings = Settings.of_environment(timeout_s=timeout_s)
            self.communicator = HostCommunicator(f"alone/{uuid.uuid4()}", 0, 1, settings)
        else:
            self.communicator = Communicator.over(store, rank, size, timeout_s=timeout_s)
        self.inside = self.communicator.inside if size > 1 else self.communicator
        self._turn = threading.RLock()
        self._carrier = 0
        self._posted: Posted | None = None
        self._begin()
        _at_exit.add(self)

    @property
    def is_here(self) -> bool:
        """Tell whether the caller is carrying a collective out, as in a callback of a future: nobody else can."""
        if self._carrier == threading.get_ident():
            return True
        return self._background is not None and self._background.is_here

    def run(self, job: Callable[[], None]) -> None:
        """Carry out a collective now, after those under way."""
        if self._closed or self._is_forked():
            raise ClosedError(
                f"the process group is closed on rank {self.rank}, or this is a forked child: make a new one with "
                "init_process_group"
            )
        if not self.is_here and self._must_queue():
            self.submit(lambda: self._in_turn(job)).wait()
        else:
            self._in_turn(job)

    def start(self, job: Callable[[], None]) -> Any:
        """Carry out a collective on the engine's thread; return what can be waited for."""
        return self.submit(lambda: self._in_turn(job))

    def post(self, flat: Flat, op: int, scale: float) -> Posted | None:
        """Begin a small all-reduce, which waits for nobody, here and now; None where something else is under way.

        Arguments as for `post` of the host's communicator.
        """
        if self._closed or self._is_forked() or self._must_queue() or not self._turn.acquire(blocking=False):
            return None
        try:
            if self._posted is not None:
                return None
            posted = self._posted = Posted(self.inside.post(flat, op, scale), self)
            return posted
        finally:
            self._turn.release()

    def hand_over(self) -> Any:
        """Have the engine's thread finish what was posted; return what can be waited for."""
        return self.start(_nothing)

    def finish_posted(self) -> None:
        """Finish what was posted, on the thread that calls."""
        self._in_turn(_nothing)

    def _in_turn(self, job: Callable[[], None]) -> None:
        """Carry it out while no other thread does, after what was posted: a communicator is for one at a time."""
        with self._turn:
            before, self._carrier = self._carrier, threading.get_ident()
            try:
                posted, self._posted = self._posted, None
                if posted is not None:
                    posted.finish()
                job()
            finally:
                self._carrier = before

    def _let_go(self, finish_s: float) -> None:
        if finish_s:
            self.communicator.close()
        else:
            self.communicator.abandon()
        if self._background is not None:
            self._background.join()


def _nothing() -> None:
    """Nothing is left to do."""


_at_exit = AtExit()
