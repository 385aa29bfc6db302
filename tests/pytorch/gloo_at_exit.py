"""torch alone ends with "terminate called without an active exception": the case is made to happen every time.

Backward keeps its Python context where C++ finds it, and so does every all-reduce that begins in it. Whoever lets go of
it last needs the interpreter's lock. Where the thread of Gloo that carried the all-reduce out is later than the end of
backward, that is this thread; and where it waits for the lock while the interpreter begins to end, Python (before 3.14)
ends the thread, inside a destructor that must not be left: C++ aborts the process.

Usually the thread is later by microseconds. Here the other rank comes to the all-reduce when the interpreter is about
to end, and the main thread keeps the lock until then.
"""

import atexit
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist

KEPT_S = 2.0


def keep_the_lock() -> None:
    """Let the other rank come, and let no other thread have the lock before the interpreter ends."""
    sys.setswitchinterval(1e3)
    os.write(ends, b".")
    until = time.perf_counter() + KEPT_S
    while time.perf_counter() < until:
        pass


assert "ringside" not in sys.modules
begins, ends = os.pipe()
store = os.path.join(tempfile.mkdtemp(), "store")
rank = int(os.fork() == 0)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
x, gradient = torch.ones(4, requires_grad=True), torch.ones(4)
if rank == 1:
    os.read(begins, 1)
    dist.all_reduce(gradient)
    os._exit(0)


def reduce_in_backward(_: torch.Tensor) -> None:
    dist.all_reduce(gradient, async_op=True)


x.register_hook(reduce_in_backward)
x.sum().backward()
atexit.register(keep_the_lock)
