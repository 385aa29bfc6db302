"""What is tried of a wheel that was installed."""

from __future__ import annotations

import ctypes

import numpy as np

import ringside
from ringside import _core

_core.native()
assert all(hasattr(ctypes.CDLL(str(_core.nccl_plugin())), f"ncclProfiler_v{version}") for version in (4, 5, 6))
with ringside.init() as comm:
    x = np.ones(1000, np.float32)
    comm.all_reduce(x)
    assert x.sum() == 1000
print(ringside.__file__)
