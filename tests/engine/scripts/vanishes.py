"""Between hosts: all-reduces until one fails, whose error is told."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

import ringside
from ringside.errors import SyncError

dist.init_process_group("gloo")
comm = ringside.communicator(algorithm=sys.argv[1], timeout=600)
x = torch.ones(int(sys.argv[2]))
comm.all_reduce(x)
print("ready", flush=True)
try:
    while True:
        comm.all_reduce(x.fill_(1.0))
except SyncError as error:
    print(json.dumps([type(error).__name__, error.ranks, str(error)]), flush=True)
comm.close()
os._exit(0)
