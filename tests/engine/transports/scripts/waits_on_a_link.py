"""Waits for a message that does not come, and tells how that ended."""

from __future__ import annotations

import json
import os
import time

import numpy as np
import torch.distributed as dist

from ringside.engine.transports.base import LinkError
from ringside.engine.transports.gloo import GlooTransport

rank = int(os.environ["RANK"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, rank == 0)
transport = GlooTransport(store, rank, 2, timeout_s=90)
place = transport.receive(1 - rank, np.zeros(4, dtype=np.uint8))
time.sleep(0.5)  # until the kernels have acknowledged all that was sent
print("ready", flush=True)
try:
    place.wait()
except LinkError as error:
    print(json.dumps([error.cause.kind, error.cause.vertex, error.detail]), flush=True)
os._exit(0)
