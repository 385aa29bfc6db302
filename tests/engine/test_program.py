"""A schedule as one rank's instructions: what it adds up, and whom it waits for before a chunk changes."""

from __future__ import annotations

import pytest

from ringside.engine.shm.program import compile_schedule
from ringside.errors import UnsupportedError
from ringside.schedule import ALGORITHMS, by_name, pipelined, relabel

NAMES = sorted(set(ALGORITHMS) - {"in_network"})


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_changes_when_those_who_read_it_here_have_done_so(name: str, ranks: int) -> None:
    """Whoever read it in an earlier round has stored what it made of it; whoever does in this one has fetched it."""
    schedule = pipelined(by_name(name, ranks), 2)
    steps = [list(schedule.round(k)) for k in range(schedule.rounds)]
    for rank in range(ranks):
        _, rows = compile_schedule(schedule, rank)
        assert [row[0] for row in rows] == sorted(row[0] for row in rows)
        for k, chunk, overwrite, scratch, sources, stored, fetched in rows:
            coming = [(src, reduce) for src, dst, c, reduce in steps[k] if (dst, c) == (rank, chunk)]
            assert overwrite == (not coming[0][1])
            assert sources == sorted([src for src, _ in coming] + ([] if overwrite else [rank]))
            readers = {dst: j for j in range(k) for src, dst, c, _ in steps[j] if (src, c) == (rank, chunk)}
            assert dict(stored) == readers
            assert fetched == sorted((dst, k) for src, dst, c, _ in steps[k] if (src, c) == (rank, chunk))
            assert scratch == bool(fetched)
        made = {(k, c) for k, step in enumerate(steps) for _, dst, c, _ in step if dst == rank}
        assert sorted(row[:2] for row in rows) == sorted(made)


def test_schedules_that_differ_in_anything_have_other_hashes() -> None:
    schedules = [by_name(name, ranks) for name in NAMES for ranks in (3, 4)]
    schedules += [pipelined(by_name("ring", 4), 2), relabel(by_name("ring", 4), (0, 2, 1, 3))]
    hashes = [compile_schedule(schedule, 0)[0] for schedule in schedules]
    assert len(set(hashes)) == len(hashes)
    assert all(compile_schedule(s, 1)[0] == own for s, own in zip(schedules, hashes, strict=True)), "alike on all ranks"


def test_inside_a_host_there_is_no_switch() -> None:
    with pytest.raises(UnsupportedError, match="in_network reduces in a switch"):
        compile_schedule(by_name("in_network", 4), 0)
