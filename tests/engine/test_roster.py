"""Ranks grouped into hosts, and refused where they do not fit together."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest

from ringside.engine.net.rank_map import RankInfo, exchange_rank_infos, make_rank_map, own_rank_info
from ringside.errors import DeadlineError, MismatchError, UsageError
from ringside.processes import machine_id

SAME = {"version": "1", "size": "4"}


def offers(machines: str, objections: str = "") -> list[RankInfo]:
    """One offer per letter: the machine; a rank with an "x" under it cannot share memory."""
    padded = objections.ljust(len(machines))
    return [
        RankInfo(machine, f"node-{machine}", SAME, "no core" if no == "x" else "", nonce=f"nonce{rank}")
        for rank, (machine, no) in enumerate(zip(machines, padded, strict=True))
    ]


@pytest.mark.parametrize(
    ("machines", "objections", "hosts"),
    [
        ("aabb", "", [(0, 1), (2, 3)]),
        ("abab", "", [(0, 2), (1, 3)]),
        ("bbbaa", "", [(0, 1, 2), (3, 4)]),
        ("abc", "", [(0,), (1,), (2,)]),
        ("aaaa", "", [(0, 1, 2, 3)]),
        ("aaaa", " x  ", [(0, 2, 3), (1,)]),
        ("aabb", "xx", [(0,), (1,), (2, 3)]),
    ],
)
def test_ranks_that_share_memory_are_a_host(machines: str, objections: str, hosts: list[tuple[int, ...]]) -> None:
    """Ranks ascending, hosts by their lowest rank; every rank sees the same."""
    for rank in range(len(machines)):
        roster = make_rank_map(rank, offers(machines, objections))
        assert list(roster.hosts) == hosts
        assert roster.size == len(machines)
        assert rank in roster.hosts[roster.host]
        assert roster.hosts[roster.host][roster.local_rank] == rank
        assert roster.local_size == len(roster.hosts[roster.host])
        assert roster.lanes == min(map(len, hosts))
        assert roster.keys == tuple(f"nonce{ranks[0]}" for ranks in hosts)
        for lane in range(roster.lanes):
            assert [roster.host_of(member) for member in roster.lane(lane)] == list(range(len(hosts)))


def test_hosts_are_named() -> None:
    assert make_rank_map(0, offers("aab")).describe(2) == "rank 2 on host node-b"


def test_hosts_of_one_name_are_numbered() -> None:
    """As network namespaces of one machine are, and ranks that cannot share memory."""
    roster = make_rank_map(0, offers("aab", "xx"))
    assert [roster.describe(rank) for rank in range(3)] == [
        "rank 0 on host node-a#0",
        "rank 1 on host node-a#1",
        "rank 2 on host node-b",
    ]


def test_who_differs_is_named_and_in_what() -> None:
    group = offers("aabb")
    group[2] = RankInfo("b", "node-b", {"version": "2", "size": "4", "new": "1"})
    with pytest.raises(MismatchError) as raised:
        make_rank_map(0, group)
    assert raised.value.ranks == (2,)
    assert str(raised.value).startswith(
        "rank 2 on host node-b differs from rank 0 on host node-a in "
        "new = 1 (rank 0: nothing), version = 2 (rank 0: 1): give all ranks the same version"
    )


@pytest.mark.parametrize("ranks", [0, 1])
def test_a_group_needs_two(ranks: int) -> None:
    with pytest.raises(UsageError, match=f"at least 2 ranks, not {ranks}"):
        make_rank_map(0, offers("a" * ranks))


class Shelf(dict[str, bytes]):
    """A store with everything in it already."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if missing := [key for key in keys if key not in self]:
            raise RuntimeError(f"no {missing} after {timeout}")


def test_offers_travel_through_the_store() -> None:
    mine, other = own_rank_info(SAME, "cannot"), own_rank_info(SAME, machine="elsewhere")
    shelf = Shelf({"offer/1": msgspec.json.encode(other)})
    assert exchange_rank_infos(shelf, 0, 2, mine) == [mine, other]
    assert msgspec.json.decode(shelf["offer/0"], type=RankInfo) == mine
    assert mine.machine == machine_id()
    assert other.machine == "elsewhere"
    assert mine.nonce != other.nonce


def test_a_rank_that_makes_no_communicator_is_named() -> None:
    shelf = Shelf({"offer/1": msgspec.json.encode(own_rank_info(SAME))})
    with pytest.raises(DeadlineError, match="Timed out waiting 100ms: rank 2 did not make the communicator;") as raised:
        exchange_rank_infos(shelf, 0, 3, own_rank_info(SAME), timeout_s=0.1)
    assert raised.value.ranks == (2,)


def test_two_processes_of_one_rank_are_refused() -> None:
    class Later(Shelf):
        def set(self, key: str, value: str) -> None:
            super().set(key, msgspec.json.encode(own_rank_info(SAME)).decode())

    with pytest.raises(UsageError, match="two processes claim to be rank 0"):
        exchange_rank_infos(Later({"offer/1": msgspec.json.encode(own_rank_info(SAME))}), 0, 2, own_rank_info(SAME))


def test_who_cannot_take_part_is_named_with_the_reason_before_anything_else_is_compared() -> None:
    told = offers("aab")
    told[1] = msgspec.structs.replace(told[1], problem="no such dtype", settings={})
    for rank, words in ((0, "rank 1 on host node-a: no such dtype"), (1, "no such dtype")):
        with pytest.raises(UsageError) as raised:
            make_rank_map(rank, told)
        assert str(raised.value) == words
