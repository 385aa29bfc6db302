"""What can be set on a communicator, and how patient its waits are."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from ringside.engine.topology import SYSTEM
from ringside.errors import UsageError

_STAGE_SEGMENTS = 3


@dataclass(frozen=True)
class Settings:
    """Tuning of the engine. Users set the timeout alone; the rest is for tests and benchmarks.

    Args:
        timeout_s: Longest wait for other ranks inside one collective, seconds.
        one_shot_bytes: Largest payload that travels next to the arrival flag by itself, bytes (at most 65536).
        segment_bytes: Segment of the private-buffer path, bytes of tensor per rank.
        message_bytes: Payload of a message between hosts, bytes; what is cut evenly has up to half as much more.
        block_bytes: Tensors larger than this go over hosts in blocks of this size, bytes.
        stream_bytes: From this many bytes (tensor × ranks) on, results bypass the caches; 0 takes the size of the
            last-level cache.
        spins: Looks at the flags before yielding the core, where nobody shares it; -1: as many as pay.
        yields: Yields of the core before sleeping, while none takes long; -1: as many as pay.
        system: Where the kernel describes the machine; another folder pretends another machine.
        cpus: The CPUs this rank is taken to run on; (): those it may run on.

    Raises:
        UsageError: A time or a size that cannot be.
    """

    timeout_s: float = 1800.0
    one_shot_bytes: int = 4096
    segment_bytes: int = 1048576
    message_bytes: int = 524288
    block_bytes: int = 8388608
    stream_bytes: int = 0
    spins: int = -1
    yields: int = -1
    system: Path = SYSTEM
    cpus: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes_fit = min(self.segment_bytes, self.message_bytes, self.block_bytes) >= 64 and self.one_shot_bytes >= 0
        if not 0 < self.timeout_s < math.inf or not sizes_fit:
            raise UsageError(f"impossible settings {self}: times and sizes must be positive")

    @property
    def stage_bytes(self) -> int:
        """Bytes of arena each rank has for staging."""
        return _STAGE_SEGMENTS * -(-max(self.segment_bytes, 4096) // 64) * 64  # whole cache lines

    def agreed(self) -> tuple[int, ...]:
        """Return the settings that all ranks must have alike, or they would choose different paths."""
        return (self.one_shot_bytes, self.segment_bytes, self.message_bytes, self.block_bytes)

    @staticmethod
    def of_environment(
        environ: Mapping[str, str] = os.environ, *, timeout: float | timedelta | None = None
    ) -> Settings:
        """Return the settings with the timeout that is given, else RINGSIDE_TIMEOUT_S, else the default."""
        text = environ.get("RINGSIDE_TIMEOUT_S")
        if timeout is not None:
            return Settings(timeout_s=timeout_seconds(timeout))
        if text is None:
            return Settings()
        try:
            timeout_s = float(text)
        except ValueError:
            raise UsageError(f"RINGSIDE_TIMEOUT_S={text!r} is not a number") from None
        return Settings(timeout_s=timeout_s)


def timeout_seconds(timeout: float | timedelta) -> float:
    """Return a timeout in seconds, as users give it: seconds or a `timedelta`, as to torch.

    Raises:
        UsageError: It is no time, not more than 0, or without end.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise UsageError(f"timeout must be seconds or a timedelta, more than 0 and finite, not {timeout!r}")
    return float(seconds)


def patience(settings: Settings, ranks: int, quota: float, background: bool) -> tuple[int, int]:
    """Return (spins, yields) before a waiting rank sleeps, while none that it waits for shares its CPU.

    Spinning is the fastest way to notice a peer on another CPU; whether one is on its own, the core sees at every wait
    (`_core/waiting.hpp`). Beside a thread that computes there is less to gain, and where the ranks' time is rationed
    and there is less of it than they would spin, a spinning rank takes the time of the one it waits for.
    """
    if background:
        spins, yields = 50, 1
    elif ranks <= quota:
        spins, yields = 500, 20
    else:
        spins, yields = 0, 4
    return (
        settings.spins if settings.spins >= 0 else spins,
        settings.yields if settings.yields >= 0 else yields,
    )
