"""What the process has imported that ranks and commands of tests are forked from. It must have one thread."""

import threading

import pytest  # noqa: F401

import ringside.engine

try:
    import torch
    import torch._dynamo  # the first DDP imports it
    import torch.distributed
    import torch.nn.parallel
    import torch.optim

    import ringside.sync  # noqa: F401
except ImportError:  # the oldest jobs of CI have no torch
    torch = None  # type: ignore[assignment]

assert threading.active_count() == 1
