"""How the ranks of the demo agree on when training ends, without a collective that would disturb what is measured."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

EVERY = 8
"""Steps between two looks; what rank 0 decides at one look, all ranks read at the next."""


class Agreement:
    """The end of training, decided by rank 0 while it runs.

    Args:
        store: The job's store.
        rank: This rank.
        limit: The number of steps never exceeded.
        decide: On rank 0, returns how many steps there shall be as far as is known now.
    """

    def __init__(self, store: Store, rank: int, limit: int, decide: Callable[[], int]) -> None:
        self._store, self._rank, self._decide = store, rank, decide
        self._end = limit

    def goes_on(self, step: int) -> bool:
        """Tell whether training step number `step` shall be done; every rank asks before every step."""
        look, rest = divmod(step, EVERY)
        if not rest:
            if self._rank == 0:
                soonest = (look + 1) * EVERY
                self._end = min(self._end, max(self._decide(), soonest))
                self._store.set(f"end/{look + 1}", str(self._end))
            if look:
                self._end = int(self._store.get(f"end/{look}"))
        return step < self._end
