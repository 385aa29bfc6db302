"""Between three hosts: the group's own all-reduce while rank 1 is sent the signal that is named."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import threading

import torch
import torch.distributed as dist

import ringside
from ringside.errors import PeerLostError

path, number = sys.argv[1], signal.Signals[sys.argv[2]]
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=3)
comm = ringside.communicator(machine=f"host {rank}", algorithm="native", timeout=300)
x = torch.ones(30_000_000)
comm.all_reduce(x)
stopped = pathlib.Path(f"{path}.stopped")
if rank == 1:
    stopped.write_text(str(os.getpid()))
    threading.Timer(0.05, os.kill, [os.getpid(), number]).start()
if rank == 0 and number == signal.SIGSTOP:
    threading.Timer(1.5, os.kill, [os.getpid(), signal.SIGINT]).start()
try:
    while True:
        comm.all_reduce(x)
except PeerLostError as error:
    print(error.ranks, flush=True)
    if rank == 2 and number == signal.SIGSTOP:
        os.kill(int(stopped.read_text()), signal.SIGKILL)
except KeyboardInterrupt:
    print("interrupted", flush=True)
comm.close()
del comm
