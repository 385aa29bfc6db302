"""Record the fixtures of `tests/doctor/torch_2_15` with a torch that has no Ringside: three real ranks per job.

`python tests/doctor/scripts/record_torch_2_15.py FOLDER`, with torch 2.15 and what its debug server needs: jinja2,
tabulate and aiohttp.

stays_away   over Gloo: an all-gather into a list, a reduce-scatter of one, and an all-reduce that rank 1 does not call;
             the dumps are those that the debug server's `/fr_dump_file` has written
from_anyone  over a backend in Python: rank 2 waits in a receive from anyone, which nobody sends to, and the others
             wait for it in an all-reduce; with what the debug server writes of `/c10d_health_check` now and then
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import debug

c10d: Any = torch._C._distributed_c10d
PORT = 29_711
SETTLED_S = 2.0


class Lent(c10d.Backend):
    """Gloo as a backend in Python: torch's hook records its calls, messages too, under the name that it gives."""

    inner: Any

    def getBackendName(self) -> str:
        """The name in its dumps."""
        return "lent"

    def allreduce(self, tensors: Any, options: Any) -> Any:
        return self.inner.allreduce(tensors, options)

    def allgather(self, outputs: Any, inputs: Any, options: Any) -> Any:
        return self.inner.allgather(outputs, inputs, options)

    def send(self, tensors: Any, to: int, tag: int) -> Any:
        return self.inner.send(tensors, to, tag)

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        work = self.inner.recv_anysource(tensors, tag)
        work.wait()  # the call itself waits: torch takes one that has returned for one that is over
        return work


def lent(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Lent:
    """Make the backend, as torch asks for it."""
    backend = Lent(rank, size)
    backend.inner = dist.ProcessGroupGloo(store, rank, size, timeout)
    return backend


def stays_away(rank: int) -> None:
    """Call what all call, and what rank 1 does not."""
    dist.all_gather([torch.empty(4) for _ in range(3)], torch.ones(4))
    dist.reduce_scatter(torch.empty(2), [torch.ones(2) for _ in range(3)])
    if rank != 1:
        dist.all_reduce(torch.ones(5))


def from_anyone(rank: int) -> None:
    """Receive two messages in any order, and wait for a third."""
    dist.all_gather([torch.empty(4) for _ in range(3)], torch.ones(4))
    if rank != 2:
        dist.send(torch.ones(3), 2)
        dist.all_reduce(torch.ones(5))
    else:
        for _ in range(3):
            dist.group.WORLD.recv_anysource([torch.empty(3)], 0)


JOBS = {"stays_away": ("gloo", stays_away), "from_anyone": ("lent", from_anyone)}


def run(rank: int, job: str, folder: str) -> None:
    """One rank: its calls in a thread that stays where it hangs, the debug server beside it."""
    backend, calls = JOBS[job]
    os.environ.update(RANK=str(rank), TORCH_FR_DUMP_TEMP_FILE=f"{folder}/dump_")
    dist.Backend.register_backend("lent", lent, devices="cpu")
    dist.init_process_group(backend, rank=rank, world_size=3, timeout=datetime.timedelta(seconds=60))
    pages = {"dump_dir": f"{folder}/pages", "dump_interval": 1.0, "enabled_dumps": {"c10d_health_check"}}
    debug.start_debug_server(PORT + 1, **pages)
    threading.Thread(target=calls, args=(rank,), daemon=True).start()
    while not list(Path(folder).glob("pages/*")):
        time.sleep(0.1)
    time.sleep(SETTLED_S)
    Path(folder, f"trace_{rank}.json").write_bytes(c10d._dump_fr_trace_json(backend=backend))
    if rank == 0:
        urllib.request.urlopen(f"http://localhost:{PORT + 1}/fr_dump_file?backend={backend}").read()
        debug._DEBUG_SERVER_PROC.kill()
        Path(folder, "over").touch()
    while not Path(folder, "over").exists():
        time.sleep(0.1)
    os._exit(0)


if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(PORT), WORLD_SIZE="3", TORCH_FR_BUFFER_SIZE="100")
    for job in JOBS:
        out = Path(sys.argv[1], job)
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run, (job, folder), nprocs=3)
            for path in sorted(Path(folder).glob("dump_*")):
                (out / path.name).write_bytes(path.read_bytes())
            for path in sorted(Path(folder).glob("trace_*")):
                (out / path.name).write_text(json.dumps(json.loads(path.read_text()), separators=(",", ":")))
            *_, last = sorted(Path(folder, "pages").glob("c10d_health_check_*"))
            (out / last.name).write_bytes(last.read_bytes())
