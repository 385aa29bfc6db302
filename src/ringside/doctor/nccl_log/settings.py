"""What NCCL says of its version, its environment and its network, process by process, and where ranks disagree."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ringside.doctor.findings import verdict_of_files
from ringside.doctor.nccl_log.lines import Line
from ringside.monitor.verdict import Verdict
from ringside.text import rank_list

# -------------------------------------------------------------------------------------------------
# Why hosts talk over TCP sockets: a fallback from something better, somebody's choice, or all that there is.

_PRESENT = re.compile(r"NET/(?!Socket)[\w ]+ : Using|Using network (?!Socket)\S|GPU Direct RDMA Enabled")
_ASKED = re.compile(
    r"\b((?:NCCL|RCCL)_(?:IB_(?!DISABLE)\w+|NET|NET_PLUGIN|NET_GDR_LEVEL|NET_GDR_READ)) set by environment to (.*?)\.?$"
)
_FAILED = re.compile(r"[Ff]ailed to (?:initialize|load)|init failed")


@dataclass
class NcclNetwork:
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


_VERSION = re.compile(r"NCCL version (\d+\.\d+[\w.+]*)")
_DRIVER = re.compile(r"cudaDriverVersion (\d+)")
_ENVIRONMENT = re.compile(r"\b((?:NCCL|RCCL)_\w+) set by environment to (.*?)\.?$")
_ADDRESS = re.compile(r"(?:Bootstrap : Using|NET/Socket : Using|OOB) (?:\[\d+\])?([\w.\-]+):([\d.]+|[0-9a-f:]+)<\d+>")
_MISMATCHED = re.compile(
    r"[Mm]ismatched NCCL version detected : rank (\d{1,9}) version (\d+) rank (\d{1,9}) version (\d+)"
)
_DUPLICATE = re.compile(r"Duplicate GPU detected : rank (\d{1,9}) and rank (\d{1,9}) both on CUDA device (\w+)")
OWN_BUSINESS = frozenset({"NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "NCCL_HOSTID", "NCCL_COMM_ID"})
"""Variables that may differ between ranks without harm."""

Process = tuple[str, int]


@dataclass
class NcclSettings:
    """What processes said of themselves.

    Attributes:
        versions: NCCL's version by process; the key `("", 0)` is for a line that does not say whose it is.
        drivers: CUDA driver version by process.
        environment: NCCL's variables by process.
        addresses: Host name by network address.
        network: What was said of the network between hosts.
        nvlink: Whether GPUs of a host are joined by NVLink, where the topology search says so.
        told: Ranks that NCCL itself reported to disagree: (what, ranks).
    """

    versions: dict[Process, str] = field(default_factory=dict)
    drivers: dict[Process, str] = field(default_factory=dict)
    environment: dict[Process, dict[str, str]] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    network: NcclNetwork = field(default_factory=NcclNetwork)
    nvlink: bool | None = None
    told: list[tuple[str, tuple[int, int], str]] = field(default_factory=list)

    def add(self, line: Line) -> None:
        """Take one line."""
        text = line.text
        environment = self.environment.setdefault(line.process, {})
        if match := _VERSION.search(text):
            self.versions[line.process] = match[1]
        elif match := _DRIVER.search(text):
            self.drivers[line.process] = match[1]
        elif match := _ENVIRONMENT.search(text):
            environment[match[1]] = match[2].strip()
        elif match := _MISMATCHED.search(text):
            said = f"rank {match[1]} has {match[2]}, rank {match[3]} has {match[4]}"
            self.told.append(("NCCL version", (int(match[1]), int(match[3])), said))
        elif match := _DUPLICATE.search(text):
            self.told.append(("GPU", (int(match[1]), int(match[2])), f"both are on CUDA device {match[3]}"))
        self.network.add(line)
        self._topology(line, text)

    def _topology(self, line: Line, text: str) -> None:
        for match in _ADDRESS.finditer(text):
            self.addresses[match[2]] = line.host
        if "type NVL/" in text or "NVL[" in text:
            self.nvlink = True
        elif self.nvlink is None and re.search(r"type (?:PIX|PXB|PHB|SYS)/", text):
            self.nvlink = False


def judge_settings(settings: NcclSettings, ranks: Mapping[Process, int]) -> list[Verdict]:
    """Return a verdict for each setting in which ranks disagree; those that differ from most are the culprits.

    Args:
        settings: What processes said.
        ranks: Rank of every process, in the largest communicator.
    """
    verdicts = [_told(what, pair, said) for what, pair, said in dict.fromkeys(settings.told)]
    known = {"NCCL version": settings.versions, "CUDA driver version": settings.drivers}
    for what, values in known.items():
        by_rank = {ranks[process]: value for process, value in values.items() if process in ranks}
        verdicts += _disagree(what, by_rank, {})
    names = {name for variables in settings.environment.values() for name in variables} - OWN_BUSINESS
    for name in sorted(names):
        by_rank = {
            ranks[process]: env.get(name, "") for process, env in settings.environment.items() if process in ranks
        }
        verdicts += _disagree(name, by_rank, {"": "not set"})
    return verdicts


def _told(what: str, pair: tuple[int, int], said: str) -> Verdict:
    advice = (
        "Install the same NCCL on every host (the one PyTorch bundles, or LD_PRELOAD one everywhere)."
        if what == "NCCL version"
        else "Give every rank its own GPU: torch.cuda.set_device(LOCAL_RANK) before anything touches CUDA."
    )
    return verdict_of_files("mismatch", pair, f"{what} does not fit: {said}", {"what": what, "said": said}, advice)


def _disagree(what: str, said: Mapping[int, str], words: Mapping[str, str]) -> list[Verdict]:
    counts = Counter(said.values()).most_common()
    if len(counts) < 2:
        return []
    usual = counts[0][0]
    tie = counts[0][1] == counts[1][1]
    different = sorted(rank for rank, value in said.items() if value != usual or tie)
    values = "; ".join(
        f"{words.get(value, value)} on {rank_list(rank for rank, own in said.items() if own == value)}"
        for value, _ in counts[:4]
    )
    advice = (
        f"Set {what} alike on every rank, through the launcher rather than a login file."
        if what.isupper() or "_" in what
        else f"Install the same {what.removesuffix(' version')} on every host."
    )
    return [
        verdict_of_files(
            "mismatch", different, f"{what} differs between ranks: {values}", {"what": what, "values": values}, advice
        )
    ]
