"""Where a thread of this process is: in which collective of PyTorch's, and in which line of the script."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import sysconfig
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.distributed import distributed_c10d

import ringside.errors
from ringside.processes import catches, hold, signal_mask, start_time

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.abspath(ringside.errors.__file__)) + os.sep
_LIBRARY = os.path.join(sysconfig.get_paths()["stdlib"], "")
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
_DDP = os.path.join("torch", "nn", "parallel", "distributed.py")
_CALLS = frozenset(distributed_c10d.__all__)
"""Collectives, and what no thread stands in for long."""
_BUFFERS = frozenset(("_distributed_broadcast_coalesced", "_default_broadcast_coalesced"))
_TENSORS = ("tensor", "input_tensor", "output_tensor", "input", "output")
_DEEPEST = 400  # frames: a recursion is not followed for ever


class StackPlace(NamedTuple):
    """Where a thread is.

    Args:
        call: The collective it is inside of, as the script called it; empty: none.
        size_bytes: Size of its tensor; 0 where not known.
        where: The innermost line of the script, such as `train.py:37 in validate`.
    """

    call: str
    size_bytes: int
    where: str


def place_of(thread: int) -> StackPlace:
    """Return where a thread of this process is.

    Args:
        thread: Its identifier (`threading.get_ident()`).
    """
    frame = sys._current_frames().get(thread)
    call, size_bytes, where, innermost = "", 0, "", ""
    depth = 0
    while frame is not None and depth < _DEEPEST:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        is_collective = name in _CALLS and path.endswith(_COLLECTIVES)
        if is_collective or (name in _BUFFERS and path.endswith(_DDP)):  # the outermost one is what the script called
            # The thread is blocked in it while its arguments are read here.
            values: dict[str, Any] = frame.f_locals
            tensor = next((values[key] for key in _TENSORS if hasattr(values.get(key), "numel")), None)
            call = name if is_collective else "broadcast of buffers"
            size_bytes = int(tensor.numel() * tensor.element_size()) if tensor is not None else 0
        is_library = path.startswith((_TORCH, _OURS, _LIBRARY, "<frozen")) or "site-packages" in path
        if not where and not is_library:
            where = _line(frame)
        innermost = innermost or _line(frame)
        frame, depth = frame.f_back, depth + 1
    return StackPlace(call, size_bytes, where or innermost)


def _line(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


# -------------------------------------------------------------------------------------------------
# Python stacks of the ranks of a host: a rank writes its own, and of one whose Python does not run a signal gets them.
#
# `faulthandler` answers the signal without the GIL, from inside the signal handler; a stopped process cannot answer it.

MOST_BYTES = 65536


class Stacks:
    """Where this process's stacks are written to when somebody asks.

    Attributes:
        fd: An anonymous file that other processes of this host can read.
        signal: The signal that makes this process write its stacks; 0: all are taken.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("ringside-stacks")
        self.signal = _free_signal()
        if self.signal:
            faulthandler.register(self.signal, file=self.fd, all_threads=True)

    def dump(self) -> None:
        """Write this process's stacks, after those that a signal may have made it write."""
        faulthandler.dump_traceback(file=self.fd, all_threads=True)

    def clear(self) -> None:
        """Empty the file: that hang is over."""
        os.ftruncate(self.fd, 0)
        os.lseek(self.fd, 0, os.SEEK_SET)

    def close(self) -> None:
        """Give the signal back."""
        if self.fd < 0:
            return
        if self.signal:
            faulthandler.unregister(self.signal)
        os.close(self.fd)
        self.fd = -1


def request_stacks(pid: int, started: int, number: int) -> None:
    """Make another process write its stacks; nothing happens if it is not the one meant or would not survive it.

    Args:
        pid: Its id.
        started: When it started (`ProcessStat.started`).
        number: The signal, of its `RankHandle`.
    """
    process = hold(pid)  # before its start is compared: its number may be used again at any time
    if process is not None:
        if number and start_time(pid) == started and catches(pid, number):
            process.send(number)
        process.close()


def read_stacks(pid: int, fd: int) -> str:
    """Return what a process of this host has written of its stacks; empty where it has not or is not ours to read."""
    try:
        with open(f"/proc/{pid}/fd/{fd}", "rb") as file:
            return file.read(MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _free_signal() -> int:
    """Return the highest real-time signal that this process neither handles, ignores nor blocks; 0 if there is none."""
    taken = 0
    for name in ("SigCgt", "SigIgn", "SigBlk"):
        mask = signal_mask(os.getpid(), name)
        if mask is None:
            return 0
        taken |= mask
    numbers = range(signal.SIGRTMAX, signal.SIGRTMIN - 1, -1)
    return next((number for number in numbers if not taken >> (number - 1) & 1), 0)
