"""The predictor at scale: a heterogeneous ring of 24,576 ranks, every algorithm at 30 sizes on as many, and plans.

    python -m bench.predict.scale [--json]

Seconds are of the processor (one core); a machine that is busy elsewhere does not change them much. Memory is the
process's peak.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from bench.common import make_parser

from ringside.predict import LinkClass, LinkOverride, Topology, closed_form, preset, prices, simulate
from ringside.predict.plan.plan import PlanQuestion, plan
from ringside.predict.plan.step import MOST_ACTIONS, Job
from ringside.schedule import ALGORITHMS, by_name, hierarchical, ring

RANKS = 24_576
SIZES = np.geomspace(8, 16 * 2**30, 30)  # bytes: 8 B to 16 GiB


def main() -> int:
    """Measure, print a line each; return 1 if a floor was missed."""
    parser = make_parser("bench.predict.scale", __doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    rows = [heterogeneous_ring(), *all_algorithms(), *plans()]
    rows.append(_floor_row("peak memory, MB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, 1000))
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            floor = f"  (at most {row['most']:g})" if row["most"] else ""
            print(f"{row['what']:<64}{row['value']:>10.3f}{floor}{row['note']}")
    return 0 if all(row["most"] is None or row["value"] <= row["most"] for row in rows) else 1


def heterogeneous_ring() -> dict[str, Any]:
    """Every link of the ring is its own: 1.2e9 transfers."""
    random = np.random.default_rng(1)
    figures = zip(random.uniform(1e-6, 8e-6, RANKS), random.uniform(20e9, 50e9, RANKS), strict=True)
    links = tuple(LinkOverride(r, (r + 1) % RANKS, a, b) for r, (a, b) in enumerate(figures))
    fast = LinkClass("infiniband", 1e-6, 50e9)
    topology = Topology("every link its own", (8,) * (RANKS // 8), fast, fast, nics=8, overrides=links)
    took, timeline = _cpu_time(lambda: simulate(ring(RANKS), topology, 1e9, late={7: 5e-3}))
    return _floor_row("heterogeneous ring, CPU s", took, 2, f"  {timeline.seconds:.6f} s simulated")


def all_algorithms() -> list[dict[str, Any]]:
    """Every all-reduce at every size, on hosts of 8."""
    topology = preset("dgx-h100", hosts=RANKS // 8)
    rows, total = [], 0.0
    for name in ALGORITHMS:
        schedule = hierarchical(8, RANKS // 8) if name == "hierarchical" else by_name(name, RANKS)
        took, found = _cpu_time(partial(prices, schedule, topology, SIZES))
        form = closed_form(schedule, topology, SIZES[:1]) is not None
        total += took
        note = f"  {'formula' if form else 'simulated'}, {found[0]:.3g} to {found[-1]:.3g} s"
        rows.append({"what": f"{name}, {len(SIZES)} sizes, CPU s", "value": took, "most": None, "note": note})
    return [*rows, _floor_row(f"all algorithms x {len(SIZES)} sizes x {RANKS} ranks, CPU s", total, 1)]


def plans() -> list[dict[str, Any]]:
    """Plans with a step: of as many GPUs, of CPU hosts, whose schedules are simulated, and of the longest step."""
    rows = []
    longest = Job(stage=3, layers=32, micro_batches=MOST_ACTIONS // 33)
    for name, hosts, job, most in (
        ("dgx-h100", RANKS // 8, None, 0.5),
        ("ethernet-10g", 64, None, 0.5),
        ("ethernet-10g", 256, None, 0.5),
        ("dgx-h100", 16, longest, 20.0),
    ):
        question = PlanQuestion(preset(name, hosts=hosts), 1e9, compute_s=0.25, job=job)
        took, found = _cpu_time(partial(plan, question))
        what = f", {job.actions} layers of micro-batches" if job else ""
        note = f"  {found.priced.algorithm}, {found.priced.seconds.value:.3g} s"
        rows.append(_floor_row(f"plan of {question.topology.ranks} ranks, {name}{what}, CPU s", took, most, note))
    return rows


def _cpu_time(call: Callable[[], Any]) -> tuple[float, Any]:
    since = time.process_time()
    result = call()
    return time.process_time() - since, result


def _floor_row(name: str, value: float, most: float, note: str = "") -> dict[str, Any]:
    return {"what": name, "value": value, "most": most, "note": note}


if __name__ == "__main__":
    sys.exit(main())
