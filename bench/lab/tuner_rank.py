"""What one rank does in the lab to time the selection's start-up: makes communicators, one after the other, anew.

`tuner.py` starts it on every host with a plan (a JSON file); its last line on stdout says, for every
communicator, what the selection took on this rank and what all of it did (groups, connections, memory), seconds.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main() -> None:
    import torch
    import torch.distributed as dist

    import ringside

    torch.set_num_threads(1)
    plan = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    took: list[tuple[float, float]] = []
    for number in range(plan["starts"]):
        dist.barrier()
        began = time.perf_counter()
        with ringside.communicator() as comm:
            whole_s = time.perf_counter() - began
            took.append((comm.startup_s, whole_s))
            dist.barrier()
        if dist.get_rank() == 0:
            print(f"start {number + 1}: {took[-1][0]:.2f} s, all of it {whole_s:.2f} s", file=sys.stderr, flush=True)
    dist.destroy_process_group()
    print(json.dumps(took), flush=True)


if __name__ == "__main__":
    main()
