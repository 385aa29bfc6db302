"""Everything about a lab that is decided before anything is built."""

from __future__ import annotations

import os

import pytest

from ringside.errors import RingsideError, UsageError
from ringside.lab import Lab, network
from ringside.lab.delay import DelayLine
from ringside.lab.namespaces import LabName
from ringside.lab.processes import (
    RankPlacement,
    RankResult,
    RunResult,
    default_environment,
    place_ranks,
    rank_environment,
    ranks_on,
)
from ringside.lab.wiring import SWITCH, address_of, mesh, star


@pytest.mark.parametrize("hosts", [1, 2, 5])
def test_a_star_has_one_link_per_host_and_half_of_the_delay_on_each(hosts: int):
    plan = star(hosts, 0.01)
    assert [link.hosts for link in plan.links] == [(host,) for host in range(hosts)]
    assert {link.ends[1].node for link in plan.links} == {SWITCH}
    assert plan.delay_s == 0.005


@pytest.mark.parametrize("hosts", [1, 2, 5])
def test_a_mesh_has_one_link_per_pair_and_routes_both_ways(hosts: int):
    plan = mesh(hosts, 0.01)
    assert len({link.hosts for link in plan.links}) == hosts * (hosts - 1) // 2
    assert plan.delay_s == 0.01
    assert not plan.has_switch
    wanted = {(f"h{a}", address_of(b)) for a in range(hosts) for b in range(hosts) if a != b}
    found = {(node, command.split()[2][:-3]) for node, commands in plan.routes.items() for command in commands}
    assert found == wanted


def test_no_two_interfaces_of_a_node_have_the_same_name():
    for plan in (star(250, 0.0), mesh(20, 0.0)):
        ends = [end for link in plan.links for end in link.ends]
        assert len(set(ends)) == len(ends)
        assert max(len(end.device) for end in ends) <= 15  # the kernel's limit


def test_ranks_are_numbered_host_by_host():
    assert place_ranks(ranks_on(2, [2, 1])) == [RankPlacement(0, 0, 0), RankPlacement(1, 0, 1), RankPlacement(2, 1, 0)]
    assert rank_environment(RankPlacement(2, 1, 0), (2, 1), 29500) == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "RINGSIDE_HOST": "host1",
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": "29500",
    }


def test_what_the_user_set_is_kept():
    assert "GLOO_SOCKET_IFNAME" in default_environment({}, 2)
    assert "GLOO_SOCKET_IFNAME" not in default_environment({"GLOO_SOCKET_IFNAME": "lo"}, 2)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"hosts": 0}, "0 hosts"),
        ({"hosts": 251}, "251 hosts"),
        ({"ranks_per_host": 0}, "0 ranks on a host"),
        ({"hosts": 3, "ranks_per_host": [1, 2]}, "given for 2 hosts, and there are 3"),
        ({"wiring": "ring"}, "unknown wiring 'ring'; there are star, mesh"),
        ({"rate": "1 elephant"}, "rate '1 elephant'"),
        ({"delay_s": -1.0}, "delay -1.0"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_built(asked: dict[str, object], message: str):
    with pytest.raises(UsageError, match=message):
        Lab(**asked)  # type: ignore[arg-type]


def test_a_lab_that_is_not_open_says_so():
    with pytest.raises(UsageError, match="with statement"):
        Lab(hosts=2).set_rate("1gbit")


def test_names_tell_the_owner():
    name = LabName.new()
    assert LabName.of_namespace(name.namespace("h3")) == name
    assert LabName.of_namespace("somebody-elses") is None
    assert name.pid == os.getpid()
    assert name.owner_lives()
    assert not LabName(name.pid, name.start - 1, 0).owner_lives()
    assert LabName.new() != name


@pytest.mark.parametrize("rate", [1e5, 1e7, 1e8, 1e9, 1e11])
def test_a_bucket_holds_whole_pieces_and_the_queue_whole_buckets(rate: float):
    assert 3000 <= network.piece_bytes(rate) <= 65536
    assert network.bucket_bytes(rate) >= 2 * network.piece_bytes(rate)
    words = network.limit("lab0", rate)[-1].split()
    assert int(words[words.index("limit") + 1]) >= int(words[words.index("burst") + 1]) == network.bucket_bytes(rate)


def test_frames_leave_in_order_after_the_delay():
    line = DelayLine(0.5)
    assert line.next_due_s is None
    line.put(1.0, 7, b"a")
    line.put(1.2, 8, b"b")
    line.put(1.1, 7, b"c")  # a clock that went back does not change the order
    assert line.next_due_s == 1.5
    assert list(line.due(1.49)) == []
    assert list(line.due(1.5)) == [(7, b"a")]
    assert list(line.due(2.0)) == [(8, b"b"), (7, b"c")]


def result(rank: int, status: int, seconds: float, ended: bool = False) -> RankResult:
    return RankResult(RankPlacement(rank, rank, 0), status, "", "last words", seconds, ended)


def test_the_first_failure_is_the_first_that_failed_by_itself():
    ranks = (result(0, -15, 1.0, ended=True), result(1, 3, 9.0), result(2, -9, 5.0), result(3, 0, 1.0))
    found = RunResult(ranks, 9.0, True, ())
    assert found.first_failure == ranks[2]
    assert found.exit_status == 137
    with pytest.raises(RingsideError, match=r"rank 2 on host 2 was ended by SIGKILL; its last words:\nlast words"):
        found.check()
    assert RunResult(ranks[3:], 1.0, False, ()).check().exit_status == 0


def test_missing_tools_and_privileges_are_named(monkeypatch: pytest.MonkeyPatch):
    ask = network.unavailable.__wrapped__
    monkeypatch.setattr(network.shutil, "which", lambda name: None if name == "tc" else name)
    assert "no command 'tc'" in ask()
    monkeypatch.setattr(network.shutil, "which", lambda name: name)
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    assert "root" in ask()


def test_where_there_is_no_lab_entering_one_is_a_usage_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Lab, "unavailable", staticmethod(lambda delay=False: "the lab needs root"))
    with pytest.raises(UsageError, match="the lab needs root"), Lab(hosts=2):
        pass
