"""Which rank runs on which host, and what it finds in its environment: as from torchrun, plus where to bind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ringside.errors import UsageError
from ringside.lab.wiring import INTERFACE, MOST_HOSTS, address_of


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Args:
        rank: Who.
        host: On which host, from 0.
        local_rank: Which one of that host's ranks, from 0.
    """

    rank: int
    host: int
    local_rank: int


def ranks_on(hosts: int, ranks_per_host: int | Sequence[int]) -> tuple[int, ...]:
    """Return how many ranks each host has.

    Args:
        hosts: How many hosts.
        ranks_per_host: A number for all of them, or one for each.

    Raises:
        UsageError: That cannot be.
    """
    if not 1 <= hosts <= MOST_HOSTS:
        raise UsageError(f"{hosts} hosts: a lab has 1 to {MOST_HOSTS}")
    sizes = (ranks_per_host,) * hosts if isinstance(ranks_per_host, int) else tuple(ranks_per_host)
    if len(sizes) != hosts:
        raise UsageError(
            f"ranks per host are given for {len(sizes)} hosts, and there are {hosts}: give one number or {hosts}"
        )
    if min(sizes) < 1:
        raise UsageError(f"{min(sizes)} ranks on a host: every host has at least 1")
    return sizes


def places(sizes: Sequence[int]) -> list[Place]:
    """Return where each rank runs: those of host 0 first, as torchrun numbers them."""
    spots = [(host, local) for host, size in enumerate(sizes) for local in range(size)]
    return [Place(rank, host, local) for rank, (host, local) in enumerate(spots)]


def environment(place: Place, sizes: Sequence[int], port: int) -> dict[str, str]:
    """Return the variables that tell a rank who it is.

    Args:
        place: Where it runs.
        sizes: Ranks of each host.
        port: Where rank 0 listens, on host 0.
    """
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(sum(sizes)),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(sizes[place.host]),
        "GROUP_RANK": str(place.host),
        "GROUP_WORLD_SIZE": str(len(sizes)),
        "RINGSIDE_HOST": f"host{place.host}",
        "MASTER_ADDR": address_of(0),
        "MASTER_PORT": str(port),
    }


def defaults(given: Mapping[str, str], ranks: int) -> dict[str, str]:
    """Return variables that every process in the lab gets unless `given` has them.

    Args:
        given: What was asked for and what is inherited.
        ranks: How many ranks there are.
    """
    asked = dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), INTERFACE)
    # The lab has no name server: without these a look-up of an address waits for one.
    asked["RES_OPTIONS"] = "timeout:1 attempts:1"
    if ranks > 1:
        asked["OMP_NUM_THREADS"] = "1"  # as torchrun
    return {name: value for name, value in asked.items() if name not in given}
