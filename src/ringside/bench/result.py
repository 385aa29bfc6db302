"""What a run found: the ranks' reports merged, with bandwidths, ratios and the share of the streaming limit.

As in nccl-tests, an iteration takes the mean over a round on the rank where that is largest; algbw is bytes over time
and busbw is algbw·2(n−1)/n. The figure of an engine is the median of its rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ringside.bench.messages import Limit, Message, Sample, Skipped
from ringside.bench.plan import ITEM_BYTES, Plan

SCHEMA = 1


@dataclass(frozen=True)
class Row:
    """One engine on one size, over all ranks.

    Args:
        sample: Rank 0's; size, engine and so on are the same on all.
        rounds_s: Seconds per all-reduce of the slowest rank, per round.
        wrong: Wrong elements, all ranks together.
        limit_share: Part of the streaming limit, 0 to 1; None where the tensors fit into the cache or are private.
    """

    sample: Sample
    rounds_s: tuple[float, ...]
    wrong: int
    limit_share: float | None = None

    @property
    def time_s(self) -> float:
        """Median over the rounds, seconds."""
        return median(self.rounds_s)

    @property
    def algbw(self) -> float:
        """Bytes per second."""
        return self.sample.size_bytes / self.time_s

    def busbw(self, ranks: int) -> float:
        """Bytes per second that each rank's bus would carry with a ring."""
        return self.algbw * 2 * (ranks - 1) / ranks


@dataclass(frozen=True)
class Result:
    """A whole run.

    Args:
        plan: What was asked.
        cores: Cores the ranks could use.
        rows: In the order measured.
        limit: Bytes per second that all ranks together stream, reads and writes.
        skipped: Peers that did not take part, with the reason.
    """

    plan: Plan
    cores: int
    rows: tuple[Row, ...]
    limit: float
    skipped: tuple[Skipped, ...] = ()

    @property
    def wrong(self) -> int:
        """Wrong elements, all rows together."""
        return sum(row.wrong for row in self.rows)

    def peer_row(self, row: Row, peer: str) -> Row | None:
        """Return a peer's row of the same size and cache state."""
        key = (peer, row.sample.size_bytes, row.sample.cache)
        return next((r for r in self.rows if (r.sample.engine, r.sample.size_bytes, r.sample.cache) == key), None)

    def ratio(self, row: Row, peer: str) -> float | None:
        """Return the peer's time over this row's, or None where the peer was not measured."""
        other = self.peer_row(row, peer)
        return None if other is None else other.time_s / row.time_s

    def to_json(self) -> dict[str, Any]:
        """Return the run as plain data; the keys are documented in `ringside bench --help`."""
        return {
            "schema": SCHEMA,
            "ranks": self.plan.ranks,
            "cores": self.cores,
            "cache_bytes": self.plan.cache_bytes,
            "stream_limit_bytes_per_second": self.limit,
            "skipped": [{"peer": s.peer, "reason": s.reason} for s in self.skipped],
            "wrong": self.wrong,
            "rows": [self._row_json(row) for row in self.rows],
        }

    def _row_json(self, row: Row) -> dict[str, Any]:
        sample, ratios = row.sample, {peer: self.ratio(row, peer) for peer in self.plan.peers}
        return {
            "size_bytes": sample.size_bytes,
            "count": sample.size_bytes // ITEM_BYTES[self.plan.dtype],
            "type": self.plan.dtype,
            "redop": self.plan.op,
            "root": -1,
            "engine": sample.engine,
            "algorithm": sample.algorithm,
            "tensor": sample.tensor,
            "cache": sample.cache,
            "buffers": sample.buffers,
            "iterations": sample.iterations,
            "time_seconds": row.time_s,
            "rounds_seconds": list(row.rounds_s),
            "algbw_bytes_per_second": row.algbw,
            "busbw_bytes_per_second": row.busbw(self.plan.ranks),
            "wrong": row.wrong,
            "ratios": {peer: x for peer, x in ratios.items() if x is not None} if sample.engine == "ringside" else {},
            "limit_share": row.limit_share,
        }


def merge(plan: Plan, cores: int, reports: Sequence[Sequence[Message]], skipped: Sequence[Skipped] = ()) -> Result:
    """Merge what the ranks reported; `skipped` are peers that were not even tried."""
    limit = _limit(reports)
    samples = [[m for m in report if isinstance(m, Sample)] for report in reports]
    rows = [_row(plan, list(of_ranks), limit) for of_ranks in zip(*samples, strict=True)]
    refused = [m for m in reports[0] if isinstance(m, Skipped)]
    return Result(plan, cores, tuple(rows), limit, (*skipped, *refused))


def _row(plan: Plan, of_ranks: list[Sample], limit: float) -> Row:
    first = of_ranks[0]
    rounds = tuple(max(times) for times in zip(*(sample.seconds for sample in of_ranks), strict=True))
    row = Row(first, rounds, sum(sample.wrong for sample in of_ranks))
    if first.cache != "any" or first.tensor != "symmetric" or first.algorithm not in ("auto", "direct"):
        return row
    traffic = 2 * plan.ranks * first.size_bytes  # every rank's tensor is read once and written once
    return Row(first, rounds, row.wrong, traffic / row.time_s / limit)


def _limit(reports: Sequence[Sequence[Message]]) -> float:
    """Return the bytes per second that all ranks stream together, the median over all rounds."""
    limits = [[m for m in report if isinstance(m, Limit)] for report in reports]
    traffic = [4 * limit.size_bytes * len(reports) for limit in limits[0] for _ in limit.seconds]
    seconds = [[s for limit in of_rank for s in limit.seconds] for of_rank in limits]
    slowest: list[float] = [max(times) for times in zip(*seconds, strict=True)]
    return median(t / s for t, s in zip(traffic, slowest, strict=True))
