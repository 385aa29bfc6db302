"""iproute2: a few commands at a time, and why the lab cannot be had on this machine."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache

from ringside.errors import RingsideError, UsageError

_LIMIT_S = 60.0


def batch(tool: str, lines: Iterable[str], namespace: str | None = None) -> None:
    """Run commands of `ip` or `tc` in one process, first to last.

    Args:
        tool: "ip" or "tc".
        lines: The commands, without the tool's name.
        namespace: In which network namespace; None for the one we are in.

    Raises:
        RingsideError: One of them was refused; those before it have been carried out.
    """
    text = "\n".join(lines)
    if not text:
        return
    command = [tool, *(("-n", namespace) if namespace else ()), "-batch", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode != 0:
        said = "; ".join(line for line in done.stderr.splitlines() if not line.startswith("Command failed"))
        raise RingsideError(f"the lab could not be wired: {tool} refused a command: {said or 'no reason given'}")


@cache
def unavailable() -> str:
    """Return why no lab can be had here, in one line; "" if it can be. Found out once per process, by trying."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the lab needs iproute2, and there is no command {tool!r} on the PATH"
    if os.geteuid() != 0:
        return "the lab needs root, to make network namespaces"
    # Wire two namespaces that have no name, and so leave nothing, with what the lab is made of.
    script = (
        "ip link add name lab0 type bridge && ip link add name a type veth peer name b && "
        "tc qdisc add dev a root tbf rate 1gbit burst 64kb limit 1mb && unshare -n true"
    )
    try:
        command = ["unshare", "-n", "-m", "sh", "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the lab needs unshare to work: {error}"
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    return f"the lab needs privileges or kernel modules that are missing: {lines[-1] if lines else 'no reason given'}"


# -------------------------------------------------------------------------------------------------
# Rates and durations as people write them: `1gbit`, `250mbit`, `5ms`.

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


def _number_with(text: str, units: dict[str, float], quantity: str, examples: str) -> float:
    match = re.fullmatch(_NUMBER + f"({'|'.join(units)})", text.lower())
    if match is None:
        raise UsageError(f"{quantity} {text!r}: it is a number with one of {', '.join(units)}, such as {examples}")
    return float(match[1]) * units[match[2]]
