"""Which dumps belong together: one job, one dump per rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from ringside.doctor.findings import Note
from ringside.doctor.flight_recorder_dump import Dump

KIND = "flight-recorder dump"
APART_S = 86_400.0
"""Dumps of one hang lie minutes apart; a day means another run."""


def sort_into_jobs(dumps: Sequence[Dump]) -> tuple[list[list[Dump]], list[Note]]:
    """Return the dumps job by job, and notes on those that were left out.

    Folders are jobs where the same rank lies in several of them. Within one job, dumps of another world or of another
    day are left out, and of two dumps of a rank the newer is used.
    """
    folders: dict[str, list[Dump]] = defaultdict(list)
    for dump in dumps:
        folders[dump.file.rpartition("/")[0]].append(dump)
    places = Counter(rank for members in folders.values() for rank in {dump.rank for dump in members})
    several = any(count > 1 for count in places.values())
    jobs, notes = [], []
    for members in folders.values() if several and len(folders) > 1 else [list(dumps)]:
        kept, left_out = _one_job(members)
        jobs.append(kept)
        notes.extend(left_out)
    return jobs, notes


def _one_job(dumps: list[Dump]) -> tuple[list[Dump], list[Note]]:
    worlds = Counter(dump.world for dump in dumps if dump.world)
    world = worlds.most_common(1)[0][0] if worlds else ()
    times = sorted(last for dump in dumps if (last := last_s(dump)))
    middle = times[len(times) // 2] if times else 0.0
    kept: dict[int, Dump] = {}
    notes = []
    for dump in sorted(dumps, key=lambda dump: (last_s(dump), _open(dump)), reverse=True):
        if dump.world and dump.world != world:
            why = f"is of another job: its world has {len(dump.world)} ranks, most others' {len(world)}"
        elif last_s(dump) and abs(last_s(dump) - middle) > APART_S:
            why = (
                f"is of another run: its last call is {abs(last_s(dump) - middle) / APART_S:.0f} days from the others'"
            )
        elif dump.rank in kept:
            why = f"is a second dump of rank {dump.rank}; {kept[dump.rank].file} is newer and was used"
        else:
            kept[dump.rank] = dump
            continue
        notes.append(Note(file=dump.file, kind=KIND, text=f"{why}; left out", used=False))
    return sorted(kept.values(), key=lambda dump: dump.rank), notes


def last_s(dump: Dump) -> float:
    """Return when the dump's last call was made, seconds since 1970; 0 where it has none."""
    return max((call.created_s for call in dump.calls), default=0.0)


def _open(dump: Dump) -> int:
    return sum(not call.done for call in dump.calls)
