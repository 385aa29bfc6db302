"""One rank of the benchmark: `python -m ringside.bench.worker DIRECTORY`, started by `launch.py`.

The directory holds the plan and takes the rank's messages. RANK tells the rank, or what Open MPI's mpirun sets.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from ringside.bench.contender import Contender, ours
from ringside.bench.measure import Meter
from ringside.bench.messages import Begin, Done, Failed, Hello, Skipped, Writer
from ringside.bench.plan import Plan, format_size, storage_dtype
from ringside.engine import Communicator
from ringside.errors import SyncError

PLAN = "plan.json"
_PR_SET_PDEATHSIG = 1


def main(directory: Path) -> None:
    """Run this rank to its end; a failure is reported and ends the process at once."""
    die_with_parent()
    plan = msgspec.json.decode((directory / PLAN).read_bytes(), type=Plan)
    rank = rank_of_environment()
    writer = Writer(directory, rank)
    writer.send(Hello(os.getpid()))
    try:
        run(plan, rank, directory, writer)
    except Exception as error:
        lost = error.ranks if isinstance(error, SyncError) else ()
        writer.send(Failed(type(error).__name__, str(error), lost))
        # Leaving Gloo or MPI politely would wait for the others, who may wait for this rank.
        os._exit(1)
    writer.send(Done())
    writer.close()


def run(plan: Plan, rank: int, directory: Path, writer: Writer) -> None:
    """Measure everything in the plan."""
    with Communicator(plan.key, rank, plan.ranks) as comm:
        peers = [peer for name in plan.peers if (peer := _peer(name, plan, rank, directory, writer))]
        meter = Meter(comm, plan, [*ours(comm, plan.dtype, plan.op, plan.algorithms), *peers])
        gc.disable()
        writer.send(Begin("the streaming limit", 0.0))
        writer.send(meter.limit())
        cases = [(size, *state) for size in plan.sizes_bytes for state in plan.states(size)]
        for at, (size, cache, buffers) in enumerate(cases):
            writer.send(Begin(f"{format_size(size)}, {cache}", at / len(cases)))
            for sample in meter.case(size, cache, buffers):
                writer.send(sample)
        writer.send(meter.limit())
        comm.barrier()
        for peer in peers:
            peer.close()


def _peer(name: str, plan: Plan, rank: int, directory: Path, writer: Writer) -> Contender | None:
    """Open a peer and try it on one element; report why it cannot do this dtype and reduction."""
    opened: dict[str, Callable[[], Contender]] = {
        "gloo": lambda: _open_gloo(plan, rank, directory),
        "mpi": lambda: _open_mpi(plan),
    }
    try:
        peer = opened[name]()
        peer.call(peer.wrap(np.zeros(1, storage_dtype(plan.dtype))))
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        writer.send(Skipped(name, f"{plan.op} of {plan.dtype}: {reason}"))
        return None
    return peer


def _open_gloo(plan: Plan, rank: int, directory: Path) -> Contender:
    from ringside.bench.peers.gloo import open_gloo

    return open_gloo(rank, plan.ranks, plan.dtype, plan.op, directory)


def _open_mpi(plan: Plan) -> Contender:
    from ringside.bench.peers.mpi import open_mpi

    return open_mpi(plan.ranks, plan.dtype, plan.op)


def rank_of_environment() -> int:
    """Return this process's rank as whoever started it says."""
    return int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"])


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
