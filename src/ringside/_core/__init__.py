"""The native core, where it could be built; it knows nothing of torch.

Importing this package never fails: `native()` returns the extension module or raises one clear error, and
`available()` which of the two. The NumPy twins of its kernels are in `numpy_kernels.py`.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType

from ringside.errors import UnsupportedError

NCCL_PLUGIN = "libnccl-profiler-ringside.so"
LONGEST_PLUGIN_PATH = 254

_module: ModuleType | None = None
_why_not = ""
if os.environ.get("RINGSIDE_NO_NATIVE"):
    _why_not = "RINGSIDE_NO_NATIVE is set"
else:
    try:
        _module = importlib.import_module("ringside._core._native")
    except ImportError as error:
        _why_not = f"the native core is not in this installation ({error})"


def available() -> bool:
    """Return whether the native core can be used here."""
    return _module is not None


def native() -> ModuleType:
    """Return the native extension module; `UnsupportedError` explains how to get it."""
    if _module is None:
        raise UnsupportedError(
            f"the shared-memory engine needs Ringside's native core, but {_why_not}: "
            "install a C++17 compiler, then run `pip install --force-reinstall --no-deps .` in a clone of Ringside"
        )
    return _module


def build() -> str:
    """Return the instruction set and the compiler of the native core, or why there is none."""
    if _module is None:
        return f"none ({_why_not})"
    compiler = getattr(_module, "compiler", "a compiler that it does not name")  # cores built before 0.1.0
    return f"{_module.instruction_set()}, built by {compiler}"


def describe() -> str:
    """Return in one line what this installation can do."""
    if _module is None:
        return f"ringside without its native core ({_why_not}); attach() only watches"
    return f"ringside with its native core ({_module.instruction_set()})"


def nccl_plugin() -> Path:
    """Return where NCCL's profiler plugin lies, for `NCCL_PROFILER_PLUGIN`.

    Raises:
        UnsupportedError: This installation has none, or NCCL cannot open it there.
    """
    if _module is None:
        raise UnsupportedError(f"NCCL's profiler plugin comes with Ringside's native core, but {_why_not}")
    path = Path(str(_module.__file__)).absolute().with_name(NCCL_PLUGIN)
    if not path.exists():
        raise UnsupportedError(f"this installation has no {NCCL_PLUGIN}: NCCL and its plugin exist on Linux only")
    if len(os.fsencode(path)) > LONGEST_PLUGIN_PATH:
        raise UnsupportedError(
            f"NCCL cuts paths of plugins off after {LONGEST_PLUGIN_PATH} bytes, and this one is longer: link to it "
            f"from elsewhere and set NCCL_PROFILER_PLUGIN to the link: {path}"
        )
    return path
