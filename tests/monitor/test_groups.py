"""Meshes read from groups, and who waited for whom through several of them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ringside.monitor.groups import (
    OTHER_GROUPS,
    JobGroups,
    Mesh,
    Waited,
    blocked_by_dimension,
    chain,
    describe_chain,
    describe_place,
    kind_of_work,
    mean_waits,
    place_in_mesh,
    read_chain,
    read_groups,
    sum_blocked,
    who_waited,
)
from ringside.monitor.run.records import Group, GroupUse, Row, StepRecord


def groups(**along: list[list[int]]) -> dict[str, Group]:
    """Return the groups of a mesh, by name; `_` in place of a dimension's name makes groups without one."""
    found = {}
    for name, members in along.items():
        for index, ranks in enumerate(members):
            described = "undefined" if name.startswith("_") else f"mesh_{name}"
            found[f"{name}/{index}"] = Group(name=f"{name}/{index}", description=described, ranks=tuple(ranks))
    return found


def step(uses: dict[int, list[GroupUse]]) -> Row:
    """Return a step in which ranks did this in their groups."""
    return {
        rank: StepRecord(step=0, rank=rank, ended_unix=0.0, step_seconds=1.0, own_seconds=0.5, groups=tuple(those))
        for rank, those in uses.items()
    }


def test_without_groups_all_ranks_are_peers() -> None:
    assert Mesh(4).peers == [[0, 1, 2, 3]]
    world = Group(name="0", description="default_pg", ranks=(0, 1, 2, 3))
    assert Mesh(4, {"0": world}).peers == [[0, 1, 2, 3]]


@pytest.mark.parametrize("names", [("dp", "tp"), ("fsdp", "cp"), ("data", "tensor"), ("dp_replicate", "mp")])
def test_peers_have_the_same_coordinates_but_along_data(names: tuple[str, str]) -> None:
    data, model = names
    mesh = Mesh(4, groups(**{data: [[0, 2], [1, 3]], model: [[0, 1], [2, 3]]}))
    assert mesh.peers == [[0, 2], [1, 3]]
    assert mesh.is_known
    assert describe_place(mesh.coordinates[3]) == f"{data} 1, {model} 1"
    assert mesh.peers_of(3) == [1, 3]


def test_both_dimensions_of_hybrid_sharding_are_data() -> None:
    mesh = Mesh(4, groups(replicate=[[0, 2], [1, 3]], shard=[[0, 1], [2, 3]]))
    assert mesh.peers == [[0, 1, 2, 3]]


def test_three_dimensions() -> None:
    along = {"pp": [[n, n + 4] for n in range(4)], "dp": [[0, 2], [1, 3], [4, 6], [5, 7]]}
    mesh = Mesh(8, groups(tp=[[0, 1], [2, 3], [4, 5], [6, 7]], **along))
    assert mesh.peers == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.has_stages
    assert describe_place(mesh.coordinates[5]) == "pp 1, dp 0, tp 1"


def test_without_replicas_the_tensor_ranks_of_a_stage_are_peers() -> None:
    mesh = Mesh(4, groups(pp=[[0, 2], [1, 3]], tp=[[0, 1], [2, 3]]))
    assert mesh.peers == [[0, 1], [2, 3]]


def test_a_pipeline_alone_has_no_peers() -> None:
    for world in (
        Group(name="0", description="default_pg", ranks=(0, 1, 2), has_messages=True),
        Group(name="0", description="mesh_pp", ranks=(0, 1, 2)),
    ):
        mesh = Mesh(3, {"0": world})
        assert mesh.has_stages
        assert mesh.peers == [[0], [1], [2]]
        assert describe_place(mesh.coordinates[2]) == "pp 2"
    assert Mesh(4, groups(pp=[[0, 1], [2, 3]])).peers == [[0], [1], [2], [3]]


def test_groups_without_a_name_that_lie_across_are_data() -> None:
    mesh = Mesh(4, groups(tp=[[0, 1], [2, 3]], _=[[0, 2], [1, 3]]))
    assert mesh.is_known
    assert mesh.peers == [[0, 2], [1, 3]]


def test_where_two_meshes_fit_nobody_is_compared() -> None:
    mesh = Mesh(4, groups(_a=[[0, 1], [2, 3]], _b=[[0, 2], [1, 3]]))
    assert not mesh.is_known
    assert mesh.peers == [[0], [1], [2], [3]]


def test_groups_are_learnt_once() -> None:
    job = JobGroups(4)
    first = job.mesh
    new = Group(name="1", ranks=(0, 1))
    assert job.learn([new]) == [new]
    assert job.learn([new]) == []
    assert job.mesh is not first
    sends = Group(name="1", ranks=(0, 1), has_messages=True)
    assert job.learn([sends]) == [sends]
    assert job.mesh.has_stages
    assert job.learn([Group(name="9", ranks=(0, 77))]) == [], "a rank that is not there"


def test_read_groups() -> None:
    good = {"kind": "groups", "groups": [{"name": "1", "description": "mesh_tp", "ranks": [0, 1]}]}
    damaged = {"kind": "groups", "groups": [{"name": "2", "ranks": [-1]}]}
    assert read_groups([{"kind": "started"}, good, damaged]) == {
        "1": Group(name="1", description="mesh_tp", ranks=(0, 1))
    }


def test_a_group_of_ranks_that_there_are_not_is_left_out() -> None:
    """A run's events may have been written by anybody."""
    damaged = Group(name="9", description="mesh_tp", ranks=(0, 77))
    empty = Group(name="8", description="mesh_tp", ranks=())
    mesh = Mesh(4, {"9": damaged, "8": empty})
    assert mesh.groups == {}
    assert mesh.peers == [[0, 1, 2, 3]]


def test_who_was_blocked_least_came_last() -> None:
    mesh = Mesh(4, groups(dp=[[0, 2], [1, 3]], tp=[[0, 1], [2, 3]]))
    blocked = {0: {"tp/0": 5.0, "dp/0": 1.0}, 1: {"tp/0": 1.0, "dp/1": 4.0},
               2: {"tp/1": 2.0, "dp/0": 3.0}, 3: {"tp/1": 2.5, "dp/1": 0.5}}  # fmt: skip
    row = step({rank: [GroupUse(name, -1, 1, 8, seconds) for name, seconds in uses.items()]
                for rank, uses in blocked.items()})  # fmt: skip
    found = {(wait.rank, wait.last, wait.group): wait.seconds for wait in who_waited(row, mesh)}
    assert found == {(0, 1, "tp/0"): 4.0, (1, 3, "dp/1"): 3.5, (3, 2, "tp/1"): 0.5, (2, 0, "dp/0"): 2.0}


def test_nobody_is_said_to_have_come_last_where_a_member_is_missing() -> None:
    mesh = Mesh(2, groups(dp=[[0, 1]]))
    assert who_waited(step({0: [GroupUse("dp/0", -1, 1, 8, 1.0)]}), mesh) == []


def test_a_receiver_waits_for_its_sender() -> None:
    assert who_waited(step({1: [GroupUse("pp/0", 0, 4, 8, 0.25)]}), Mesh(2)) == [
        Waited(rank=1, last=0, group="pp/0", seconds=0.25)
    ]
    assert who_waited(step({1: [GroupUse("pp/0", 0, 4, 8, 0.0)]}), Mesh(2)) == [], "what it needed was there"


def wait(rank: int, last: int, seconds: float) -> Waited:
    return Waited(rank=rank, last=last, group="g", seconds=seconds)


def test_chain() -> None:
    waits = [wait(7, 4, 1.0), wait(4, 5, 0.9), wait(5, 6, 0.1), wait(7, 1, 0.2)]
    assert [link.last for link in chain(waits, 7)] == [4, 5], "what 5 waits itself is no good part of it"
    assert chain(waits, 1) == []
    circle = [wait(0, 1, 1.0), wait(1, 0, 1.0)]
    assert [link.last for link in chain(circle, 0)] == [1]


def test_blocked_time_is_that_of_the_dimension_that_a_group_lies_along() -> None:
    known = groups(dp=[[0, 2], [1, 3]], _world=[[0, 1, 2, 3]])
    uses = [
        GroupUse("dp/0", -1, 1, 8, 0.2),
        GroupUse("dp/0", 2, 1, 8, 0.1),
        GroupUse("_world/0", -1, 1, 8, 0.04),
        GroupUse("never announced", -1, 1, 8, 0.01),
        GroupUse("_world/0", 1, 1, 8, 0.5),
        GroupUse("_world/0", 0, 1, 8, 0.25),
        GroupUse("dp/0", -1, 1, 8, float("nan")),
    ]
    found = blocked_by_dimension(step({0: uses})[0], Mesh(4, known))
    assert found == {"dp": pytest.approx(0.3), OTHER_GROUPS: pytest.approx(0.05), "pp": 0.75}


def test_blocked_seconds_are_means_over_ranks_and_medians_over_steps() -> None:
    mesh = Mesh(4, groups(tp=[[0, 1], [2, 3]], dp=[[0, 2], [1, 3]]))

    def one(tensor: float) -> Row:
        return step({
            rank: [GroupUse(f"tp/{rank // 2}", -1, 1, 8, tensor * rank), GroupUse("other", -1, 1, 8, 0.01)]
            for rank in range(4)
        })  # fmt: skip

    tensor, other = sum_blocked([one(0.1), one(0.2), one(5.0)], mesh, 1.0)
    assert (tensor.dimension, tensor.seconds_per_step, tensor.step_ratio) == (
        "tp",
        pytest.approx(0.3),
        tensor.seconds_per_step,
    )
    assert tensor.ranks == pytest.approx([0.0, 0.2, 0.4, 0.6])
    assert (other.dimension, other.seconds_per_step) == (OTHER_GROUPS, pytest.approx(0.01))


def test_without_a_dimension_nothing_is_said_of_blocked_time() -> None:
    world = {"0": Group(name="0", description="default_pg", ranks=(0, 1))}
    row = step({rank: [GroupUse("0", -1, 1, 8, 0.1)] for rank in range(2)})
    assert sum_blocked([row], Mesh(2, world), 1.0) == []
    assert sum_blocked([], Mesh(2, world), 1.0) == []


def test_ranks_are_arranged_by_stage_then_by_part_then_replicas() -> None:
    along = {"pp": [[n, n + 4] for n in range(4)], "dp": [[0, 2], [1, 3], [4, 6], [5, 7]]}
    mesh = Mesh(8, groups(tp=[[0, 1], [2, 3], [4, 5], [6, 7]], **along))
    order = sorted(range(8), key=lambda rank: place_in_mesh(mesh.coordinates[rank], rank))
    assert order == [0, 2, 1, 3, 4, 6, 5, 7]
    assert kind_of_work(mesh.coordinates[5]) == {"pp": 1, "tp": 1}
    alone = Mesh(3)
    assert sorted(range(3), key=lambda rank: place_in_mesh(alone.coordinates[rank], rank)) == [0, 1, 2]


@pytest.mark.parametrize("ranks", [[7, 4, 5], [0, 1, 2, 3, 9]])
def test_a_chain_in_words_is_read_again(ranks: list[int]) -> None:
    links = [Waited(rank=one, last=two, group="g", seconds=1.0) for one, two in pairwise(ranks)]
    assert read_chain(describe_chain(links)) == ranks
    assert read_chain("ranks 0-2") == read_chain(None) == read_chain("7 waits for 5") == []


def test_mean_waits_are_those_of_the_groups() -> None:
    mesh = Mesh(4, groups(tp=[[0, 1], [2, 3]]))
    row = step({rank: [GroupUse(f"tp/{rank // 2}", -1, 1, 8, 0.1 * rank**2)] for rank in range(4)})
    assert mean_waits([row, row], mesh, 8) == [(3, 2, pytest.approx(0.5)), (1, 0, pytest.approx(0.1))]
    assert mean_waits([], mesh, 8) == []
