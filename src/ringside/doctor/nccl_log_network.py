"""Why hosts talk over TCP sockets: a fallback from something better, somebody's choice, or all that there is."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ringside.doctor.nccl_log_lines import Line

_PRESENT = re.compile(r"NET/(?!Socket)[\w ]+ : Using|Using network (?!Socket)\S|GPU Direct RDMA Enabled")
_ASKED = re.compile(
    r"\b((?:NCCL|RCCL)_(?:IB_(?!DISABLE)\w+|NET|NET_PLUGIN|NET_GDR_LEVEL|NET_GDR_READ)) set by environment to (.*?)\.?$"
)
_FAILED = re.compile(r"[Ff]ailed to (?:initialize|load)|init failed")


@dataclass
class Network:
    """What the processes of a job said of the network between hosts.

    Attributes:
        fallback: Why something better than sockets is not used although it was looked for, there, asked for or broken;
            empty where nothing says so.
    """

    fallback: str = ""
    _without: set[str] = field(default_factory=set)

    def add(self, line: Line) -> None:
        """Take one line."""
        text = line.text
        if "NCCL_IB_DISABLE set by environment to" in text:
            value = text.rpartition(" to ")[2].strip().rstrip(".")
            self._say(f"NCCL_IB_DISABLE={value} is set" if value not in ("", "0") else "")
        elif (match := _ASKED.search(text)) and not match[2].lower().startswith(("socket", "none", "0")):
            self._say(f"{match[1]}={match[2].strip()} asks for something else")
        elif "libibverbs" in text and "ailed" in text:
            self._say("libibverbs could not be loaded")
        elif "IB" in text and "No device found" in text:
            self._without.add(line.host)
        elif _PRESENT.search(text):
            self._say(f"{line.host} has a better network ({text[:60]})")
        elif "lugin" not in text and _is_of_plugin(text):
            self._say(f"a network could not be initialised ({text[:80]})")

    def _say(self, reason: str) -> None:
        self.fallback = self.fallback or reason

    @property
    def tried(self) -> bool:
        """Whether NCCL tried something better, or should have."""
        return bool(self.fallback or self._without)

    @property
    def words(self) -> str:
        """Why sockets are used, as far as the logs say."""
        hosts = ", ".join(sorted(self._without)[:4])
        found_none = f"NCCL looked for InfiniBand or RoCE and found no device ({hosts})" if hosts else ""
        return self.fallback or found_none or "the log does not say why"


def _is_of_plugin(text: str) -> bool:
    """Whether a line says that a network could not be initialised."""
    at = min((at for at in (text.find("NET"), text.find("ncclNet")) if at >= 0), default=len(text))
    return _FAILED.search(text, at) is not None
