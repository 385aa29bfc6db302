"""What is tried of a wheel that was installed."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess

import numpy as np

import ringside
from ringside import _core

_core.native()
plugin = str(_core.nccl_plugin())
assert all(hasattr(ctypes.CDLL(plugin), f"ncclProfiler_v{version}") for version in (4, 5, 6))
if shutil.which("nm"):
    # A process with NCCL may hold another libstdc++, and names of its own.
    symbols = subprocess.run(["nm", "-D", plugin], check=True, capture_output=True, text=True).stdout
    assert all(name.startswith("ncclProfiler_v") for name in re.findall(r" [A-TV-Z] (\S+)", symbols)), symbols
    assert all("@GLIBC_" in name for name in re.findall(r" U (\S+)", symbols)), symbols
with ringside.init() as comm:
    x = np.ones(1000, np.float32)
    comm.all_reduce(x)
    assert x.sum() == 1000
print(ringside.__file__)
