"""What a lab's network namespaces are called: the name says who owns them, so that anybody can tell whether he lives.

`ringside-<owner's pid>-<owner's start time>-<count>-<node>`: a process number comes to mean another process one day,
a number together with a start time does not.
"""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = Path("/run/netns")
"""Where `ip netns` keeps names."""

_count = itertools.count()
_PATTERN = re.compile(r"ringside-(\d+)-(\d+)-(\d+)-(h\d+|switch)")


@dataclass(frozen=True)
class LabName:
    """The name of a lab.

    Args:
        pid: Process number of its owner.
        start: When the owner started, clock ticks since boot.
        count: How many labs the owner made before.
    """

    pid: int
    start: int
    count: int

    def __str__(self) -> str:
        return f"ringside-{self.pid}-{self.start}-{self.count}"

    @classmethod
    def new(cls) -> LabName:
        """Return a name that no other lab has, owned by this process."""
        start = start_time(os.getpid())
        assert start is not None
        return cls(os.getpid(), start, next(_count))

    @classmethod
    def of_namespace(cls, namespace: str) -> LabName | None:
        """Return the lab that a namespace belongs to; None if it belongs to none."""
        match = _PATTERN.fullmatch(namespace)
        return None if match is None else cls(int(match[1]), int(match[2]), int(match[3]))

    def namespace(self, node: str) -> str:
        """Return the name of a node's namespace (`h0`, `h1`, ..., `switch`)."""
        return f"{self}-{node}"

    def owner_lives(self) -> bool:
        """Tell whether the process that made the lab still lives."""
        return start_time(self.pid) == self.start


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None where there is none, or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def namespaces_there() -> list[str]:
    """Return the names of all namespaces that belong to a lab, of whomever."""
    try:
        return sorted(name for name in os.listdir(DIRECTORY) if _PATTERN.fullmatch(name))
    except OSError:
        return []
