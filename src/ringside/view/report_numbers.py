"""Numbers in words, as short as they may be: durations, sizes, ratios, ranks, counts."""

from __future__ import annotations

import math

UNKNOWN = "–"
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_SECONDS = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_RANK_TIMES = ((86_400.0, "rank-days"), (3_600.0, "rank-hours"), (0.0, "rank-seconds"))


def duration(seconds: float | None) -> str:
    """Return seconds in the unit that reads best: `12.3 ms`, `1.20 s`, `3.5 h`; a dash where they are not known."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds == 0:
        return "0 s"
    for scale, unit in _SECONDS:
        if abs(seconds) >= scale:
            return f"{digits(seconds / scale)} {unit}"
    return f"{digits(seconds / 1e-9)} ns"


def rank_time(rank_seconds: float) -> str:
    """Return rank-seconds in the unit that reads best: `41 rank-seconds`, `10.2 rank-days`."""
    for scale, unit in _RANK_TIMES:
        if rank_seconds >= scale:
            return f"{digits(rank_seconds / (scale or 1.0))} {unit}"
    return f"{digits(rank_seconds)} rank-seconds"


def size(count: float | None) -> str:
    """Return bytes in the unit that reads best, powers of ten: `3.46 MB`."""
    if count is None or not math.isfinite(count):
        return UNKNOWN
    for scale, unit in _BYTES:
        if count >= scale:
            return f"{digits(count / scale)} {unit}"
    return "0 B"


def ratio(value: float | None) -> str:
    """Return a ratio as a factor: `1.42 ×`."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:.2f} ×"


def share(value: float | None) -> str:
    """Return a ratio as a percentage with a sign: `+12 %`; a dash where it is not known."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:+.1%}".replace("%", " %").replace("-", "−")


def digits(value: float) -> str:
    """Return a number with three significant digits and no exponent; a dash where it is not known."""
    if not math.isfinite(value):
        return UNKNOWN
    if not value:
        return "0"
    value = float(f"{value:.3g}")  # so that 99.96 becomes 100, not 100.0
    magnitude = math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(2 - magnitude, 0), 3)}f}"
