"""Fields in words: what a figure is called, and its value with the unit that its name gives it."""

from __future__ import annotations

from ringside.view.report_numbers import digits, duration, rank_time, share, size

Number = float | int | str

_UNITS = {"_mhz": "MHz", "_celsius": "°C", "_watts": "W", "_cpus": "CPUs"}


def label(name: str) -> str:
    """Return a name of a field as words: `victims`, `collective seq id`."""
    return name.replace("_", " ")


def title(name: str) -> str:
    """Return a name of a field as words without its unit, which stands with the value: `step_seconds` is `step`."""
    for unit in ("_seconds", "_s", "_ratio", "_rank_hours", "_bytes_per_second", *_UNITS):
        if name.endswith(unit):
            return label(name.removesuffix(unit))
    return label(name)


def figure(name: str, value: Number | None) -> str:
    """Return a figure with the unit that its name gives it: `_seconds`, `_ratio`, `bytes`, ..."""
    if value is None:
        return "–"
    if isinstance(value, str | bool):
        return str(value)
    if name.endswith(("_ratio", "_share")):
        return share(float(value)).removeprefix("+")
    if name.endswith("rank_hours"):
        return rank_time(3600 * float(value))
    if name.endswith("bytes_per_second"):
        return f"{size(float(value))}/s"
    if name.endswith(("_seconds", "_s")) or "_seconds_" in name:
        return duration(float(value))
    if name.endswith(("bytes", "bytes_each")):
        return size(float(value))
    number = str(value) if isinstance(value, int) else digits(value)
    return next((f"{number} {unit}" for suffix, unit in _UNITS.items() if name.endswith(suffix)), number)
