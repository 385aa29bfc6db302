"""Who the other ranks of a communicator wait for, and over which link, from calls that all of its ranks recorded.

The longest execution of a collective is a victim's: it waits inside. The shortest is the last comer's. What a rank
costs is how much later it came than the last of the others, and nothing more: that is gone once it is repaired.
Starts are compared on one host alone: between clocks, a rank that is always late looks like a clock that is ahead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice

import msgspec
import numpy as np
from numpy.typing import NDArray

from ringside.doctor.calls.record import Calls, Link, LinkTime, Stream
from ringside.doctor.files.source import Progress, Source
from ringside.doctor.findings import Findings, Note, Number, Sheet, Unjudged, verdict_of_files
from ringside.monitor.verdict import Verdict
from ringside.text import counted, duration, percent, rank_list, rate

Integers = NDArray[np.int64]
Reals = NDArray[np.float64]

ALL_WAIT_FOR_ALL = frozenset({"allreduce", "allgather", "reducescatter", "alltoall", "barrier"})
"""Collectives that no rank leaves before all have come, in lower case and without `_`, `base`, `single`, `v`."""
LEAST_CALLS = 20
LEAST_SHARE = 0.5
"""Of its calls so many must have been seen of each rank, or nobody is blamed."""
LEAST_COST = 0.05
"""A rank that costs less of the job's time than this is no straggler."""
AHEAD = 2.0
"""So many times as much as any other rank of its communicator."""
ENDS_APART = 0.5
"""Ranks leave a collective so far apart at most: this share of the shortest execution (a tree's root before leaves)."""
LEAST_LINKS = 3
SLOW = 0.5
"""A link is slow below this share of the usual rate."""
BLOCK_ITEMS = 1 << 16
"""So many calls of a rank are compared at a time: they stay in a processor's cache."""
MOST_ROWS = 64
MOST_CAUSES = 64


@dataclass
class Late:
    """A rank that costs the others of a communicator time.

    Attributes:
        communicator: Where.
        rank: Which of its ranks.
        lost_s: How much later it came than the last of the others, summed.
        last_in: Calls in which it came last.
        calls: Calls that were compared.
        by: How that is known.
        held_s: How long each other rank waited for it in all.
    """

    communicator: str
    rank: int
    lost_s: float
    last_in: int
    calls: int
    by: str
    held_s: dict[int, float] = field(default_factory=dict)


def judge_files(
    kind: str, sources: Sequence[Source], progress: Progress, read_into: Callable[[Source, Calls], Note]
) -> Findings:
    """Judge the files of one job together.

    Args:
        kind: What they are, in the plural.
        sources: They.
        progress: Told of each.
        read_into: Reads one; returns what is to be said of it.
    """
    calls, notes = Calls(), []
    for number, source in enumerate(sources, 1):
        progress.begin(f"reading {kind} {number} of {len(sources)}")
        notes.append(read_into(source, calls))
    return judge(kind, calls, notes)


def judge(kind: str, calls: Calls, notes: list[Note]) -> Findings:
    """Judge all that one kind of files recorded."""
    name = _ranks_of_the_job(calls)
    by_comm: dict[str, dict[str, dict[int, Stream]]] = defaultdict(lambda: defaultdict(dict))
    for (communicator, function, rank), stream in calls.streams.items():
        by_comm[communicator][function][rank] = stream
    late: list[Late] = []
    unjudged: list[Unjudged] = []
    rows: list[list[Number | None]] = []
    elapsed_s = 0.0
    for communicator, functions in by_comm.items():
        size = calls.sizes.get(communicator, 0)
        present = {rank for streams in functions.values() for rank in streams}
        shares = {function: _seen(streams, present) for function, streams in functions.items()}
        lost = sum(calls.dropped.get((communicator, rank), 0) for rank in present)
        for function, by_rank in shares.items():
            least = min(by_rank, key=by_rank.__getitem__)
            recorded = sum(map(len, functions[function].values()))
            seen = sum(by_rank.values()) / len(by_rank)
            rows.append([communicator, size, function, recorded, _floor(seen), _floor(by_rank[least]), least, lost])
        compared = [function for function in functions if _waits(function)]
        if size < 2 or not compared:
            continue
        known = [share for function in compared for share in shares[function].values()]
        why = ""
        if len(present) < size:
            why = f"of its {size:,} ranks only {rank_list(present)} are here: give the files of all"
        elif min(known) < LEAST_SHARE:
            on_average = percent(_floor(sum(known) / len(known)))
            why = (
                f"seen {on_average} of its calls, of one rank {percent(_floor(min(known)))}: too few to blame anybody. "
                "Recorders lose calls (fewer with a larger ring or shorter intervals between dumps), and leave out "
                "what is below their least size"
            )
        else:
            found, elapsed, why = _last_comers(calls, communicator, {f: functions[f] for f in compared}, size)
            late += found
            elapsed_s = max(elapsed_s, elapsed)
        if why:
            unjudged.append(Unjudged(what=f"who is late in communicator {communicator}", why=why))
    if by_comm.keys() - calls.sized:
        why = f"a {kind} does not tell it: ranks above the highest one given may be missing, and are not judged"
        unjudged.append(Unjudged(what="how many ranks the communicators have", why=why, side=True))
    if calls.sizes and not by_comm:
        unjudged.append(Unjudged(what="who is late", why="no collective that ended is recorded"))
    # Who is late only because another rank held it up elsewhere is a victim.
    late.sort(key=lambda each: -each.lost_s)
    is_victim = _victims(calls, late)
    causes = list(islice((each for each in late if not is_victim(each)), MOST_CAUSES))
    if len(causes) == MOST_CAUSES < len(late):
        why = f"of {len(late):,} ranks that come last in their communicators, the {MOST_CAUSES} costliest are named"
        unjudged.append(Unjudged(what="who else is late", why=why))
    verdicts: dict[object, Verdict] = {}
    for each in causes:
        who = name(each.communicator, each.rank)
        key = who if who is not None else (each.communicator, each.rank)
        verdicts.setdefault(key, _late_verdict(calls, each, who, elapsed_s))
    columns = ["communicator", "ranks", "function", "calls recorded", "seen", "seen at least", "of its rank", "lost"]
    note = "the share of the calls between the first and the last that any rank recorded; lost: by the recorder's count"
    title = f"Calls that {kind}s hold"
    sheets = [Sheet(title=title, columns=columns, rows=rows[:MOST_ROWS], note=note)] if rows else []
    slow, link_sheets = _judge_links(calls, name, elapsed_s or _written_for(calls))
    return Findings(
        verdicts=[*verdicts.values(), *slow],
        unjudged=unjudged[:MOST_ROWS],
        notes=notes,
        sheets=[*sheets, *link_sheets],
        facts={kind: {"calls": sum(map(len, calls.streams.values())), "communicators": len(by_comm)}},
    )


def _waits(function: str) -> bool:
    plain = function.lower().replace("_", "")
    for ending in ("single", "base", "v"):
        plain = plain.removesuffix(ending)
    return plain in ALL_WAIT_FOR_ALL


def _floor(share: float) -> float:
    """A share in whole per cent, never rounded up to one that it does not reach."""
    return int(share * 100) / 100


def _seen(streams: dict[int, Stream], ranks: set[int]) -> dict[int, float]:
    """The share of a function's calls that was recorded, by rank: of all from the first to the last of any rank."""
    numbers = {rank: _numbers(stream)[0] for rank, stream in streams.items()}
    span = int(max(own[-1] for own in numbers.values()) - min(own[0] for own in numbers.values())) + 1
    return {rank: len(numbers[rank]) / span if rank in numbers else 0.0 for rank in ranks}


def _numbers(stream: Stream) -> tuple[Integers, Integers | None]:
    """Return a stream's numbers, each once and ascending, and where each is; None: the stream is like that itself."""
    numbers = np.frombuffer(stream.seq, np.int64)
    if (numbers[1:] > numbers[:-1]).all():
        return numbers, None
    return np.unique(numbers, return_index=True)


def _ranks_of_the_job(calls: Calls) -> Callable[[str, int], int | None]:
    """Return what the ranks of communicators are in the job: in the largest one, by the process that they are of."""
    world = max(calls.sizes, key=lambda communicator: calls.sizes[communicator], default="")
    ranks: dict[tuple[str, str], set[int]] = defaultdict(set)
    for (communicator, rank), process in calls.members.items():
        if communicator == world:
            ranks[process].add(rank)

    def name(communicator: str, rank: int) -> int | None:
        if communicator == world:
            return rank
        there = ranks.get(calls.members.get((communicator, rank), ("", "")), set())
        return min(there) if len(there) == 1 else None

    return name


# -------------------------------------------------------------------------------------------------
# Who came last.


def _last_comers(
    calls: Calls, communicator: str, functions: dict[str, dict[int, Stream]], size: int
) -> tuple[list[Late], float, str]:
    """Return the ranks that a communicator waits for, the seconds that its records cover, and why nobody is judged."""
    # The calls that all ranks recorded, function by function.
    indexes = {function: [_numbers(streams[rank]) for rank in range(size)] for function, streams in functions.items()}
    common = {function: reduce(_shared, (numbers for numbers, _ in own)) for function, own in indexes.items()}
    count = sum(map(len, common.values()))

    def blocks() -> Iterator[tuple[Reals, Reals, NDArray[np.bool_]]]:
        """Yield starts and durations, [calls, ranks], and which calls are in the second half: never all at a time."""
        step = max(BLOCK_ITEMS // size, 1)
        for function, shared in common.items():
            for begin in range(0, len(shared), step):
                numbers = shared[begin : begin + step]
                start_s, took_s = np.empty((2, len(numbers), size))
                for rank, (own, index) in enumerate(indexes[function]):
                    at = np.searchsorted(own, numbers) if len(own) > len(shared) else slice(begin, begin + step)
                    picked = at if index is None else index[at]
                    start_s[:, rank] = np.frombuffer(functions[function][rank].start_s)[picked]
                    took_s[:, rank] = np.frombuffer(functions[function][rank].took_s)[picked]
                yield start_s, took_s, np.arange(begin, begin + len(numbers)) * 2 >= len(shared)

    first_s, last_s, by_start = np.inf, -np.inf, True
    for start_s, took_s, _ in blocks():
        if not np.isfinite(start_s).all():
            first_s = np.nan
            break
        ends = start_s + took_s
        first_s, last_s = min(first_s, float(start_s.min())), max(last_s, float(ends.max()))
        # Two hosts of one name have two clocks; on one clock nobody leaves before the last has come.
        by_start = by_start and bool((start_s.max(axis=1) <= ends.min(axis=1)).all())
    timed = bool(np.isfinite(first_s))
    elapsed = last_s - first_s if timed else _written_for(calls)
    if count < LEAST_CALLS:
        return [], elapsed, f"{counted(count, 'call')} recorded by all ranks: {LEAST_CALLS} or more are needed"
    if elapsed <= 0.0:
        return [], 0.0, "its calls have no start times and were all written at one moment: no share of time is known"
    clocks = {calls.members.get((communicator, rank), ("", ""))[0] for rank in range(size)}
    by_start = by_start and timed and len(clocks) == 1
    # By rank: calls into which it came last, how much later than the last of the others, and of that, in each half of
    # the calls, what no spread of the ends can explain.
    last_in, gaps, lost = np.zeros(size, np.int64), np.zeros(size), np.zeros((2, size))
    for start_s, took_s, later in blocks():
        waited = _waited(start_s, took_s, by_start=by_start)
        last = waited.argmin(axis=1)
        waited[np.arange(len(last)), last] = np.inf
        gap = waited.min(axis=1)
        certain = gap if by_start else np.maximum(gap - ENDS_APART * took_s.min(axis=1), 0.0)
        last_in += np.bincount(last, minlength=size)
        gaps += np.bincount(last, gap, size)
        lost += [np.bincount(last[part], certain[part], size) for part in (~later, later)]
    rank = int(lost.sum(axis=0).argmax())
    others = np.delete(lost.sum(axis=0), rank)
    if (lost[:, rank] < LEAST_COST * elapsed / 2).any() or lost[:, rank].sum() < AHEAD * others.max():
        return [], elapsed, ""
    held = np.zeros(size)
    for start_s, took_s, _ in blocks():
        waited = _waited(start_s, took_s, by_start=by_start)
        held += (waited.argmin(axis=1) == rank).astype(np.float64) @ waited
    by = "start times" if by_start else "the shortest execution time"
    waits = dict(enumerate(held.tolist()))
    return [Late(communicator, rank, float(gaps[rank]), int(last_in[rank]), count, by, waits)], elapsed, ""


def _waited(start_s: Reals, took_s: Reals, *, by_start: bool) -> Reals:
    """Return how long each rank waited for the last one of each call."""
    waited: Reals = (
        start_s.max(axis=1, keepdims=True) - start_s if by_start else took_s - took_s.min(axis=1, keepdims=True)
    )
    return waited


def _shared(one: Integers, other: Integers) -> Integers:
    """What two streams' numbers have in common; mostly they are the same."""
    return one if np.array_equal(one, other) else np.intersect1d(one, other, assume_unique=True)


def _written_for(calls: Calls) -> float:
    return calls.written_s[1] - calls.written_s[0] if calls.written_s else 0.0


def _victims(calls: Calls, late: list[Late]) -> Callable[[Late], bool]:
    """Return what tells whether a rank is late because it was held up by another one elsewhere for half as long."""
    held: dict[tuple[str, str] | None, list[tuple[Late, float]]] = defaultdict(list)
    for other in late:
        for rank, held_s in other.held_s.items():
            if rank != other.rank:
                held[calls.members.get((other.communicator, rank))].append((other, held_s))

    def is_victim(each: Late) -> bool:
        half_s = each.lost_s / 2
        return any(
            held_s >= half_s and other.lost_s > half_s and other.communicator != each.communicator
            for other, held_s in held.get(calls.members.get((each.communicator, each.rank)), ())
        )

    return is_victim


def _late_verdict(calls: Calls, late: Late, who: int | None, elapsed_s: float) -> Verdict:
    size = calls.sizes[late.communicator]
    each = duration(late.lost_s / max(late.last_in, 1))
    where = f"communicator {late.communicator} of {counted(size, 'rank')}"
    it = "it" if who == late.rank else f"its rank {late.rank}"
    cause = (
        f"in {where}, {it} came last in {late.last_in:,} of {late.calls:,} calls that all ranks recorded, "
        f"{each} after the last of the others on average, by {late.by}: the others wait inside the collective"
    )
    verdict = verdict_of_files(
        "slow_rank",
        [] if who is None else [who],
        cause,
        {
            "communicator": late.communicator,
            "communicator_rank": late.rank,
            "communicator_size": size,
            "calls": late.calls,
            "last_in": late.last_in,
            "lost_seconds": late.lost_s,
            "recorded_seconds": elapsed_s,
            "by": late.by,
        },
        "Look at what this rank does between collectives: its clocks and power cap, its data loader, other work on its "
        "host. A collective that runs long is no sign: the ranks that wait in it are the healthy ones.",
    )
    excess = late.lost_s / max(elapsed_s - late.lost_s, 1e-9)
    return msgspec.structs.replace(verdict, excess_ratio=excess, cost_rank_seconds=late.lost_s * size)


# -------------------------------------------------------------------------------------------------
# Which link is slow.


def _judge_links(
    calls: Calls, name: Callable[[str, int], int | None], elapsed_s: float
) -> tuple[list[Verdict], list[Sheet]]:
    """Return links that are far slower than the others, and what messages waited for, link by link."""
    used = sorted(
        ((link, times) for link, times in calls.links.items() if times.nbytes and times.wire_s > 0.0),
        key=lambda item: -item[1].wire_s,
    )
    if not used:
        return [], []
    rates = [times.nbytes / times.wire_s for _, times in used]
    usual = float(np.median(rates))
    slow = [
        _link_verdict(link, times, usual, name)
        for link, times in used
        if times.nbytes / times.wire_s < SLOW * usual and 0.0 < LEAST_COST * elapsed_s <= times.wire_s
    ]
    rows: list[list[Number | None]] = [
        [link.communicator, link.src, link.dst, times.nbytes, times.gpu_s, times.peer_s, times.wire_s]
        for link, times in used[:MOST_ROWS]
    ]
    columns = ["communicator", "from", "to", "bytes", "waited for the GPU, s", "for the peer, s", "on the wire, s"]
    sheet = Sheet(title="What messages between hosts waited for", columns=columns, rows=rows)
    return slow if len(used) >= LEAST_LINKS else [], [sheet]


def _link_verdict(link: Link, times: LinkTime, usual: float, name: Callable[[str, int], int | None]) -> Verdict:
    ends = [name(link.communicator, rank) for rank in (link.src, link.dst)]
    own = times.nbytes / times.wire_s
    cause = f"messages from rank {link.src} to {link.dst} of communicator {link.communicator} go at {rate(own)}, "
    cause += f"the usual link at {rate(usual)}: they were on the wire, neither the sender's GPU nor the receiver waited"
    verdict = verdict_of_files(
        "slow_link",
        [],
        cause,
        {
            "communicator": link.communicator,
            "bytes_per_second": own,
            "usual_bytes_per_second": usual,
            "against": "the other links",
            "wire_seconds": times.wire_s,
            "gpu_seconds": times.gpu_s,
            "peer_seconds": times.peer_s,
        },
        "Look at the adapters and cables of both hosts: error counters, negotiated rate, other traffic on the uplink.",
    )
    return msgspec.structs.replace(verdict, ranks=[end for end in ends if end is not None] if None not in ends else [])
