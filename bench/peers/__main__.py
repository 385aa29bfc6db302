"""Every collective, beside every peer that `bench/peers.sh` could make: docs/peers.md.

    bench/peers.sh && python -m bench.peers --write
    python -m bench.peers --short --write       (few cells, a few minutes: that it works, not how fast)
    ... [--ranks 2,4,8] [--peers LIST] [--launches 3] [--results runs/peers.json]

All seven collectives, and steps of users: DDP, FSDP2, a tensor-parallel layer, the int32 that vLLM's data-parallel
ranks sum. One launch is one peer beside ours in the same processes, which take turns; launches alternate between the
peers, and are made three times. What a launch gave is kept in the file of results, and a run that was interrupted goes
on where it stopped. A peer that hangs or crashes is asked once more; one that failed is not asked again in later
launches. On two cores a whole run takes about five hours (estimated),
with `--ranks 2` an hour and a half; nothing else should run. The exit status is 1 where an element was wrong.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from bench.common import DOCS, RUNS, make_parser, names_among, numbers, read_results, report_progress
from bench.peers.page import page

from ringside.bench import plan as plans
from ringside.bench.launch import run_launches
from ringside.bench.peers import why_not
from ringside.bench.plan import BenchPlan
from ringside.bench.result import BenchResult, merge
from ringside.engine.topology import cache_bytes, usable_cores
from ringside.errors import RingsideError

ENVIRONMENTS = "build/peers"
PEERS = tuple(peer for peer in plans.PEERS if peer != "mpi")
SIZES = (4, 64, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)
STEP_SIZES = {"ddp": (101 << 20,), "fsdp2": (64 << 20,), "tensor_parallel": (64 << 10, 2 << 20)}
SHORT_SIZES, SHORT_ROUNDS, SHORT_CACHE = (4, 64 << 10), 6, 4 << 20
ROUNDS, ROUND_S = 5, 0.03
TRIES = (
    2  # of a peer that hangs or crashes: on a machine that was busy for a moment it may have been the machine's fault
)
VLLM_NUMBERS = 4  # int32 of each data-parallel rank, summed by all


@dataclass(frozen=True)
class Work:
    """One collective or step on so many ranks, in all its sizes."""

    name: str
    ranks: int
    plan: BenchPlan


def works(ranks: int, short: bool) -> Iterator[Work]:
    """Yield what is measured on a number of ranks."""

    def planned(collective: str, sizes: Sequence[int], dtype: str = "float32") -> BenchPlan:
        return BenchPlan(
            key="",
            ranks=ranks,
            sizes_bytes=plans.whole_items(sizes, dtype, collective, ranks),
            dtype=dtype,
            rounds=SHORT_ROUNDS if short else ROUNDS,
            round_seconds=ROUND_S,
            cache_bytes=SHORT_CACHE if short else cache_bytes(),
            collective=collective,
            arrays=("numpy", "torch"),
            pin=True,
            environments=ENVIRONMENTS,
        )

    for collective in plans.COLLECTIVES:
        yield Work(collective, ranks, planned(collective, SHORT_SIZES if short else SIZES))
    for step, sizes in () if short else STEP_SIZES.items():
        yield Work(step, ranks, planned(step, sizes))
    yield Work("vllm_int32", ranks, planned("all_reduce", (4 * VLLM_NUMBERS * ranks,), "int32"))


def measure(work: Work, peer: str) -> dict[str, Any]:
    """Return what one launch gave: of every case our turns beside the peer's."""
    began, when = time.monotonic(), {"load": os.getloadavg()[0], "date": time.strftime("%Y-%m-%d")}
    try:
        for _ in range(TRIES):
            plan = msgspec.structs.replace(work.plan, key=f"bench/{uuid.uuid4()}", peers=(peer,))
            launches, failed = run_launches(plan)
            if not failed:
                break
    except RingsideError as failure:
        return {"cells": [], "failed": str(failure), "about": "", "took_s": time.monotonic() - began, **when}
    result = merge(plan, usable_cores(), launches, failed)
    return {
        "cells": list(_cells(result, peer)),
        "failed": "; ".join(skip.reason for skip in result.skipped),
        "about": "".join(about.text for about in result.about),
        "took_s": time.monotonic() - began,
        **when,
    }


def _cells(result: BenchResult, peer: str) -> Iterator[dict[str, Any]]:
    rows = {(r.sample.engine, r.sample.size_bytes, r.sample.cache): r for r in result.rows}
    for row in result.rows:
        s = row.sample
        if s.engine != "ringside" or peer not in row.beside:
            continue
        other = rows[peer, s.size_bytes, s.cache]
        own, theirs = row.beside[peer]
        yield {
            "size_bytes": s.size_bytes, "cache": s.cache, "tensor": s.tensor, "array": s.array,
            "ours_s": own, "peer_s": theirs, "ours_single_s": row.single_s, "peer_single_s": other.single_s,
            "wrong": row.wrong, "peer_wrong": other.wrong,
        }  # fmt: skip


def main() -> int:
    """Measure what is not in the file of results yet, and say or write what came of it."""
    parser = make_parser("bench.peers", __doc__)
    parser.add_argument("--ranks", type=numbers, default=[2, 4, 8], help="rank counts (default: 2,4,8)")
    parser.add_argument("--peers", type=names_among(PEERS), default=list(PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument(
        "--launches", type=int, default=3, help="of each peer and collective (default: 3; 0: only the page)"
    )
    parser.add_argument("--short", action="store_true", help="few sizes, one launch, a small cold rotation")
    parser.add_argument("--results", type=Path, default=RUNS / "peers.json", help="the file of results")
    parser.add_argument("--write", action="store_true", help="write docs/peers.md")
    args = parser.parse_args()
    results = read_results(args.results)
    if results.setdefault("short", args.short) != args.short:
        parser.error(f"{args.results} holds a run with{'' if results['short'] else 'out'} --short")
    if args.launches or "cores" not in results:  # else the page is of where it was measured
        results["cores"] = usable_cores()
        results["absent"] = {peer: reason for peer in args.peers if (reason := why_not(peer, ENVIRONMENTS))}
    launches: dict[str, Any] = results.setdefault("launches", {})
    for found in launches.values():  # a file from before each launch had its own
        found.setdefault("load", results.get("load", 0.0))
        found.setdefault("date", results.get("date", ""))
    for number in range(min(args.launches, 1) if args.short else args.launches):
        for work in (work for ranks in args.ranks for work in works(ranks, args.short)):
            for peer in args.peers:
                name = f"{work.name} {work.ranks} {peer}"
                failed = launches.get(f"{name} 0", {}).get("failed")
                if peer in results["absent"] or f"{name} {number}" in launches or failed:
                    continue
                found = launches[f"{name} {number}"] = measure(work, peer)
                report_progress(f"{name}, launch {number + 1}: {found['took_s']:.0f} s {found['failed']}".rstrip())
                args.results.parent.mkdir(exist_ok=True)
                args.results.write_text(json.dumps(results))
    text = page(results)
    if args.write:
        (DOCS / "peers.md").write_text(text)
    else:
        print(text)
    wrong = sum(cell["wrong"] + cell["peer_wrong"] for found in launches.values() for cell in found["cells"])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
