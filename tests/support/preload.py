"""What the process has imported that ranks of tests are forked from. It must have one thread."""

import contextlib
import importlib
import os

for name in (
    "pytest",
    "ringside.engine",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch._dynamo",  # the first DDP imports it
    "torch.distributed.fsdp",
    "ringside.pytorch",
    "ringside.view.verdict_text",  # what rank 0 prints with, of a job that is recorded
    "rich.console",
):
    with contextlib.suppress(ImportError):  # tests that need torch are skipped without it
        importlib.import_module(name)

assert len(os.listdir("/proc/self/task")) == 1, "a process with threads is not forked safely"
