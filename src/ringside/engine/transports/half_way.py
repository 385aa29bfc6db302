"""Ends a wait for a message that Gloo forgets.

When a connection breaks, Gloo (torch 2.13) tells everybody who waits for a message of it, except for a message of which
a part has arrived already, or has left already: who waits for that one does so until the time is over, since closing
the connection once more says nothing new. torch can end such a wait (`c10d::Work::abort`) but does not give that to
Python. So it is called by its name in torch's library, on an object that was seen to be one of the two kinds it is for.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_WORKS = (
    "N4c10d16ProcessGroupGloo8RecvWork",
    "N4c10d16ProcessGroupGloo8SendWork",
)  # C++ names, as compilers write them
_FIRST_ENTRY = 2 * ctypes.sizeof(ctypes.c_void_p)  # an object points to its class's table there (Itanium C++ ABI)
_VALUE = object.__basicsize__  # where pybind11 keeps the C++ object's address in a Python object that has just one

Abort = Callable[[int], object]


def can_end_waits() -> bool:
    """Tell whether `end_wait` has any effect with this torch."""
    return len(_aborts()) == len(_WORKS)


def end_wait(work: Any) -> None:
    """Have whoever waits for a message on another thread, or will, return at once: `wait` is False then.

    What cannot be ended this way is left alone; connections stay as they are.

    Args:
        work: What `ProcessGroupGloo.send` or `recv` returned.
    """
    aborts = _aborts()
    if not aborts or not isinstance(work, torch.distributed.Work):
        return
    at = ctypes.c_void_p.from_address(id(work) + _VALUE).value
    kind = ctypes.c_void_p.from_address(at).value if at else None
    if at and kind in aborts:
        aborts[kind](at)


@functools.cache
def _aborts() -> dict[int | None, Abort]:
    """Return what ends a wait, by the address that an object of the kind begins with."""
    if sys.implementation.name != "cpython":
        return {}
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        found: dict[int | None, Abort] = {}
        for name in _WORKS:
            abort = library[f"_Z{name}5abortEv"]
            abort.argtypes, abort.restype = [ctypes.c_void_p], None
            found[ctypes.addressof(ctypes.c_char.in_dll(library, f"_ZTV{name}E")) + _FIRST_ENTRY] = abort
        return found
    except (OSError, AttributeError, ValueError):  # another system, or another torch
        return {}
