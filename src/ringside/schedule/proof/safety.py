"""What can be wrong with one round: transfers that cannot be, writes without an order, ranks that wait for ever."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ringside.schedule.proof.audit import Problem
from ringside.schedule.schedule import Round, Schedule
from ringside.schedule.traffic import well_formed
from ringside.text import name_vertices

# -------------------------------------------------------------------------------------------------
# Whether a round can finish when ranks have little room for messages.
#
# The model. All of a round's messages are offered at once. A rank takes those meant for it in array order, each as
# soon as it has a free buffer, of which it has `buffers`; taking a message reads the sender's chunk. A message leaves
# its buffer when it is stored, which it may be only once
#
# -   everybody who reads that chunk *from this rank* in this round has read it (or they would get the new value), and
# -   if it reduces, the messages from lower ranks into the same chunk have been stored (the fold is in rank order).
#
# The running sum of a fold of several messages has a place of its own, since the destination's value may have to join
# it in the middle; only the finished sum waits for the readers, and it occupies no buffer.
#
# Taking or storing a message never takes away what others may do, so the order of doing does not matter, and running
# everything that can be run decides the question. One round at a time is enough: a rank that went on to later rounds
# has finished this one, and nobody waits for it.


@dataclass(frozen=True, slots=True)
class BlockedWait:
    """A rank holds a message for `chunk` that it cannot store before `on` has taken a message."""

    rank: int
    chunk: int
    on: int


def cycles(step: Round, buffers: int) -> list[tuple[BlockedWait, ...]]:
    """Return the cycles of ranks that wait for each other for ever in a round, each from its lowest rank on.

    Args:
        step: A well-formed round.
        buffers: Messages that a rank can hold before it stores them, at least 1.

    Returns:
        One tuple per cycle: the i-th wait's `on` is the next one's `rank`. Empty when the round can finish.
    """
    if _every_message_is_storable_at_once(step):
        return []
    delivery = _Delivery(step, buffers)
    delivery.run()
    return _cycles(delivery.waits())


def _every_message_is_storable_at_once(step: Round) -> bool:
    """Nobody reads what a single message writes in this round, and every fold's messages come in rank order."""
    width = int(step.chunk.max(initial=0)) + 1
    written = step.dst.astype(np.int64) * width + step.chunk
    target, src = written[step.reduce], step.src[step.reduce]
    order = np.argsort(target, kind="stable")
    same = np.diff(target[order]) == 0
    if not (np.diff(src[order])[same] >= 0).all():
        return False
    alone = written[~np.isin(written, target[order][1:][same])]
    return not np.isin(alone, step.src.astype(np.int64) * width + step.chunk).any()


class _Delivery:
    """The messages of one round on their way; messages are numbered as in the round's arrays."""

    def __init__(self, step: Round, buffers: int) -> None:
        self.transfers = list(step)
        self.incoming: dict[int, deque[int]] = defaultdict(deque)
        self.free: dict[int, int] = defaultdict(lambda: buffers)
        self.readers: dict[tuple[int, int], set[int]] = defaultdict(set)
        self.fold: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        self.held: dict[int, list[int]] = defaultdict(list)
        for message, (src, dst, chunk, _) in enumerate(self.transfers):
            self.incoming[dst].append(message)
            self.readers[src, chunk].add(message)
        for message in sorted(range(len(self.transfers)), key=lambda m: self.transfers[m][0]):
            _, dst, chunk, reducing = self.transfers[message]
            if reducing:
                self.fold[dst, chunk].append(message)
        self.several = {target for target, messages in self.fold.items() if len(messages) > 1}

    def run(self) -> None:
        """Receive and store until nothing more can be done."""
        active = deque(self.incoming)
        while active:
            rank = active.popleft()
            while True:
                if self._store(rank):
                    continue
                if not self.incoming[rank] or not self.free[rank]:
                    break
                # Receive the next message into a free buffer; its chunk has now been read at the sender, which may go
                # on if nobody else has to read it.
                message = self.incoming[rank].popleft()
                src, _, chunk, _ = self.transfers[message]
                self.free[rank] -= 1
                self.held[rank].append(message)
                self.readers[src, chunk].discard(message)
                if src != rank and not self.readers[src, chunk]:
                    active.append(src)

    def _store(self, rank: int) -> bool:
        """Store one held message that nothing blocks, if there is one."""
        for message in self.held[rank]:
            if self._blocker(message) is None:
                self.held[rank].remove(message)
                self.free[rank] += 1
                _, dst, chunk, reducing = self.transfers[message]
                if reducing:
                    self.fold[dst, chunk].popleft()
                return True
        return False

    def _blocker(self, message: int) -> int | None:
        """Return a rank that must receive a message before this one may be stored."""
        _, dst, chunk, reducing = self.transfers[message]
        added_up_elsewhere = reducing and (dst, chunk) in self.several
        if not added_up_elsewhere and (unread := self.readers[dst, chunk]):
            return self.transfers[min(unread)][1]
        if reducing and self.fold[dst, chunk][0] != message:
            return dst
        return None

    def waits(self) -> dict[int, BlockedWait]:
        """Return of every stuck rank one reason why it is."""
        found = {}
        for rank, messages in self.held.items():
            for message in messages[:1]:
                on = self._blocker(message)
                assert on is not None, "a message that could be stored was not"
                found[rank] = BlockedWait(rank, self.transfers[message][2], on)
        return found


def _cycles(waits: dict[int, BlockedWait]) -> list[tuple[BlockedWait, ...]]:
    """Everybody waits on one other, so walking on from a rank ends in a cycle."""
    found, seen = [], set[int]()
    for start in sorted(waits):
        path: list[int] = []
        rank = start
        while rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = waits[rank].on
        if rank in path:
            cycle = path[path.index(rank) :]
            lowest = cycle.index(min(cycle))
            found.append(tuple(waits[r] for r in cycle[lowest:] + cycle[:lowest]))
    return found


def malformed(schedule: Schedule, step: Round, k: int) -> Iterator[Problem]:
    """Name the transfers of round k that cannot be."""
    keep = well_formed(schedule, step)
    if keep.all():
        return
    for src, dst, chunk, _ in step.where(~keep):
        outside = [vertex for vertex in (src, dst) if not 0 <= vertex < schedule.vertices]
        if outside:
            known = name_vertices(range(schedule.vertices), schedule.ranks)
            why = f"there is no rank {outside[0]}, only {known}"
        elif src == dst:
            why = f"a {'rank' if src < schedule.ranks else 'switch'} cannot send to itself"
        else:
            why = f"there is no chunk {chunk}, only chunks 0 to {schedule.chunks - 1}"
        sender, receiver = (_vertex(schedule, vertex) for vertex in (src, dst))
        message = f"in round {k + 1} {sender} sends chunk {chunk} to {receiver}, but {why}"
        yield Problem("malformed", message, rank=(outside or [src])[0], chunk=chunk, round=k)


def unordered_writes(schedule: Schedule, step: Round, k: int) -> Iterator[Problem]:
    """Name the chunks that several messages of round k write, one of them overwriting."""
    if step.reduce.all():
        return
    target = step.dst.astype(np.int64) * schedule.chunks + step.chunk
    unique, writes = np.unique(target, return_counts=True)
    if len(unique) == len(target):
        return
    for flat in np.intersect1d(unique[writes > 1], target[~step.reduce]).tolist():
        vertex, chunk = divmod(flat, schedule.chunks)
        sources = name_vertices(step.src[target == flat].tolist(), schedule.ranks)
        message = (
            f"in round {k + 1} {sources} write into chunk {chunk} of {_vertex(schedule, vertex)} at once, at least one "
            "of them overwriting it: the result depends on who comes last"
        )
        yield Problem("order", message, vertex, chunk, k)


def deadlocks(schedule: Schedule, step: Round, k: int, buffers: int) -> Iterator[Problem]:
    """Name the cycles of vertices that wait for each other for ever in round k."""
    for cycle in cycles(step, buffers):
        enough = buffers + 1
        while cycles(step, enough):
            enough += 1
        waits = []
        for wait in cycle[:4]:
            if wait.on == wait.rank:
                reason = "a message from a lower rank that it has not taken yet (list them in rank order)"
            else:
                reason = f"{_vertex(schedule, wait.on)} to read that chunk"
            holder = _vertex(schedule, wait.rank)
            waits.append(f"{holder} holds a message for chunk {wait.chunk} and waits for {reason}")
        who = " and ".join(waits) + (" and so on" if len(cycle) > 4 else "")
        message = f"in round {k + 1} {who}; with {enough} buffers instead of {buffers} this round can finish"
        yield Problem("deadlock", message, cycle[0].rank, cycle[0].chunk, k)


def _vertex(schedule: Schedule, vertex: int) -> str:
    return name_vertices([vertex], schedule.ranks if vertex < schedule.vertices else vertex + 1)
