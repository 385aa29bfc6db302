"""Links with a delay: a process that holds every frame for a while between two TAP devices.

There is one process per lab. It runs at real-time priority where it may: a cable does not wait for a processor. Frames
are passed on as TCP handed them down, in pieces of up to 64 KiB with their checksums still to be made (virtio-net
headers), so that one Python process keeps up with a few Gbit/s.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from subprocess import DEVNULL, PIPE, Popen

from ringside.errors import RingsideError
from ringside.lab.namespaces import check, enter

_READY = "ready"
READY_S = 30.0
_MOST_LATENESS_S = 0.5e-3
_FRAMES_AT_ONCE = 64
_FRAME_BYTES = 10 + 14 + 65536 + 64
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_PI, _VNET_HDR = 0x0002, 0x1000, 0x4000
_CSUM_TSO4_TSO6 = 0x07
_CLOCK_MONOTONIC, _TFD_NONBLOCK, _TFD_TIMER_ABSTIME = 1, 0o4000, 1
_libc = ctypes.CDLL(None, use_errno=True)

Cable = tuple[tuple[str, str], tuple[str, str]]
"""Two ends, each a namespace and the name of the TAP device to be made there."""


class DelayLine:
    """Frames on their way: what is put in comes out after a fixed time, in the same order.

    Args:
        delay_s: How long each frame is held, seconds.
    """

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._held: deque[tuple[float, int, bytes]] = deque()

    def put(self, now_s: float, way_out: int, frame: bytes) -> None:
        """Take a frame that came at `now_s` and leaves by the descriptor `way_out`, behind all that came before."""
        self._held.append((now_s + self._delay_s, way_out, frame))

    def due(self, now_s: float) -> Iterator[tuple[int, bytes]]:
        """Hand out all (way out, frame) whose time has come."""
        while self._held and self._held[0][0] <= now_s:
            _, way_out, frame = self._held.popleft()
            yield way_out, frame

    @property
    def next_due_s(self) -> float | None:
        """When the next frame is due; None while there is none."""
        return self._held[0][0] if self._held else None


def start_delay(delay_s: float, cables: Iterable[Cable]) -> Popen[str]:
    """Start the process and return once all its TAP devices are there.

    Args:
        delay_s: How long each frame is held on each cable, seconds.
        cables: Which devices to make and to join.

    Raises:
        RingsideError: It could not make them.
    """
    command = [sys.executable, "-m", "ringside.lab.delay", json.dumps([delay_s, list(cables)])]
    child = Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True)
    assert child.stdout is not None
    assert child.stderr is not None
    readable, _, _ = select.select([child.stdout], [], [], READY_S)
    if not readable or child.stdout.readline().strip() != _READY:
        child.kill()
        lines = child.communicate()[1].strip().splitlines()
        raise RingsideError(f"the lab's delay process did not start: {lines[-1] if lines else 'it printed nothing'}")
    child.stdout.close()
    child.stderr.close()
    return child


def main(request: str) -> None:
    """Make the devices, report that they are there, and pass frames on until killed.

    Args:
        request: What `start_delay` was called with, as JSON.
    """
    delay_s, cables = json.loads(request)
    way_out: dict[int, int] = {}
    for left, right in cables:
        a, b = _open_tap(*left), _open_tap(*right)
        way_out[a], way_out[b] = b, a
    gc.disable()  # there are no cycles to collect, and a pause would delay frames
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print(_READY, flush=True)
    pass_on(DelayLine(delay_s), way_out)


def usually_late(usual_s: float, late_s: float) -> float:
    """Return how late this process usually wakes up, seconds, after its timer did so once more by `late_s`."""
    return usual_s + (min(max(late_s, 0.0), _MOST_LATENESS_S) - usual_s) / 8


def pass_on(line: DelayLine, way_out: dict[int, int]) -> None:
    """Pass frames on for ever, from each descriptor to that which belongs to it.

    How long waking up usually takes is learnt from the timer, and taken off what frames are held.
    """
    timer = check(_libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK))
    late_s, rings_at_s = 0.0, 0.0
    poll = select.epoll()
    for fd in (timer, *way_out):
        poll.register(fd, select.EPOLLIN)
    while True:
        since_s = time.monotonic()
        ready = [fd for fd, _ in poll.poll()]
        if timer in ready:
            with contextlib.suppress(BlockingIOError):  # it was set anew meanwhile, and has not rung since
                os.read(timer, 8)
                late_s = usually_late(late_s, time.monotonic() - rings_at_s)
        for fd in ready:
            if fd == timer:
                continue
            # What is here came after the last poll, and about as long ago as waking up takes.
            came_s = max(since_s, time.monotonic() - late_s)
            with contextlib.suppress(OSError):  # nothing more to read, or the device is down
                for _ in range(_FRAMES_AT_ONCE):
                    line.put(came_s, way_out[fd], os.read(fd, _FRAME_BYTES))
        for fd, frame in line.due(time.monotonic() + late_s):
            with contextlib.suppress(OSError):  # the device is down or full: a frame is lost
                os.write(fd, frame)
        if line.next_due_s is not None:
            rings_at_s = line.next_due_s - late_s
            whole_s = int(rings_at_s)
            # struct itimerspec: an interval of 0, and when; in the past means at once, 0 would mean never.
            when = struct.pack("@4l", 0, 0, whole_s, max(int((rings_at_s - whole_s) * 1e9), 1))
            check(_libc.timerfd_settime(timer, _TFD_TIMER_ABSTIME, when, None))


def _open_tap(namespace: str, device: str) -> int:
    """Make a TAP device in a namespace, which the calling thread moves into; it lives as long as the descriptor."""
    enter(namespace)
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _TAP | _NO_PI | _VNET_HDR))
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _CSUM_TSO4_TSO6)
    return fd


if __name__ == "__main__":
    main(sys.argv[1])
