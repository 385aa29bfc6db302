"""An interpreter that ends in the way that is named, after a collective."""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

import numpy as np

import ringside

way = sys.argv[1]
comm: Any = ringside.init(timeout=20)
x = np.full(10_000, comm.rank + 1.0)
comm.all_reduce(x)
assert (x == comm.size * (comm.size + 1) / 2).all()
if way == "symmetric":
    m = comm.empty(100)
    comm.all_reduce(m)
elif way == "async":
    comm.all_reduce(x, async_op=True)
elif way == "async, forgotten":
    work = comm.all_reduce(x, async_op=True)
    work.wait()
    del comm
elif way == "two":
    other = ringside.init()
    other.all_reduce(x)
    comm.close()
elif way == "in a circle":
    comm.cycle = comm
    del comm
elif way == "under way":
    if comm.rank == 0:
        comm.all_reduce(x, async_op=True)
    else:
        sys.stdin.read()
elif way == "raises":
    if comm.rank == 1:
        raise ValueError("mine")
    comm.all_reduce(x)
elif way == "forks":
    work = comm.all_reduce(x, async_op=True)
    work.wait()
    child = os.fork()
    if child == 0:
        calls = (
            lambda: comm.all_reduce(x),
            comm.barrier,
            lambda: comm.all_reduce(x, async_op=True),
            lambda: comm.empty(3),
        )
        for call in calls:
            try:
                call()
                os._exit(3)
            except ringside.ClosedError:
                pass
        if comm.rank == 0:
            comm.close()
        del comm, work, call, calls
        gc.collect()
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    before = x.copy()
    comm.all_reduce(x)
    assert (x == before * comm.size).all()
    m = comm.empty(1000)
    comm.all_reduce(m)
    comm.close()
    print("unhurt")
else:
    assert way == "at once", way
