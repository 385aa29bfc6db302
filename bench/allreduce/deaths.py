"""How soon survivors hear of a death: a rank that is killed, on one host and between hosts, and a cable that is pulled.

    python -m bench.allreduce.deaths [--repeat 5] [--json]

Ranks call all-reduces without a pause; one is killed, or its host's cable is pulled, and each survivor says when its
call failed. Printed is how long the slowest survivor took: the median and the longest of the repeats, beside what is
promised and, from the same run, what stock Gloo took. Gloo tells the neighbours of a dead process; who waits for
somebody else, or for a host that is silent, hears nothing before its timeout (30 s here). Hosts are network namespaces
(`ringside lab check` says whether this machine can have them). Exit status 1: a promise was broken.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.common import make_parser

from ringside.lab import Lab, RankPlacement

LIMIT_S = 150.0  # for a whole job

# Ranks of one host are processes of a lab with one host, so all cases are run and told alike.
RANK = """
import datetime, os, sys, time, torch, torch.distributed as dist
engine, count = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30 if engine == "gloo" else 600))
x = torch.ones(count)
if engine == "gloo":
    call = lambda: dist.all_reduce(x)
else:
    import ringside
    comm = ringside.communicator(algorithm=None if engine == "ringside" else engine, timeout=600)
    call = lambda: comm.all_reduce(x.fill_(1.0))
for _ in range(3):
    call()
print("ready", os.getpid(), flush=True)
try:
    while True:
        call()
except Exception as error:
    print("heard", time.monotonic(), type(error).__name__, flush=True)
os._exit(0)  # nothing waits for what is left of the group
"""


@dataclass(frozen=True)
class Case:
    """What happens to whom.

    Args:
        name: For the table.
        hosts: How many, with one rank each; 1: all four ranks on one.
        count: Elements of the all-reduces, float32.
        engine: Algorithm of our communicator; "ringside": as it chooses on one host.
        strike: "kill" a rank, or "cut" its host's cable.
        promised_s: Within how many seconds all survivors hear of it.
    """

    name: str
    hosts: int
    count: int
    engine: str
    strike: str
    promised_s: float


CASES = (
    Case("killed, one host, 12 B", 1, 3, "ringside", "kill", 1.0),
    Case("killed, one host, 4 MB", 1, 1 << 20, "ringside", "kill", 1.0),
    Case("killed, between hosts, ring, 4 KB", 4, 1 << 10, "ring", "kill", 1.0),
    Case("killed, between hosts, ring, 32 MB", 4, 1 << 23, "ring", "kill", 1.0),
    Case("killed, between hosts, tree, 4 MB", 4, 1 << 20, "tree", "kill", 1.0),
    Case("cable pulled, tree, 80 KB", 4, 20_000, "tree", "cut", 5.0),
    Case("cable pulled, ring, 16 MB", 4, 1 << 22, "ring", "cut", 5.0),
)
VICTIM = 2


def heard_s(case: Case, engine: str) -> float:
    """Return how long after the strike the slowest survivor's call failed, seconds; infinite: one never heard."""
    per_host = [4] if case.hosts == 1 else [1] * case.hosts
    ready: dict[int, int] = {}
    heard: dict[int, float] = {}
    struck = 0.0
    with tempfile.TemporaryDirectory() as folder, Lab(hosts=case.hosts, ranks_per_host=per_host, rate="1gbit") as lab:
        script = Path(folder) / "rank.py"
        script.write_text(RANK)

        def strike(pid: int) -> None:
            nonlocal struck
            time.sleep(0.2)  # in the middle of all-reduces
            struck = time.monotonic()
            if case.strike == "cut":
                lab.cut(host=VICTIM)
            else:
                os.kill(pid, signal.SIGKILL)

        def sink(place: RankPlacement, _stream: str, line: str) -> None:
            words = line.split()
            if words[:1] == ["ready"]:
                ready[place.rank] = int(words[1])
                if len(ready) == 4:
                    threading.Thread(target=strike, args=(ready[VICTIM],)).start()
            elif words[:1] == ["heard"]:
                heard[place.rank] = float(words[1])

        words = [sys.executable, str(script), engine, str(case.count)]
        lab.run(words, {"RINGSIDE_SELECTION": "off"}, timeout_s=LIMIT_S, after_failure_s=LIMIT_S, sink=sink)
    survivors = {0, 1, 2, 3} - {VICTIM}
    return max(heard[rank] - struck for rank in survivors) if heard.keys() >= survivors else float("inf")


@dataclass(frozen=True)
class Row:
    """How a case went, seconds."""

    name: str
    median_s: float
    longest_s: float
    promised_s: float
    gloo_s: float


def measure_case(case: Case, repeat: int, say: Callable[[str], None]) -> Row:
    """Run a case with Ringside and with Gloo in turn."""
    ours, gloo = [], []
    for number in range(repeat):
        ours.append(heard_s(case, case.engine))
        if number < 2:  # each may take its whole timeout
            gloo.append(heard_s(case, "gloo"))
        say(f"  {case.name}: {ours[-1]:.3f} s")
    return Row(case.name, statistics.median(ours), max(ours), case.promised_s, statistics.median(gloo))


def main() -> int:
    parser = make_parser("bench.allreduce.deaths", __doc__)
    parser.add_argument("--repeat", type=int, default=5, help="strikes of each case (5)")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    asked = parser.parse_args()
    if asked.repeat < 1:
        parser.error(f"--repeat {asked.repeat}: at least 1")
    if reason := Lab.unavailable():
        print(f"no lab can be had: {reason}", file=sys.stderr)
        return 3
    rows = [measure_case(case, asked.repeat, lambda words: print(words, file=sys.stderr)) for case in CASES]
    if asked.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print("| a rank is ... | slowest survivor, median | longest | promised | Gloo |")
        print("|---|---|---|---|---|")
        for row in rows:
            times = (row.median_s, row.longest_s, row.promised_s, row.gloo_s)
            print(f"| {row.name} | {' | '.join(f'{seconds:.3g} s' for seconds in times)} |")
    return int(any(row.longest_s > row.promised_s for row in rows))


if __name__ == "__main__":
    sys.exit(main())
