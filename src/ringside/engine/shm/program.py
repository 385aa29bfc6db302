"""Compile a schedule into the instructions of one rank for the native interpreter.

The interpreter pulls: a rank reads its sources' chunks where they lie, folds them in rank order, and stores the result
into its own. The compiler works out what a store has to wait for, so that every transfer carries the value its chunk
had at the start of the round:

- ranks that read the chunk from here in an earlier round must have stored that round (`stored`);
- ranks that read it in the same round must have fetched it (`fetched`), and the result waits in scratch until then.
"""

from __future__ import annotations

import zlib
from collections import defaultdict

from ringside.errors import UnsupportedError
from ringside.schedule import Schedule

Row = tuple[int, int, bool, bool, list[int], list[tuple[int, int]], list[tuple[int, int]]]
"""(round, chunk, overwrite, scratch, sources ascending, stored [(rank, round)], fetched [(rank, round)])."""


def compile_schedule(schedule: Schedule, rank: int) -> tuple[int, list[Row]]:
    """Return a hash of a verified schedule, which ranks compare before they start, and the instructions of `rank`.

    Raises:
        UnsupportedError: The schedule needs a switch, and inside a host there is none.
    """
    if schedule.switches:
        raise UnsupportedError(
            f"{schedule.name} reduces in a switch, and inside one host there is none: choose another algorithm"
        )
    rows: list[Row] = []
    readers: dict[int, dict[int, int]] = defaultdict(dict)  # chunk -> reader -> last round it read from here
    checksum = zlib.crc32(f"{schedule.name}/{schedule.ranks}/{schedule.chunks}".encode())
    for k in range(schedule.rounds):
        transfers = schedule.round(k)
        checksum = transfers.checksum(checksum)
        now: dict[int, set[int]] = defaultdict(set)
        for _, dst, chunk, _ in transfers.where(transfers.src == rank):
            now[chunk].add(dst)
        for chunk, (overwrite, peers) in transfers.arriving(rank).items():
            everyone = sorted(peers if overwrite else [*peers, rank])
            stored = [(r, j) for r, j in sorted(readers[chunk].items()) if r != rank]
            fetched = [(r, k) for r in sorted(now[chunk]) if r != rank]
            rows.append((k, chunk, overwrite, bool(fetched), everyone, stored, fetched))
        for chunk, dsts in now.items():
            readers[chunk].update(dict.fromkeys(dsts, k))
    return checksum, rows
