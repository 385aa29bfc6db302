"""What one rank does while a link of its mesh is cut: all-reduces as chosen, and then beside named ones, in turn."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

_MOST_TO_SETTLE = 60
_WAIT_S = 60.0


def main() -> None:
    import torch.distributed as dist

    import ringside

    plan = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    with ringside.communicator(timeout=60) as comm:
        array = np.ones(plan["size_bytes"] // 4, dtype=np.float32)

        def once(name: str | None = None) -> float:
            began = time.perf_counter()
            comm.all_reduce(array, "avg", algorithm=name)
            return time.perf_counter() - began

        def settle() -> None:
            for _ in range(_MOST_TO_SETTLE):
                if comm.settled(array.nbytes):
                    return
                once()

        settle()
        before = [once() for _ in range(8)]
        was = comm.explain(array.nbytes).partition(": ")[2].partition(".")[0]
        comm.barrier()
        if comm.rank == 0:
            print("READY", flush=True)
        until = time.monotonic() + _WAIT_S
        while not os.path.exists(plan["go"]):
            if time.monotonic() > until:
                raise SystemExit("nobody cut the link")
            time.sleep(0.01)
        comm.barrier()
        after, answered = [], 0
        for number in range(1, plan["most"] + 1):
            after.append(once())
            if comm.revisions and not answered:
                answered = number
                break
        settle()
        turns: dict[str, list[float]] = {name: [] for name in ("default", *plan["names"])}
        for name in plan["names"]:
            once(name)
        for _ in range(plan["rounds"]):
            for name, times in turns.items():
                comm.barrier()
                times.append(once(None if name == "default" else name))
        chosen = comm.explain(array.nbytes).partition(": ")[2].partition(".")[0]
        report: dict[str, Any] = {"before": before, "after": after, "answered": answered, "was": was}
        report |= {"chosen": chosen, "turns": turns, "why": list(comm.revisions)}
    dist.destroy_process_group()
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
