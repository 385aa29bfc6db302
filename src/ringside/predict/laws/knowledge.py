"""What is known of a table before its figures: the law of its hardware, from words, presets, point-to-point tables."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ringside.predict.laws import mpi
from ringside.predict.laws.calibrate import vague
from ringside.predict.laws.fabric import Law, law
from ringside.predict.laws.nccl import switches
from ringside.predict.tables.table import ALL_REDUCE, Table
from ringside.predict.topology.files import load_topology, preset
from ringside.predict.topology.topology import LinkClass, Topology

# -------------------------------------------------------------------------------------------------
# A topology from the words of a table: what the machines are called, their GPUs, and their network.
#
# Only words and counts are read, never a measured figure: a prediction from them has seen nothing of what it predicts.


# The first that matches is taken.
_MACHINES = (
    (r"\bp4de?\b|p4de?\.", "p4de"),
    (r"\bp5(?:en?)?\b|p5(?:en?)?\.", "p5"),
    (r"nvl ?72|gb[23]00", "gb200-nvl72"),
    (r"\bb[23]00\b|(?<!6000 )blackwell", "dgx-b200"),
    (r"\bh200\b(?! nvl\b)", "dgx-h200"),
    (r"(?<!\w)h(?:100|800|20)(?!\w)(?!.{0,12}pcie)|hopper|a3-?(?:mega|high|ultra)", "dgx-h100"),
    (r"(?<!\w)a(?:100|800)(?!\w)(?!.{0,12}pcie)", "dgx-a100"),
)
# GPUs that no preset has: words, the links to the others of a host, bytes per second, and the source of that.
_GPUS = (
    (r"gh200", "nvlink", 336e9, "3 x 6 NVLink 4 of 25 GB/s each way to the other GPUs of a host (NVIDIA), 3/4 of it"),
    (r"mi35[05]x?", "nvlink", 360e9, "7 xGMI links of 76.8 GB/s each way (AMD CDNA 4 white paper), 2/3 of it"),
    (r"mi3[02][05]x?", "nvlink", 336e9, "7 xGMI links of 64 GB/s each way (AMD CDNA 3 white paper), 3/4 of it"),
    (r"v100.{0,12}pcie|\bt4\b|g4dn", "pcie", 12e9, "PCIe 3.0 x16"),
    (r"v100", "nvlink", 120e9, "6 NVLinks x SM70_NVLINK_BW 20 GB/s (NCCL src/graph/topo.h)"),
    (r"rtx (?:pro )?6000|h100.{0,12}pcie|h200 nvl\b|rtx 50", "pcie", 50e9, "PCIe 5.0 x16, 63 GB/s, 4/5 of it"),
    (r"rtx|geforce|l40|\bl4\b|\ba10g?\b|\ba[46]0+\b|pcie", "pcie", 25e9, "PCIe 4.0 x16, 31.5 GB/s, 4/5"),
)
# Gbit/s of one InfiniBand port
_PORTS = {"xdr": 800.0, "ndr": 400.0, "hdr": 200.0, "edr": 100.0, "fdr": 56.0}
_SPEEDS = (10, 25, 40, 50, 56, 100, 200, 400, 800)  # of network interfaces; GPUs have other sizes of memory
_SPEED = r"(\d{2,3})\s*g(be|bps|bit|b/s|b|e)?(?=[\s,;:)/-]|$)"
_PER_GBIT = 0.12e9  # 12 GB/s of 100 Gbit/s: NET_BW, NCCL src/graph/topo.h
_ALPHAS = (
    (r"tcp-?xo", "ethernet", 15e-6, "TCPXO: as other offloaded Ethernet"),
    (r"tcp-?x", "ethernet", 400e-6, "TCPX passes through host memory: ms for an all-gather of two hosts"),
    (r"\befa\b|efav", "roce", 27.7e-6, "EFA, as preset p5"),
    (r"slingshot|roce|rdma", "roce", 4e-6, "RDMA over Ethernet, as preset dgx-a100's InfiniBand"),
    (r"infiniband|\bib\b|ndr|hdr|edr|xdr", "infiniband", 4e-6, "InfiniBand, as preset dgx-h100"),
    (r"ethernet|\btcp\b|10g\b|25g\b", "ethernet", 20.6e-6, "TCP, as preset ethernet-10g"),
)


def named_topology(table: Table) -> Topology | None:
    """Return the topology that a table's words and counts stand for; None where they name no GPU that is known."""
    text = f"{table.cluster} {table.algorithm if 'auto' not in table.algorithm else ''}".lower()
    if table.ranks < 2 or not table.cluster:
        return None
    found = _machine(text)
    if found is None and table.hosts > 1 and (_interfaces(text) or _port(text)):
        found = preset("dgx-a100")  # only the network is known; it is what bounds hosts of any GPUs
    if found is None:
        return None
    hosts = table.hosts or max(1, -(-table.ranks // found.ranks_per_host[0]))
    if found.name == "gb200-nvl72":  # a host of it is a rack of 72 GPUs
        if match := re.search(r"(\d+|one|two|four|eight) racks?", text):
            word = {"one": 1, "two": 2, "four": 4, "eight": 8}.get(match[1])
            hosts = min(word or int(match[1]), table.ranks)
        else:
            hosts = max(1, -(-table.ranks // 72))
    sized = found.sized(hosts, _per_host(table.ranks, hosts))
    return _networked(sized, text) if hosts > 1 else sized


def _per_host(ranks: int, hosts: int) -> Sequence[int]:
    """Return the ranks of every host, as equal as they can be."""
    return [ranks // hosts + (host < ranks % hosts) for host in range(hosts)]


def _machine(text: str) -> Topology | None:
    """Return the preset of the machine, or a topology of the GPU, that words name first; None where they name none."""
    for words, name in _MACHINES:
        if re.search(words, text):
            found = preset(name)
            slower = re.search(r"(?<!\w)[ah]800(?!\w)", text)
            if slower and found.inside is not None:
                share = 2 / 3 if "a800" in text else 400 / 900
                found = replace(found, inside=replace(found.inside, bytes_per_s=found.inside.bytes_per_s * share))
            return found
    for words, kind, bytes_per_s, source in _GPUS:
        if match := re.search(words, text):
            inside = LinkClass(kind, 3e-6 if kind == "nvlink" else 2e-6, bytes_per_s)
            between = LinkClass("infiniband", 4e-6, 400 * _PER_GBIT)
            return Topology(match[0], (8, 8), inside, between, 8, sources={"inside.bytes_per_s": source})
    return None


def _networked(topology: Topology, text: str) -> Topology:
    """Return the topology with the interfaces that the words name; the preset's own where they name none."""
    between = topology.between
    if between is None:
        return topology
    nics, rate = topology.nics, between.bytes_per_s
    if found := _interfaces(text):
        count, speed = found
        nics = count or (topology.largest_host if speed >= 200 else 1)
        rate = speed * _PER_GBIT
    elif match := re.search(r"(\d+(?:\.\d+)?)\s*t(?:b|bps|\b)", text):
        rate = float(match[1]) * 1000 * _PER_GBIT / nics
    elif port := _port(text):
        rate = _PORTS[port] * _PER_GBIT
    elif "cx8" in text:
        rate = 800 * _PER_GBIT / 2
    kind, alpha = between.kind, between.alpha_s
    if topology.name not in ("p4de", "p5"):
        link = next((entry for entry in _ALPHAS if re.search(entry[0], text)), None)
        kind, alpha = (link[1], link[2]) if link else (kind, alpha)
    return replace(topology, nics=max(1, nics), between=LinkClass(kind, alpha, rate))


def _interfaces(text: str) -> tuple[int, int] | None:
    """Return how many network interfaces of how many Gbit/s the words name (`8x400G`); 0 where only the speed."""
    for match in re.finditer(r"(?:(?<!\d)(\d{1,4})\s*[x×]\s*|(?<![\w.-]))" + _SPEED, text):
        speed = int(match[2])
        # "80GB" is memory, and so may "40GB" be; "400Gb" is not.
        if speed in _SPEEDS and (match[3] != "b" or speed >= 100):
            return int(match[1] or 0), speed
    return None


def _port(text: str) -> str | None:
    """Return the generation of InfiniBand that the words name."""
    return next((port for port in _PORTS if re.search(rf"\b{port}\b", text)), None)


VERSIONS = 0.1  # doublings of ranks that two minor versions of a library are apart; chosen by hand


@dataclass(frozen=True)
class Knowledge:
    """Where the law of a table comes from.

    Args:
        preset: A preset's or topology file's name; `auto`: the table's words.
        pairs: Point-to-point costs of CPU clusters.
    """

    preset: str = "auto"
    pairs: tuple[mpi.Pairs, ...] = ()

    def topology(self, table: Table) -> Topology | None:
        """Return the topology of a table; None where its words name none."""
        if self.preset == "auto":
            return named_topology(table)
        # With the hosts and ranks of the table; racks where the preset's hosts are racks.
        topology = load_topology(self.preset)
        ranks, full = table.ranks or topology.ranks, topology.ranks_per_host[0]
        needed = -(-ranks // full)
        hosts = table.hosts or needed
        if full > 16:
            hosts = min(hosts, needed)
        hosts = max(1, min(hosts, ranks))
        return topology.sized(hosts, _per_host(ranks, hosts))

    def law(self, table: Table) -> Law | None:
        """Return the law of a table; None where nothing is known of its hardware."""
        known = mpi.pairs_for(table, self.pairs) if self.preset == "auto" else None
        if known is not None and table.hosts > 1 and table.collective == ALL_REDUCE:
            return mpi.process_law(known, table.hosts, table.ranks)
        if is_mpi(table) and self.preset == "auto":
            return None
        topology = self.topology(table)
        if topology is None:
            return None
        found = law(topology, table.collective, table.algorithm)
        place = found.place[0], VERSIONS * _minor(table.library)
        return replace(found, switches=switches(topology, table.collective), place=place)

    def law_or_vague(self, table: Table) -> Law:
        """Return the law of a table; a vague one where nothing is known of its hardware."""
        found = self.law(table)
        return found if found is not None else vague(table.ranks, noisy=is_mpi(table))


def _minor(library: str) -> float:
    """Return 29 of `NCCL 2.29.2`; nan where there is none."""
    match = re.search(r"\d+\.(\d+)", library)
    return float(match[1]) if match else math.nan


def is_mpi(table: Table) -> bool:
    """Whether its ranks are processes of MPI, on CPUs as far as is known."""
    return "mpi" in table.algorithm.lower() or "osu" in table.algorithm.lower()
