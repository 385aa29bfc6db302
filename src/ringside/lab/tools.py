"""iproute2: a few commands at a time, and why the lab cannot be had on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache

from ringside.errors import RingsideError

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
    """Return why no lab can be had here, in one line; "" if it can be. Asked once per process, by trying."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the lab needs iproute2, and there is no command {tool!r} on the PATH"
    if os.geteuid() != 0:
        return "the lab needs root, to make network namespaces"
    return _trial()


def _trial() -> str:
    """Wire two namespaces that have no name, and so leave nothing, with what the lab is made of."""
    script = (
        "ip link add name lab0 type bridge && ip link add name a type veth peer name b && "
        "tc qdisc add dev a root tbf rate 1gbit burst 64kb limit 1mb && unshare -n true"
    )
    try:
        done = subprocess.run(
            ["unshare", "-n", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the lab needs unshare to work: {error}"
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().splitlines()
    return f"the lab needs privileges or kernel modules that are missing: {said[-1] if said else 'no reason given'}"


def delay_unavailable() -> str:
    """Return why no lab with a delay can be had here (TAP devices); "" if it can be."""
    if reason := unavailable():
        return reason
    return "" if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "a delay needs /dev/net/tun, and it cannot be opened"
