"""Rates and durations as people write them: `1gbit`, `250mbit`, `5ms`."""

from __future__ import annotations

import math
import re

from ringside.errors import UsageError

MTU_BYTES = 1500
"""Size of an IP packet on the lab's links, bytes."""

PAYLOAD_SHARE = (MTU_BYTES - 52) / (MTU_BYTES + 14)
"""Share of a link's rate that is left for what TCP carries: IPv4, TCP with timestamps, and Ethernet headers are off."""

_NUMBER = r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*"
_RATE_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LEAST_RATE, _MOST_RATE = 100e3, 100e9
_MOST_DELAY_S = 10.0


def parse_rate(text: str | float) -> float:
    """Return a rate in bit/s.

    Args:
        text: A number with bit, kbit, mbit or gbit (powers of 1000, as for `tc`), or bit/s as a number.

    Raises:
        UsageError: It is no rate, or not from 100kbit to 100gbit.
    """
    rate = float(text) if isinstance(text, int | float) else _number_with(text, _RATE_UNITS, "rate", "1gbit, 250mbit")
    if not _LEAST_RATE <= rate <= _MOST_RATE:
        raise UsageError(f"rate {text!r}: a link of the lab has from 100kbit to 100gbit")
    return rate


def parse_delay(text: str | float) -> float:
    """Return a delay in seconds.

    Args:
        text: A number with us, ms or s, or seconds as a number.

    Raises:
        UsageError: It is no duration, negative, or more than 10 s.
    """
    numeric = isinstance(text, int | float) or text.strip() == "0"
    delay = float(text) if numeric else _number_with(str(text), _TIME_UNITS, "delay", "5ms, 200us")
    if not 0.0 <= delay <= _MOST_DELAY_S or math.isnan(delay):
        raise UsageError(f"delay {text!r}: it is from 0 to 10s")
    return delay


def payload_bytes_per_second(rate: str | float) -> float:
    """Return how many bytes of payload TCP can carry per second over a link of that rate, one way.

    Args:
        rate: As `parse_rate` takes it.
    """
    return parse_rate(rate) / 8 * PAYLOAD_SHARE


def _number_with(text: str, units: dict[str, float], what: str, examples: str) -> float:
    match = re.fullmatch(_NUMBER + f"({'|'.join(units)})", text.lower())
    if match is None:
        raise UsageError(f"{what} {text!r}: it is a number with one of {', '.join(units)}, such as {examples}")
    return float(match[1]) * units[match[2]]
