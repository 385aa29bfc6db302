"""The counting job under torchft: how long from a SIGKILL to the next committed step, and how many samples are dropped.

    python -m bench.survive.with_torchft [--heartbeat-ms 5000] [--timeout-s 5]

bench/survive/ starts it, with the Python that has torchft (`--torchft PYTHON`); it needs torch and torchft alone, so
an environment of its own can keep torchft's dependencies out of ours. Four replica groups of one worker over Gloo on
this host, and a lighthouse. Two of them kill themselves, one after the other, when the others have begun to wait for
their gradients. Printed is one line of JSON. Two times decide how long healing takes: the lighthouse waits for whoever
gave a sign of life within `--heartbeat-ms` (5000 is its own default), and a replica that is no neighbour of the dead
one in Gloo's ring waits for `--timeout-s` (5 in torchft's example of DDP).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
from bench.common import make_parser, module_command
from torch import nn

REPLICAS, SAMPLES, BATCH, STEPS = 4, 96, 24, 60
KILLED_IN = {1: 20, 2: 40}  # replica: the step in which it kills itself
LIMIT_S = 120.0  # for a whole job


def train_replica(replica: int, directory: Path, timeout_s: float) -> None:
    """Count samples as one replica; write down when steps were committed, what was taken and what was counted."""
    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo

    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    counts = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))
    optimizer = torch.optim.SGD([counts], lr=1.0)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=timeout_s)), min_replica_size=1, init_sync=False,
        load_state_dict=lambda state: counts.data.copy_(state["counts"]), state_dict=lambda: {"counts": counts.data},
        replica_id=f"replica{replica}", store_addr="localhost", store_port=store.port, rank=0, world_size=1,
    )  # fmt: skip
    meet_others(replica, directory)
    own = torch.arange(SAMPLES)[replica::REPLICAS]
    share, taken, commits = BATCH // REPLICAS, 0, []
    while manager.current_step() < STEPS:
        manager.start_quorum()
        optimizer.zero_grad()
        batch = own[torch.arange(taken, taken + share) % len(own)]
        taken += share
        (-counts[batch].sum()).backward()
        manager.wait_quorum()
        if manager.current_step() == KILLED_IN.get(replica):
            write_json(
                directory / f"killed-{replica}",
                {"at": time.monotonic(), "step": manager.current_step(), "taken": taken},
            )
            os.kill(os.getpid(), signal.SIGKILL)
        manager.allreduce(counts.grad, reduce_op=dist.ReduceOp.SUM).wait()
        if manager.should_commit():
            optimizer.step()
            commits.append((manager.current_step() - 1, time.monotonic()))
    write_json(directory / f"ended-{replica}", {"taken": taken, "counted": int(counts.sum()), "commits": commits})
    manager.shutdown(wait=False)


def meet_others(replica: int, directory: Path) -> None:
    """Wait until all replicas have come, so that they begin together."""
    write_json(directory / f"ready-{replica}", replica)
    until = time.monotonic() + LIMIT_S
    while len(list(directory.glob("ready-*"))) < REPLICAS and time.monotonic() < until:
        time.sleep(0.01)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def measure_healing(heartbeat_ms: int, timeout_s: float) -> dict[str, object]:
    """Run one job; return seconds from each kill to the next committed step, and how many samples were dropped."""
    from torchft.coordination import LighthouseServer

    patience = {"join_timeout_ms": 60_000, "heartbeat_timeout_ms": heartbeat_ms, "quorum_tick_ms": 100}
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, **patience)
    environ = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address(), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="ringside-torchft-") as path:
        command = [
            *module_command("bench.survive.with_torchft"),
            "--directory",
            path,
            "--timeout-s",
            str(timeout_s),
            "--replica",
        ]
        replicas = [subprocess.Popen([*command, str(number)], env=environ) for number in range(REPLICAS)]
        until = time.monotonic() + LIMIT_S
        try:
            for replica in replicas:
                replica.wait(max(until - time.monotonic(), 0.1))
        finally:
            for replica in replicas:
                replica.kill()
                replica.wait()
            lighthouse.shutdown()
        return read_results(Path(path))


def read_results(directory: Path) -> dict[str, object]:
    """Read what the replicas wrote down."""
    ended = [json.loads(path.read_text()) for path in directory.glob("ended-*")]
    killed = [json.loads(path.read_text()) for path in sorted(directory.glob("killed-*"))]
    commits = [commit for end in ended for commit in end["commits"]]
    return {
        "healed_s": [min(at for step, at in commits if step >= kill["step"]) - kill["at"] for kill in killed],
        "dropped": sum(each["taken"] for each in (*ended, *killed)) - ended[0]["counted"],
        "never_taken": sum(STEPS - 1 - step for step in KILLED_IN.values()) * BATCH // REPLICAS,
        "equal": len({end["counted"] for end in ended}) == 1,
    }


def main() -> int:
    parser = make_parser("bench.survive.with_torchft", __doc__)
    parser.add_argument("--heartbeat-ms", type=int, default=5000)
    parser.add_argument("--timeout-s", type=float, default=5.0)
    parser.add_argument("--replica", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.replica is not None:
        train_replica(args.replica, args.directory, args.timeout_s)
    else:
        print(json.dumps(measure_healing(args.heartbeat_ms, args.timeout_s)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
