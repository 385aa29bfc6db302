"""Marks in the queue of a CUDA device: events with a time, that are asked for and never waited for.

CUDA refuses to be asked for an event, on any thread, while some thread captures a graph in the usual ("global") mode,
and ends that capture. So whoever asks does it in the mode that minds the asking thread's own captures alone, as torch's
NCCL watchdog does. While this thread's queue is captured no mark is set: it would be part of the graph.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal
_RUNTIME = re.compile(r"\S*/libcudart[-.\w]*\.so[.\d]*$", re.MULTILINE)
_log = logging.getLogger(__name__)

Exchange = Callable[[int], int]
"""Sets this thread's mode towards captures, and returns the one before."""


class CudaEvents:
    """Sets marks on the current stream of one device; see `ringside.monitor.step_clock.Marker`.

    Args:
        device: The device.
        exchange: As the CUDA runtime that torch has loaded does it.
    """

    def __init__(self, device: torch.device, exchange: Exchange) -> None:
        self._device, self._exchange = device, exchange

    def mark(self) -> torch.cuda.Event | None:
        """Set a mark on this thread's current stream; None: that is being captured."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def reached(self, mark: torch.cuda.Event) -> bool:
        """Tell whether the device has come to a mark."""
        with self._beside_captures():
            return bool(mark.query())  # type: ignore[no-untyped-call]

    def seconds(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        """Return how long it took from one mark to another."""
        with self._beside_captures():
            return float(earlier.elapsed_time(later)) * 1e-3

    @contextlib.contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """Inside, captures of other threads go on; on the device, since a thread's first call makes a context there."""
        with torch.cuda.device(self._device):
            before = self._exchange(_THREAD_LOCAL)
            try:
                yield
            finally:
                self._exchange(before)


def marker_of(model: torch.nn.Module) -> CudaEvents | None:
    """Return what sets marks on the one CUDA device that a model is on; None: the host's clock has to do."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return None
    path = runtime_in(Path("/proc/self/maps").read_text())
    if path is None:  # a build for AMD's, or with the runtime linked in
        _log.warning(
            "steps on this GPU are timed by the host's clock, which shows when work was queued: torch has loaded no "
            "libcudart, without which events cannot be asked for beside graph captures"
        )
        return None
    function = ctypes.CDLL(path).cudaThreadExchangeStreamCaptureMode
    return CudaEvents(next(iter(devices)), functools.partial(_exchange, function))


def runtime_in(maps: str) -> str | None:
    """Return the path of the CUDA runtime among a process's mappings (/proc/self/maps); None: there is none."""
    found = _RUNTIME.search(maps)
    return found and found.group().strip()


def _exchange(function: Any, mode: int) -> int:
    """Set this thread's mode by the runtime's function, and return the one before."""
    value = ctypes.c_int(mode)
    status = function(ctypes.byref(value))
    if status:
        raise RuntimeError(f"cudaThreadExchangeStreamCaptureMode returned {status}")
    return value.value
