"""The machine as the kernel describes it, on pretended ones, and what ranks make of it: real processes, two domains."""

from __future__ import annotations

import itertools
import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.collective_log import drain
from tests.support.ranks import communicator, on_ranks

from ringside.engine.shm.log import PATHS
from ringside.engine.topology import Cpu, domains, place_of, read_cpus, spread
from ringside.errors import UsageError
from ringside.schedule import traffic, verify
from ringside.schedule.algorithms.hierarchical import over_groups

from .oracle import as_argument, difference, digest, elements, expected


def machine(root: Path, nodes: int = 1, caches: int = 1, cores: int = 1, threads: int = 1) -> Path:
    """Pretend a machine: so many nodes, caches of each, cores of each, threads of each.

    Numbered as Linux does on Intel: the first thread of every core comes first.
    """
    every = nodes * caches * cores
    for core in range(every):
        siblings = [core + every * thread for thread in range(threads)]
        cache = [c + every * t for c in range(every) for t in range(threads) if c // cores == core // cores]
        for cpu in siblings:
            folder = root / f"cpu/cpu{cpu}"
            for index, (level, shared) in enumerate(((1, siblings), (1, siblings), (2, siblings), (3, cache))):
                (folder / f"cache/index{index}").mkdir(parents=True)
                (folder / f"cache/index{index}/level").write_text(f"{level}\n")
                (folder / f"cache/index{index}/shared_cpu_list").write_text(",".join(map(str, shared)) + "\n")
            (folder / "topology").mkdir()
            (folder / "topology/core_cpus_list").write_text(",".join(map(str, siblings)) + "\n")
    of_node = every // nodes
    for node in range(nodes):
        (root / f"node/node{node}").mkdir(parents=True)
        first = [node * of_node + every * thread for thread in range(threads)]
        (root / f"node/node{node}/cpulist").write_text(",".join(f"{c}-{c + of_node - 1}" for c in first) + "\n")
    return root


# ------------------------------------------------------------------------------- what the kernel says


def test_cores_siblings_caches_and_nodes_are_read(tmp_path: Path) -> None:
    cpus = read_cpus(range(16), machine(tmp_path, nodes=2, caches=2, cores=2, threads=2))
    assert [c.cpu for c in cpus] == list(range(16))
    assert [c.core for c in cpus] == [*range(8), *range(8)]
    assert [c.cache for c in cpus] == [0, 0, 2, 2, 4, 4, 6, 6] * 2
    assert [c.node for c in cpus] == [0, 0, 0, 0, 1, 1, 1, 1] * 2


def test_an_older_kernel_has_another_name_for_siblings(tmp_path: Path) -> None:
    folder = machine(tmp_path, cores=2, threads=2) / "cpu/cpu3/topology"
    (folder / "core_cpus_list").rename(folder / "thread_siblings_list")
    assert read_cpus([3], tmp_path)[0].core == 1


def test_what_is_not_said_is_shared_by_all_but_a_core(tmp_path: Path) -> None:
    assert read_cpus([5, 1], tmp_path) == [Cpu(1, 1, 0, 0), Cpu(5, 5, 0, 0)]


def test_each_cpu_is_read_once(tmp_path: Path) -> None:
    root = machine(tmp_path, nodes=2, cores=2)
    read = read_cpus([0, 3], root)
    for folder in ("cpu/cpu3", "node"):
        (root / folder).rename(root / f"{folder}-gone")
    assert read_cpus([3, 0], root) == read
    assert read_cpus([2], root) == [Cpu(2, 2, 2, 1)]


def test_this_machine_can_be_read() -> None:
    cpus = read_cpus(os.sched_getaffinity(0))
    assert [c.cpu for c in cpus] == sorted(os.sched_getaffinity(0))
    assert all(c.core <= c.cpu and min(c.cache, c.node) >= 0 for c in cpus)


# ------------------------------------------------------------------------------- what that says of ranks


def test_a_rank_stays_where_all_its_cpus_are(tmp_path: Path) -> None:
    machine(tmp_path, nodes=2, caches=2, cores=2)
    where = {cpus: place_of(read_cpus(cpus, tmp_path)) for cpus in ((0,), (2, 3), (1, 2), (3, 4))}
    assert list(where.values()) == [(0, 0), (0, 2), (0, -1), (-1, -1)]


@pytest.mark.parametrize(
    ("places", "found"),
    [
        ([(0, 0), (1, 4), (0, 0), (1, 4)], ((0, 2), (1, 3))),
        ([(0, 0), (0, 2), (1, 4), (1, 6)], ((0, 1), (2, 3))),  # nodes before caches
        ([(0, 0), (0, 0), (0, 2)], ((0, 1), (2,))),
        ([(0, -1), (0, -1), (1, -1)], ((0, 1), (2,))),
        ([(0, 0), (1, 4)], ()),  # each alone
        ([(0, 0), (0, 0)], ()),  # all together
        ([(0, 0), (1, 4), (-1, -1), (1, 4)], ()),  # one may run anywhere
        ([(0, 0)], ()),
    ],
)
def test_domains_are_nodes_or_else_caches_if_they_tell_ranks_apart(places: Any, found: Any) -> None:
    assert domains(places) == found


def test_cores_are_filled_before_siblings_and_near_ones_together(tmp_path: Path) -> None:
    cpus = read_cpus(range(8), machine(tmp_path, nodes=2, cores=2, threads=2))
    assert spread(cpus) == [0, 1, 2, 3, 4, 5, 6, 7]
    neighbours = [Cpu(cpu, cpu // 2 * 2, 0, 0) for cpu in range(4)]  # siblings numbered one after the other
    assert spread(neighbours) == [0, 2, 1, 3]


# ------------------------------------------------------------------------------- two levels


@given(st.permutations(range(8)), st.lists(st.integers(1, 7), max_size=4, unique=True))
def test_any_partition_of_ranks_gives_a_right_schedule_of_two_levels(order: list[int], cuts: list[int]) -> None:
    groups = [order[i:j] for i, j in itertools.pairwise([0, *sorted(cuts), 8])]
    schedule = over_groups(groups)
    assert verify(schedule).ok
    # Between groups each carries what it must, and no more: a ring's 2 (g - 1) / g of the tensor.
    of = {rank: number for number, ranks in enumerate(groups) for rank in ranks}
    sent = [0.0] * len(groups)
    for src, dst, share in traffic(schedule).links():
        sent[of[src]] += float(share) if of[src] != of[dst] else 0.0
    assert sent == pytest.approx([2 * (len(groups) - 1) / len(groups)] * len(groups), rel=0.01)


def test_ranks_that_are_no_partition_are_refused() -> None:
    with pytest.raises(UsageError, match="names each of 0 to 3 once"):
        over_groups([[0, 1], [1, 2]])


def by_domains(root: str, cpus: list[int], groups: tuple[tuple[int, ...], ...]) -> list[int]:
    """All-reduce in two levels in both kinds of memory; return digests of the results."""
    digests = []
    rank = int(os.environ["RANK"])
    with communicator(segment_bytes=4096, system=Path(root), cpus=(cpus[rank],)) as comm:
        assert comm.domains == groups
        symmetric = comm.empty(1 << 17, np.uint8)
        kinds = (("float32", "sum"), ("float64", "avg"), ("int32", "max"), ("bfloat16", "sum"))
        for count, (dtype, op) in itertools.product((0, 1, 7, 1001, 9000), kinds):
            inputs = [elements(dtype, count, (r, op)) for r in range(comm.size)]
            for room in (symmetric[: inputs[rank].nbytes].view(inputs[rank].dtype), inputs[rank].copy()):
                room[:] = inputs[rank]
                comm.all_reduce(as_argument(room, dtype), op, algorithm="hierarchical")
                assert not difference(room, expected(inputs, dtype, op, over_groups(groups)), dtype), (count, dtype, op)
                digests.append(digest(room))
        assert {PATHS[call.path] for call in drain(comm.log.core)} == {"program"}
    return digests


@pytest.mark.native
@pytest.mark.parametrize(
    ("shape", "cpus", "groups"),
    [
        ({"nodes": 2, "cores": 2}, [0, 2, 1, 3], ((0, 2), (1, 3))),
        ({"caches": 2, "cores": 2}, [0, 1, 2, 3], ((0, 1), (2, 3))),
        ({"nodes": 2, "caches": 2, "cores": 2}, [*range(8)], ((0, 1, 2, 3), (4, 5, 6, 7))),
        ({"caches": 2, "cores": 3}, [0, 1, 2, 4, 3], ((0, 1, 2), (3, 4))),
    ],
    ids=["nodes", "caches", "two by two", "unequal"],
)
def test_ranks_in_domains_reduce_in_two_levels(shape: Any, cpus: Any, groups: Any, tmp_path: Path) -> None:
    digests = on_ranks(len(cpus), by_domains, str(machine(tmp_path, **shape)), cpus, groups)
    assert all(d == digests[0] for d in digests), "ranks hold different bits"


def unbound() -> tuple[tuple[int, ...], ...]:
    with communicator() as comm:
        x = np.ones(100, np.float32)
        comm.all_reduce(x, algorithm="hierarchical")  # as square as can be
        assert (x == comm.size).all()
        return comm.domains


@pytest.mark.native
def test_ranks_that_may_run_anywhere_are_in_no_domains() -> None:
    assert on_ranks(4, unbound) == [()] * 4


# ------------------------------------------------------------------------------- who spins

LONG = 20_000_000
"""Looks at the flags: half a second or more."""


def bound(cpus: list[int], calls: int) -> tuple[float, float]:
    """Return the CPU seconds and the voluntary switches of a call of this rank, which is bound before it opens."""
    os.sched_setaffinity(0, {cpus[int(os.environ["RANK"])]})
    with communicator(spins=LONG) as comm:
        x = np.ones(1, np.float32)
        for _ in range(10):
            comm.all_reduce(x)
        spent, switches = time.process_time(), resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        for _ in range(calls):
            comm.all_reduce(x)
        spent, switches = time.process_time() - spent, resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - switches
        return spent / calls, switches / calls


@pytest.mark.native
def test_ranks_on_one_cpu_do_not_burn_each_other_s_time() -> None:
    """Whoever looked at the flags there would do so until the kernel took the CPU from it: milliseconds a call."""
    cpu = min(os.sched_getaffinity(0))
    assert max(seconds for seconds, _ in on_ranks(3, bound, [cpu] * 3, 300)) < 1e-3


@pytest.mark.native
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_rank_on_a_cpu_of_its_own_does_not_sleep() -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    assert max(switches for _, switches in on_ranks(2, bound, cpus, 300)) < 0.2
