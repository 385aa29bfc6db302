"""Logs as NCCL writes them, for any number of hosts and any fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def hosts_of(per_host: Sequence[int]) -> list[tuple[str, int]]:
    """Return (host, local rank) of every rank, block by block."""
    return [(f"node-{host}", local) for host, count in enumerate(per_host) for local in range(count)]


def log_of_rank(
    rank: int,
    places: Sequence[tuple[str, int]],
    *,
    order: Sequence[int] | None = None,
    channels: int = 2,
    network: str = "NET/IB/0/GDRDMA",
    inside: str = "P2P/CUMEM",
    version: str = "2.21.5+cuda12.4",
    environment: dict[str, str] | None = None,
    comm_id: str = "0x89739f751af3a52d",
    complete: bool = True,
    extra: Sequence[str] = (),
) -> list[str]:
    """Return one rank's lines in the form of NCCL 2.19 to 2.28."""
    host, device = places[rank]
    pid, n = 1000 + rank, len(places)
    ring = list(order if order is not None else range(n))
    main = f"{host}:{pid}:{pid} [{device}] NCCL INFO "
    thread = f"{host}:{pid}:{pid + 500} [{device}] NCCL INFO "
    me = f"comm 0x55d0{rank:04x}00 rank {rank} nranks {n} cudaDev {device} nvmlDev {device} busId {device + 1}000"
    address = f"10.0.0.{int(host.rpartition('-')[2]) + 1}"
    lines = [
        f"{main}Bootstrap : Using eth0:{address}<0>",
        f"{main}cudaDriverVersion 12040",
        f"{main}NCCL version {version}",
        *(f"{main}{name} set by environment to {value}." for name, value in (environment or {}).items()),
        f"{thread}Using network {'Socket' if 'Socket' in network else 'IB'}",
        f"{thread}ncclCommInitRank {me} commId {comm_id} - Init START",
        f"{thread}comm 0x55d0{rank:04x}00 rank {rank} nRanks {n} nNodes {len({h for h, _ in places})} localRanks 1 "
        "localRank 0 MNNVL 0",
    ]
    if rank == 0:
        lines += [f"{thread}Channel {c:02d}/{channels:02d} :  {'  '.join(map(str, ring))}" for c in range(channels)]
    if not complete:
        return [*lines, *(f"{thread}{text}" for text in extra)]
    lines.append(f"{thread}Trees " + " ".join(f"[{c}] {_tree(rank, n)}" for c in range(channels)))
    at = ring.index(rank)
    before, after = ring[at - 1], ring[(at + 1) % n]
    for channel in range(channels):
        if places[before][0] != host:
            lines.append(f"{thread}{_hop(channel, before, rank, places)} [receive] via {network}")
        if places[after][0] != host:
            lines.append(f"{thread}{_hop(channel, rank, after, places)} [send] via {network}")
        else:
            lines.append(f"{thread}{_hop(channel, rank, after, places)} via {inside}")
    lines.append(f"{thread}Connected all rings")
    lines.append(f"{thread}ncclCommInitRank {me} commId {comm_id} - Init COMPLETE")
    return [*lines, *(f"{thread}{text}" for text in extra)]


def _hop(channel: int, src: int, dst: int, places: Sequence[tuple[str, int]]) -> str:
    return f"Channel {channel:02d}/0 : {src}[{places[src][1]}] -> {dst}[{places[dst][1]}]"


def _tree(rank: int, n: int) -> str:
    down = [child if child < n else -1 for child in (2 * rank + 1, 2 * rank + 2)]
    return f"{down[0]}/{down[1]}/-1->{rank}->{(rank - 1) // 2 if rank else -1}"


def interleaved(logs: Sequence[Sequence[str]]) -> str:
    """Return logs of many ranks as one file would hold them: line by line in turn."""
    longest = max(map(len, logs))
    return "\n".join(log[line] for line in range(longest) for log in logs if line < len(log)) + "\n"


def job_log(
    per_host: Sequence[int], change: Callable[[int], dict[str, object]] = lambda _: {}, **options: object
) -> str:
    """Return the log of a whole job in one file; `change(rank)` gives options of single ranks."""
    places = hosts_of(per_host)
    return interleaved(
        [log_of_rank(rank, places, **{**options, **change(rank)}) for rank in range(len(places))]  # type: ignore[arg-type]
    )


OLD_2_4 = """
node01:2771:2771 [0] NCCL INFO NET/Socket : Using [0]eno1:192.168.50.11<0>
NCCL version 2.4.8+cuda10.0
node01:2771:2801 [0] NCCL INFO Channel 00 :    0   1
node01:2771:2801 [0] NCCL INFO Ring 00 : 1 -> 0 [receive] via NET/IB/0
node02:2771:2802 [0] NCCL INFO Ring 00 : 0 -> 1 [receive] via NET/IB/0
node01:2771:2801 [0] NCCL INFO Ring 00 : 0 -> 1 [send] via NET/IB/0
node01:2771:2801 [0] NCCL INFO comm 0x7f3fd4001980 rank 0 nranks 2 cudaDev 0 nvmlDev 0 - Init COMPLETE
node02:2771:2802 [0] NCCL INFO comm 0x7f3fd4001980 rank 1 nranks 2 cudaDev 0 nvmlDev 0 - Init COMPLETE
"""


BUS_IDS_2_10 = """
a:1:11 [0] NCCL INFO Channel 00/02 :    0   1
a:1:11 [0] NCCL INFO Channel 00 : 0[7000] -> 1[a000] via P2P/IPC/read
a:2:12 [1] NCCL INFO Channel 00 : 1[a000] -> 0[7000] via direct shared memory
a:1:11 [0] NCCL INFO comm 0x7f00 rank 0 nranks 2 cudaDev 0 busId 7000 - Init COMPLETE
a:2:12 [1] NCCL INFO comm 0x7f01 rank 1 nranks 2 cudaDev 1 busId a000 - Init COMPLETE
"""
