"""Where a thread of this process is: in which collective of PyTorch's, and in which line of the script."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType
from typing import Any, NamedTuple

import torch

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY = os.path.join(sysconfig.get_paths()["stdlib"], "")
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
_DDP = os.path.join("torch", "nn", "parallel", "distributed.py")
_CALLS = frozenset(
    (
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "monitored_barrier",
        "recv",
        "recv_object_list",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
        "scatter_object_list",
        "send",
        "send_object_list",
        "new_group",
        "destroy_process_group",
    )
)
_BUFFERS = frozenset(("_distributed_broadcast_coalesced", "_default_broadcast_coalesced"))
_TENSORS = ("tensor", "input_tensor", "output_tensor", "input", "output")
_DEEPEST = 400


class Place(NamedTuple):
    """Where a thread is.

    Args:
        call: The collective it is inside of, as the script called it; empty: none.
        size_bytes: Size of its tensor; 0 where not known.
        where: The innermost line of the script, such as `train.py:37 in validate`.
    """

    call: str
    size_bytes: int
    where: str


def place_of(thread: int) -> Place:
    """Return where a thread of this process is.

    Args:
        thread: Its identifier (`threading.get_ident()`).
    """
    frame = sys._current_frames().get(thread)
    call, size_bytes, where, innermost = "", 0, "", ""
    depth = 0
    while frame is not None and depth < _DEEPEST:
        name = _call_of(frame)
        if name:  # the outermost one is what the script called
            call, size_bytes = name, _size_of(frame)
        if not where and not _is_library(frame.f_code.co_filename):
            where = _line(frame)
        innermost = innermost or _line(frame)
        frame, depth = frame.f_back, depth + 1
    return Place(call, size_bytes, where or innermost)


def _call_of(frame: FrameType) -> str:
    path, name = frame.f_code.co_filename, frame.f_code.co_name
    if name in _CALLS and path.endswith(_COLLECTIVES):
        return name
    return "broadcast of buffers" if name in _BUFFERS and path.endswith(_DDP) else ""


def _size_of(frame: FrameType) -> int:
    """Return the size of the tensor that a collective was given; its thread is blocked in it while we look."""
    values: dict[str, Any] = frame.f_locals
    tensor = next((values[name] for name in _TENSORS if hasattr(values.get(name), "numel")), None)
    return int(tensor.numel() * tensor.element_size()) if tensor is not None else 0


def _is_library(path: str) -> bool:
    return path.startswith((_TORCH, _OURS, _LIBRARY, "<frozen")) or "site-packages" in path


def _line(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
