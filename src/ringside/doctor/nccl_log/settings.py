"""What NCCL prints of its version, its environment and its network, process by process, and where ranks disagree."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ringside.doctor.findings import verdict_of_files
from ringside.doctor.nccl_log.lines import Line
from ringside.monitor.replicas import find_odd_ranks
from ringside.monitor.verdict import Verdict
from ringside.text import rank_list

# -------------------------------------------------------------------------------------------------
# Why hosts talk over TCP sockets: a fallback from something better, somebody's choice, or all that there is.

_PRESENT = re.compile(r"NET/(?!Socket)[\w ]+ : Using|Using network (?!Socket)\S|GPU Direct RDMA Enabled")
_ASKED = re.compile(
    r"\b((?:NCCL|RCCL)_(?:IB_(?!DISABLE)\w+|NET|NET_PLUGIN|NET_GDR_LEVEL|NET_GDR_READ)) set by environment to (.*?)\.?$"
)
_NETWORK = re.compile(r"NET|ncclNet")
_FAILED = re.compile(r"[Ff]ailed to (?:initialize|load)|init failed")


@dataclass
class NcclNetwork:
    """What the processes of a job printed of the network between hosts.

    Attributes:
        fallback: Why something better than sockets is not used although it was looked for, there, asked for or broken;
            empty where no line shows it.
    """

    fallback: str = ""
    _without: set[str] = field(default_factory=set)

    def add(self, line: Line) -> None:
        """Read one line."""
        text, reason = line.text, ""
        if "NCCL_IB_DISABLE set by environment to" in text:
            value = text.rpartition(" to ")[2].strip().rstrip(".")
            reason = f"NCCL_IB_DISABLE={value} is set" if value not in ("", "0") else ""
        elif (match := _ASKED.search(text)) and not match[2].lower().startswith(("socket", "none", "0")):
            reason = f"{match[1]}={match[2].strip()} asks for something else"
        elif "libibverbs" in text and "ailed" in text:
            reason = "libibverbs could not be loaded"
        elif "IB" in text and "No device found" in text:
            self._without.add(line.host)
        elif _PRESENT.search(text):
            reason = f"{line.host} has a better network ({text[:60]})"
        elif "lugin" not in text and (name := _NETWORK.search(text)) and _FAILED.search(text, name.start()):
            reason = f"a network could not be initialised ({text[:80]})"
        self.fallback = self.fallback or reason

    @property
    def tried(self) -> bool:
        """Whether NCCL tried something better, or should have."""
        return bool(self.fallback or self._without)

    @property
    def reason(self) -> str:
        """Why sockets are used, as far as the logs show."""
        hosts = ", ".join(sorted(self._without)[:4])
        found_none = f"NCCL looked for InfiniBand or RoCE and found no device ({hosts})" if hosts else ""
        return self.fallback or found_none or "the log gives no reason"


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
    """What processes printed of themselves.

    Attributes:
        versions: NCCL's version by process; the key `("", 0)` is for a line that does not name its process.
        drivers: CUDA driver version by process.
        environment: NCCL's variables by process.
        addresses: Host name by network address.
        network: What was printed of the network between hosts.
        nvlink: Whether GPUs of a host are joined by NVLink, where the topology search shows it.
        reported: Ranks that NCCL itself reported to disagree: (setting, ranks, values).
    """

    versions: dict[Process, str] = field(default_factory=dict)
    drivers: dict[Process, str] = field(default_factory=dict)
    environment: dict[Process, dict[str, str]] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    network: NcclNetwork = field(default_factory=NcclNetwork)
    nvlink: bool | None = None
    reported: list[tuple[str, tuple[int, int], str]] = field(default_factory=list)

    def add(self, line: Line) -> None:
        """Read one line."""
        text = line.text
        environment = self.environment.setdefault(line.process, {})
        if match := _VERSION.search(text):
            self.versions[line.process] = match[1]
        elif match := _DRIVER.search(text):
            self.drivers[line.process] = match[1]
        elif match := _ENVIRONMENT.search(text):
            environment[match[1]] = match[2].strip()
        elif match := _MISMATCHED.search(text):
            versions = f"rank {match[1]} has {match[2]}, rank {match[3]} has {match[4]}"
            self.reported.append(("NCCL version", (int(match[1]), int(match[3])), versions))
        elif match := _DUPLICATE.search(text):
            self.reported.append(("GPU", (int(match[1]), int(match[2])), f"both are on CUDA device {match[3]}"))
        self.network.add(line)
        for address in _ADDRESS.finditer(text):
            self.addresses[address[2]] = line.host
        if "type NVL/" in text or "NVL[" in text:
            self.nvlink = True
        elif self.nvlink is None and re.search(r"type (?:PIX|PXB|PHB|SYS)/", text):
            self.nvlink = False


def judge_settings(settings: NcclSettings, ranks: Mapping[Process, int]) -> list[Verdict]:
    """Return a verdict for each setting in which ranks disagree; those that differ from most are the culprits.

    Args:
        settings: What processes printed.
        ranks: Rank of every process, in the largest communicator.
    """
    # What NCCL itself reported, once each.
    verdicts = []
    for setting, pair, values in dict.fromkeys(settings.reported):
        advice = (
            "Install the same NCCL on every host (the one PyTorch bundles, or LD_PRELOAD one everywhere)."
            if setting == "NCCL version"
            else "Give every rank its own GPU: torch.cuda.set_device(LOCAL_RANK) before anything touches CUDA."
        )
        cause = f"{setting} does not fit: {values}"
        evidence: dict[str, float | int | str] = {"what": setting, "said": values}
        verdicts.append(verdict_of_files("mismatch", pair, cause, evidence, advice))
    # What ranks print each for itself.
    known = {"NCCL version": settings.versions, "CUDA driver version": settings.drivers}
    for setting, by_process in known.items():
        by_rank = {ranks[process]: value for process, value in by_process.items() if process in ranks}
        verdicts += _disagree(setting, by_rank)
    names = {name for variables in settings.environment.values() for name in variables} - OWN_BUSINESS
    for name in sorted(names):
        printed = settings.environment.items()
        by_rank = {ranks[process]: variables.get(name, "") for process, variables in printed if process in ranks}
        verdicts += _disagree(name, by_rank)
    return verdicts


def _disagree(setting: str, by_rank: Mapping[int, str]) -> list[Verdict]:
    counts = Counter(by_rank.values()).most_common()
    if len(counts) < 2:
        return []
    different, _ = find_odd_ranks(by_rank)
    values = "; ".join(
        f"{value or 'not set'} on {rank_list(rank for rank, own in by_rank.items() if own == value)}"
        for value, _ in counts[:4]
    )
    advice = (
        f"Set {setting} alike on every rank, through the launcher rather than a login file."
        if setting.isupper() or "_" in setting
        else f"Install the same {setting.removesuffix(' version')} on every host."
    )
    cause = f"{setting} differs between ranks: {values}"
    return [verdict_of_files("mismatch", list(different), cause, {"what": setting, "values": values}, advice)]
