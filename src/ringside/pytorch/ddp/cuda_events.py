"""Marks in the queue of a CUDA device: events with a time, that are asked for and never waited for.

CUDA refuses to be asked for an event, on any thread, while some thread captures a graph in the usual ("global") mode,
and ends that capture. So whoever asks does it in the mode that minds the asking thread's own captures alone, as torch's
NCCL watchdog does. While this thread's queue is captured no mark is set: it would be part of the graph.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal
_NON_BLOCKING = 1  # cudaStreamNonBlocking
_RUNTIME = re.compile(r"\S*/libcudart[-.\w]*\.so[.\d]*$", re.MULTILINE)
_log = logging.getLogger(__name__)


class CudaEvents:
    """Sets marks on streams of one device; see `ringside.monitor.device_marks.Marker`.

    Args:
        device: The device.
        runtime: The CUDA runtime that torch has loaded.

    Attributes:
        stream: The stream that training uses; None: the current one of whatever thread sets a mark.
    """

    def __init__(self, device: torch.device, runtime: Any) -> None:
        self._device, self._runtime = device, runtime
        self.stream: torch.cuda.Stream | None = None
        self._alone: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def beside_captures(self) -> Iterator[None]:
        """Inside, captures of other threads go on; on the device, since a thread's first call makes a context there."""
        with torch.cuda.device(self._device):
            before = self._exchange(_THREAD_LOCAL)
            try:
                yield
            finally:
                self._exchange(before)

    def mark(self) -> torch.cuda.Event | None:
        """Set a mark on the stream that training uses; None: that, or the current one, is being captured."""
        if self.stream is None:
            return self.mark_here()
        if torch.cuda.is_current_stream_capturing():
            return None
        if not self.is_training():
            status = ctypes.c_int()
            _check(self._runtime.cudaStreamIsCapturing(ctypes.c_void_p(self.stream.cuda_stream), ctypes.byref(status)))
            if status.value:
                return None
        return _record(self.stream)

    def mark_here(self) -> torch.cuda.Event | None:
        """Set a mark on this thread's current stream; None: that is being captured."""
        if torch.cuda.is_current_stream_capturing():
            return None
        return _record(torch.cuda.current_stream(self._device))

    def mark_alone(self) -> torch.cuda.Event | None:
        """Set a mark on a stream of our own: one of torch's pool may be somebody else's, too."""
        with self.beside_captures():
            if self._alone is None:
                handle = ctypes.c_void_p()
                _check(self._runtime.cudaStreamCreateWithFlags(ctypes.byref(handle), _NON_BLOCKING))
                self._alone = torch.cuda.ExternalStream(handle.value, self._device)  # type: ignore[no-untyped-call]
            return _record(self._alone)

    def is_training(self) -> bool:
        """Return whether the current stream is the one that training uses."""
        # A stream of torch's costs ten times its handle.
        return self.stream is None or self.stream.cuda_stream == torch._C._cuda_getCurrentRawStream(self._device.index)

    def trains_here(self) -> None:
        """From now on the current stream is the one that training uses."""
        self.stream = torch.cuda.current_stream(self._device)

    def reached(self, mark: torch.cuda.Event) -> bool:
        """Tell whether the device has come to a mark."""
        with self.beside_captures():
            return bool(mark.query())  # type: ignore[no-untyped-call]

    def times(self, since: torch.cuda.Event, marks: Collection[torch.cuda.Event | None]) -> list[float]:
        """Return how long after a mark the device came to each of others, seconds; NaN: it has not, or it is None."""
        with self.beside_captures():
            return [
                float(since.elapsed_time(mark)) * 1e-3 if mark is not None and mark.query() else math.nan  # type: ignore[no-untyped-call]
                for mark in marks
            ]

    def _exchange(self, mode: int) -> int:
        """Set this thread's mode towards captures, and return the one before."""
        value = ctypes.c_int(mode)
        _check(self._runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(value)))
        return value.value


def marker_of(model: torch.nn.Module) -> CudaEvents | None:
    """Return what sets marks on the one CUDA device that a model is on; None: the host's clock has to do."""
    devices = {parameter.device for parameter in model.parameters()}
    return events_of(next(iter(devices))) if len(devices) == 1 else None


def events_of(device: torch.device) -> CudaEvents | None:
    """Return what sets marks on a CUDA device; None: the host's clock has to do."""
    if device.type != "cuda":
        return None
    loaded = _RUNTIME.search(Path("/proc/self/maps").read_text())
    if loaded is None:  # a build for AMD's, or with the runtime linked in
        _log.warning(
            "steps on this GPU are timed by the host's clock, which shows when work was queued: torch has loaded no "
            "libcudart, without which events cannot be asked for beside graph captures"
        )
        return None
    return CudaEvents(device, ctypes.CDLL(loaded.group().strip()))


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"a call of the CUDA runtime returned {status}")
