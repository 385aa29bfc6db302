"""What a run found: the ranks' reports merged, with bandwidths, ratios and the share of the streaming limit.

As in nccl-tests, an iteration takes the mean over a round on the rank where that is largest; algbw is bytes over time
and busbw is algbw times the collective's bus factor. The figure of an engine is the median of its rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from ringside.bench.messages import About, Limit, Message, Sample, Skipped
from ringside.bench.plan import ITEM_BYTES, ROTATION, BenchPlan
from ringside.text import counted, duration, percent, rate, size

SCHEMA = 1
_ROOTED = ("broadcast", "reduce")


@dataclass(frozen=True)
class BenchRow:
    """One engine on one size, over all ranks.

    Args:
        sample: Rank 0's; size, engine and so on are the same on all.
        rounds_s: Seconds per all-reduce of the slowest rank, per round.
        wrong: Wrong elements, all ranks together.
        single_s: Median and 99th percentile of single calls on the slowest rank, seconds.
        limit_share: Part of the streaming limit, 0 to 1; None where the tensors fit into the cache or are private.
        beside: Of ours, the rounds of each peer that took turns with it, in the same processes.
    """

    sample: Sample
    rounds_s: tuple[float, ...]
    wrong: int
    single_s: tuple[float, float] = (0.0, 0.0)
    limit_share: float | None = None
    beside: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = field(default_factory=dict)

    @property
    def time_s(self) -> float:
        """Median over the rounds, seconds."""
        return median(self.rounds_s)

    @property
    def algbw(self) -> float:
        """Bytes per second."""
        return self.sample.size_bytes / self.time_s

    def busbw(self, plan: BenchPlan) -> float:
        """Bytes per second that each rank's bus would carry with a ring; a step's are those of all its calls."""
        parts = plan.parts(self.sample.size_bytes)
        return sum(bus_factor(name, plan.ranks) * max(given, apart) for name, given, apart in parts) / self.time_s


def bus_factor(collective: str, ranks: int) -> float:
    """Return busbw/algbw of a collective, as nccl-tests has it."""
    if collective in _ROOTED:
        return 1.0
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks


@dataclass(frozen=True)
class BenchResult:
    """A whole run.

    Args:
        plan: What was asked.
        cores: Cores the ranks could use.
        rows: In the order measured.
        limit: Bytes per second that all ranks together stream, reads and writes.
        skipped: Peers that did not take part, or not to the end, with the reason.
        about: What each peer is.
    """

    plan: BenchPlan
    cores: int
    rows: tuple[BenchRow, ...]
    limit: float
    skipped: tuple[Skipped, ...] = ()
    about: tuple[About, ...] = ()

    @property
    def wrong(self) -> int:
        """Wrong elements, all rows together."""
        return sum(row.wrong for row in self.rows)

    def ratio(self, row: BenchRow, peer: str) -> float | None:
        """Return the peer's time over this row's, of the turns they took together; None where it was not measured."""
        if peer not in row.beside:
            return None
        own, theirs = map(median, row.beside[peer])
        return theirs / own

    def to_json(self) -> dict[str, Any]:
        """Return the run as plain data; the keys are documented in `ringside bench --help`."""
        rows = []
        for row in self.rows:
            sample, ratios = row.sample, {peer: self.ratio(row, peer) for peer in self.plan.peers}
            is_ours = sample.engine == "ringside"
            rows.append(
                {
                    "size_bytes": sample.size_bytes,
                    "count": sample.size_bytes // ITEM_BYTES[self.plan.dtype],
                    "type": self.plan.dtype,
                    "redop": self.plan.op,
                    "root": _root(self.plan),
                    "engine": sample.engine,
                    "algorithm": sample.algorithm,
                    "tensor": sample.tensor,
                    "array": sample.array,
                    "cache": sample.cache,
                    "buffers": sample.buffers,
                    "iterations": sample.iterations,
                    "time_seconds": row.time_s,
                    "rounds_seconds": list(row.rounds_s),
                    "call_median_seconds": row.single_s[0],
                    "call_p99_seconds": row.single_s[1],
                    "algbw_bytes_per_second": row.algbw,
                    "busbw_bytes_per_second": row.busbw(self.plan),
                    "wrong": row.wrong,
                    "ratios": {peer: x for peer, x in ratios.items() if x is not None} if is_ours else {},
                    "limit_share": row.limit_share,
                }
            )
        return {
            "schema": SCHEMA,
            "ranks": self.plan.ranks,
            "cores": self.cores,
            "collective": self.plan.collective,
            "cache_bytes": self.plan.cache_bytes,
            "stream_limit_bytes_per_second": self.limit,
            "skipped": [{"peer": s.peer, "reason": s.reason} for s in self.skipped],
            "peers": [{"peer": a.peer, "about": a.text} for a in self.about],
            "wrong": self.wrong,
            "rows": rows,
        }


def merge(
    plan: BenchPlan, cores: int, launches: Sequence[Sequence[Sequence[Message]]], skipped: Sequence[Skipped] = ()
) -> BenchResult:
    """Merge what the ranks of every launch reported; `skipped` are peers that were not even tried, or failed.

    Of ours the first launch that measured a case is shown, and compared with the peer in each launch.
    """
    # What all ranks stream together, bytes per second: the median over all rounds of the slowest rank.
    streamed = []
    for reports in launches:
        limits = [[m for m in report if isinstance(m, Limit)] for report in reports]
        sizes = [4 * limit.size_bytes * len(reports) for limit in limits[0] for _ in limit.seconds]
        seconds = [[s for limit in of_rank for s in limit.seconds] for of_rank in limits]
        streamed += [bytes_ / max(times) for bytes_, *times in zip(sizes, *seconds, strict=False)]
    limit = median(streamed)

    rows: dict[tuple[Any, ...], BenchRow] = {}
    for reports in launches:
        samples = [[m for m in report if isinstance(m, Sample)] for report in reports]
        merged = [_merge_ranks(plan, of_ranks, limit) for of_ranks in zip(*samples, strict=False)]
        for row in merged:
            s = row.sample
            kept = rows.setdefault((s.engine, s.algorithm, s.tensor, s.array, s.size_bytes, s.cache), row)
            for other in merged if s.engine == "ringside" else ():
                o = other.sample
                if o.engine != "ringside" and (o.size_bytes, o.cache) == (s.size_bytes, s.cache):
                    kept.beside[o.engine] = row.rounds_s, other.rounds_s
    told = [m for reports in launches for m in reports[0]]
    refused = [m for m in told if isinstance(m, Skipped)]
    about = tuple(m for m in told if isinstance(m, About))
    return BenchResult(plan, cores, tuple(rows.values()), limit, (*skipped, *refused), about)


def _merge_ranks(plan: BenchPlan, of_ranks: Sequence[Sample], limit: float) -> BenchRow:
    first = of_ranks[0]
    rounds = tuple(max(times) for times in zip(*(sample.seconds for sample in of_ranks), strict=True))
    single = max(sample.median_s for sample in of_ranks), max(sample.late_s for sample in of_ranks)
    row = BenchRow(first, rounds, sum(sample.wrong for sample in of_ranks), single)
    is_push = plan.collective == "all_reduce" and first.algorithm in ("auto", "direct")
    if is_push and first.cache == "any" and first.tensor == "symmetric":
        traffic = 2 * plan.ranks * first.size_bytes  # every rank's tensor is read once and written once
        row = replace(row, limit_share=traffic / row.time_s / limit)
    return row


# -------------------------------------------------------------------------------------------------
# A run as text: the verdict, what each peer takes over what we take, and nccl-tests' table.

NAMES = {
    "ringside": "Ringside", "gloo": "Gloo", "mpi": "Open MPI", "openmpi": "OpenMPI5", "openmpi-sm": "OMPI5 sm",
    "mpich": "MPICH", "impi": "IntelMPI", "vllm": "vLLM", "deepspeed": "DSpeed",
}  # fmt: skip
"""Of eight letters at most, for the columns of the table."""
_SHORT = {"symmetric": "symm", "private": "priv"}
_LANDMARKS = (4, 1 << 10, 1 << 20, 64 << 20, 256 << 20)
WIDE = 100  # columns from which type, redop and root are repeated in every row


def render(result: BenchResult, width: int = 80) -> str:
    """Return the whole report, lines of at most `width` columns (80 at least)."""
    parts = [*verdict(result), "", *ratios(result), "", *rows(result, width), "", *notes(result)]
    return "\n".join(parts)


def verdict(result: BenchResult) -> list[str]:
    """Return the lines that say it in one breath: wrong results first, then how we stand."""
    plan = result.plan
    where = f"{counted(plan.ranks, 'rank')} on {counted(result.cores, 'core')}"
    what = "" if plan.collective == "all_reduce" else f"{plan.collective}, "
    lines = [f"{where}, {what}{plan.dtype} {plan.op}" + (", in place" if not what else "")]
    if plan.ranks == 1:
        lines.append("  one rank exchanges nothing: what is timed is the call")
    wrong = [row for row in result.rows if row.wrong]
    if wrong:
        first = wrong[0]
        case = f"{_label(first)}, {size(first.sample.size_bytes, binary=True)}, {first.sample.cache}"
        how_many = f"{len(wrong)} of {len(result.rows)} rows"
        lines.insert(0, f"WRONG RESULTS in {how_many}, first: {case}: {first.wrong} elements")
    ours = [r for r in result.rows if _is_first_of_ours(result, r) and r.sample.tensor == "symmetric"]
    ours = [r for r in ours if r.sample.cache != "cold"]
    marks = [r for r in ours if r.sample.size_bytes in _LANDMARKS] or ours[:1] + ours[1:][-1:]  # or else the ends
    for row in marks:
        ratios = [(peer, result.ratio(row, peer)) for peer in plan.peers]
        parts = [f"{_short_number(ratio)}x {name_of(peer)}" for peer, ratio in ratios if ratio is not None]
        parts.insert(0, duration(row.time_s))
        if row.limit_share is not None:
            parts.append(f"{percent(row.limit_share)} of the streaming limit")
        lines.append(f"  {size(row.sample.size_bytes, binary=True):>8}: {', '.join(parts)}")
    return lines


def ratios(result: BenchResult) -> list[str]:
    """Return the table of ratios, symmetric beside private."""
    peers = [peer for peer in result.plan.peers if any(r.sample.engine == peer for r in result.rows)]
    heads = [f"{'':>6} {'':>5}  {'symmetric':<{11 + 10 * len(peers)}}        {'private':<8}".rstrip()]
    columns = "".join(f" {'x ' + name_of(peer):>10}" for peer in peers)
    heads.append(f"{'size':>6} {'cache':>5} {'time(us)':>10}{columns} {'limit':>6} {'time(us)':>10}{columns}")
    if result.plan.algorithms[0] != "auto":
        heads.insert(0, f"algorithm {result.plan.algorithms[0]}")
    symmetric = [r for r in result.rows if _is_first_of_ours(result, r) and r.sample.tensor == "symmetric"]
    private = [r for r in result.rows if _is_first_of_ours(result, r) and r.sample.tensor == "private"]
    lines = []
    for row, other in zip(symmetric, private, strict=True):
        share = "" if row.limit_share is None else percent(row.limit_share)
        lines.append(
            f"{size(row.sample.size_bytes, binary=True).replace(' ', ''):>6} {row.sample.cache:>5}"
            f" {_us(row)}{_times(result, row, peers)} {share:>6} {_us(other)}{_times(result, other, peers)}"
        )
    return heads + lines


def rows(result: BenchResult, width: int = 80) -> list[str]:
    """Return nccl-tests' table, one row per size, engine, tensor and cache state."""
    wide = width >= WIDE
    labels = [_label(row) for row in result.rows]
    room = max(map(len, labels), default=0)
    kind = f" {'type':>8} {'redop':>5} {'root':>4}" if wide else ""
    units = f" {'':>8} {'':>5} {'':>4}" if wide else ""
    lines = [
        f"# {'size':>9} {'count':>9}{kind} {'engine':<{room}} cache {'time':>10} {'algbw':>7} {'busbw':>7} #wrong",
        f"# {'(B)':>9} {'(elems)':>9}{units} {'':<{room}}       {'(us)':>10} {'(GB/s)':>7} {'(GB/s)':>7}",
    ]
    fixed = f" {result.plan.dtype:>8} {result.plan.op:>5} {_root(result.plan):>4}" if wide else ""
    for label, row in zip(labels, result.rows, strict=True):
        s, bus = row.sample, row.busbw(result.plan)
        lines.append(
            f"{s.size_bytes:>11} {s.size_bytes // ITEM_BYTES[result.plan.dtype]:>9}{fixed} {label:<{room}}"
            f" {s.cache:>5} {_us(row)} {row.algbw / 1e9:>7.2f} {bus / 1e9:>7.2f} {row.wrong:>6}"
        )
    return lines


def notes(result: BenchResult) -> list[str]:
    """Return what a reader needs to know about the numbers."""
    cache, rotation = (size(times * result.plan.cache_bytes, binary=True) for times in (1, ROTATION))
    lines = [
        f"streaming limit {rate(result.limit)}: 2 reads + 2 non-temporal writes on every rank;",
        "  limit% is the part of it that symmetric tensors larger than the cache reach",
        f"  (2n bytes move per payload byte). Last-level cache {cache}.",
        f"cache: warm the same buffer again; cold rotating through {rotation}",
        "  over all ranks; any: one tensor is that large. Tiny sizes have no cold row",
        "  (it would take too many buffers).",
        "x Gloo: Gloo's time over ours. Median of rounds taken in turn; an iteration is",
        "  the mean of a round on the slowest rank.",
        "symm: symmetric memory (comm.empty); priv: any other memory.",
    ]
    lines += [f"{name_of(about.peer)}: {about.text}" for about in result.about]
    return lines + [f"{name_of(skip.peer)} skipped: {skip.reason}" for skip in result.skipped]


def _is_first_of_ours(result: BenchResult, row: BenchRow) -> bool:
    first = result.plan.algorithms[0], result.plan.arrays[0]
    return row.sample.engine == "ringside" and (row.sample.algorithm, row.sample.array) == first


def _label(row: BenchRow) -> str:
    s = row.sample
    if s.engine != "ringside":
        return s.engine.rpartition(":")[2]
    words = [s.algorithm] * (s.algorithm != "auto") + [s.array] * (s.array != "numpy")
    return " ".join(["ringside", _SHORT[s.tensor], *words])


def _root(plan: BenchPlan) -> int:
    return 0 if plan.collective in _ROOTED else -1


def name_of(peer: str) -> str:
    """Return what a peer is called in tables."""
    return NAMES.get(peer, peer.rpartition(":")[2])


def _times(result: BenchResult, row: BenchRow, peers: Sequence[str]) -> str:
    cells = [result.ratio(row, peer) for peer in peers]
    return "".join(f" {'' if ratio is None else f'{_short_number(ratio)}x':>10}" for ratio in cells)


def _short_number(x: float) -> str:
    return f"{x:.0f}" if x >= 99.5 else f"{x:.1f}" if x >= 9.95 else f"{x:.2f}"


def _us(row: BenchRow) -> str:
    us = row.time_s * 1e6
    return f"{us:>10.2f}" if us < 1e5 else f"{us:>10.0f}"
