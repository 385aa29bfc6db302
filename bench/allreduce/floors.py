"""The speed Ringside promises, beside what this machine gives: every floor, met or missed.

Runs `ringside bench --peers gloo,mpi` for each rank count and compares. Floors are for 2 ranks on 2 cores, and for 4
and 8 ranks on 2 cores.

    python -m bench.allreduce.floors [--ranks 2,4,8] [--log FILE.json]
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.common import make_parser, numbers

SIZES = (4, 1 << 10, 1 << 20, 64 << 20, 256 << 20)  # bytes
Row = dict[str, Any]
Measure = Callable[[Row], "float | None"]


def times_peer(name: str) -> Measure:
    """Return the ratio of a peer's time to ours."""
    return lambda row: row["ratios"].get(name)


def call_us(row: Row) -> float:
    """Return the time of a call in microseconds, negated: less is better."""
    return -float(row["time_seconds"]) * 1e6


# (tensor, first size, last size, what is compared, its measure, floor)
TWO_RANKS: list[tuple[str, int, int, str, Measure, float]] = [
    ("symmetric", 4, 1 << 10, "us", call_us, -5.0),
    ("symmetric", 4, 1 << 10, "x Gloo", times_peer("gloo"), 40),
    ("symmetric", 1 << 20, 1 << 20, "x Gloo", times_peer("gloo"), 30),
    ("symmetric", 1 << 20, 1 << 20, "x Open MPI", times_peer("mpi"), 4),
    ("symmetric", 64 << 20, 1 << 62, "x Gloo", times_peer("gloo"), 6),
    ("symmetric", 64 << 20, 1 << 62, "x Open MPI", times_peer("mpi"), 4),
    ("symmetric", 64 << 20, 1 << 62, "of limit", lambda row: row["limit_share"], 0.65),
    ("private", 1 << 20, 1 << 62, "x Gloo", times_peer("gloo"), 3),
    ("private", 1 << 20, 1 << 62, "x Open MPI", times_peer("mpi"), 1),
]
MORE_RANKS: list[tuple[str, int, int, str, Measure, float]] = [
    ("symmetric", 4, 1 << 10, "x Gloo", times_peer("gloo"), 5),
    ("symmetric", 1 << 20, 1 << 20, "x Gloo", times_peer("gloo"), 10),
    ("symmetric", 64 << 20, 1 << 62, "x Gloo", times_peer("gloo"), 4),
    ("private", 1 << 20, 1 << 62, "x Gloo", times_peer("gloo"), 3),
]


def main() -> int:
    """Measure, print every comparison, return 1 if a floor was missed."""
    parser = make_parser("bench.allreduce.floors", __doc__)
    parser.add_argument("--ranks", default="2,4,8", help="rank counts (default: 2,4,8)")
    parser.add_argument("--log", type=Path, help="also write all that was measured, as JSON")
    args = parser.parse_args()
    results = [measure_ranks(ranks) for ranks in numbers(args.ranks)]
    if args.log:
        args.log.write_text(json.dumps(results, indent=2))
    lines = [line for result in results for line in compare_with_floors(result)]
    missed = sum(line.startswith("missed") for line in lines)
    print(f"{len(lines) - missed} of {len(lines)} floors met")
    print("\n".join(lines))
    return 1 if missed else 0


def measure_ranks(ranks: int) -> dict[str, Any]:
    """Return what `ringside bench --json` says for a rank count."""
    command = [sys.executable, "-m", "ringside", "bench", "-n", str(ranks), "--peers", "gloo,mpi", "--json"]
    told = subprocess.run([*command, "--sizes", ",".join(map(str, SIZES))], stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(told.stdout)
    return result


def compare_with_floors(result: dict[str, Any]) -> Iterator[str]:
    """Yield one line per floor and size it applies to, warm buffers (or any, where there is no difference)."""
    rows = [r for r in result["rows"] if r["engine"] == "ringside" and r["cache"] != "cold"]
    for tensor, first, last, unit, value_of, floor in TWO_RANKS if result["ranks"] <= 2 else MORE_RANKS:
        for row in rows:
            value = value_of(row) if row["tensor"] == tensor and first <= row["size_bytes"] <= last else None
            if value is not None:
                met = "met   " if value >= floor else "missed"
                yield (
                    f"{met} {result['ranks']} ranks {tensor:<9} {row['size_bytes']:>9} B: "
                    f"{abs(value):8.2f} {unit:<10} (floor {abs(floor):g})"
                )


if __name__ == "__main__":
    sys.exit(main())
