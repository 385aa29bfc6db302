"""One script over both communicators, that of one host and that over a process group: `ringside.Communicator`."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import communicator as on_one_host
from tests.support.ranks import on_ranks

import ringside
from ringside.engine.shm.communicator import HostCommunicator
from ringside.pytorch.communicator.communicator import GroupCommunicator

from .groups import communicator as over_a_group
from .groups import meeting_point

pytestmark = pytest.mark.native


def script(comm: ringside.Communicator) -> list[Any]:
    """Call everything that `Communicator` has, on whole numbers: no order of adding shows."""
    with comm:
        mine = np.arange(2.0) + 10 * comm.rank
        rows = [comm.all_reduce(mine.copy()), comm.all_reduce(mine.copy(), "max"), comm.all_gather(mine)]
        rows += [comm.reduce_scatter(mine), comm.all_to_all(mine), comm.broadcast(mine.copy(), root=1)]
        rows += [comm.scatter(np.zeros(1), np.array([[1.0], [2.0]]), root=0), comm.reduce(mine.copy(), root=1)]
        rows += [comm.reduce_scatter_(mine.copy(), [0, 1, 2]), comm.all_gather_(mine.copy(), [0, 1, 2])]
        gathered = comm.gather(mine, root=1)
        rows += [np.zeros(0) if gathered is None else gathered, comm.empty(2, np.float64)]
        work = comm.all_reduce(mine.copy(), async_op=True)
        work.wait()
        comm.set_timeout(10.0)
        comm.barrier()
        with comm.split(0, key=-comm.rank) as reversed_ranks:
            place = (reversed_ranks.rank, reversed_ranks.size)
        return [comm.rank, comm.size, place, work.is_completed(), *(row.tolist() for row in rows)]


def with_group(path: str, hosts: list[int]) -> list[Any]:
    with over_a_group(path, hosts) as comm:
        return script(comm)


def with_host() -> list[Any]:
    return script(on_one_host())


def test_one_script_does_the_same_over_every_communicator() -> None:
    expected = on_ranks(2, with_host)
    for hosts in ([0, 0], [0, 1]):
        with meeting_point() as path:
            assert on_ranks(2, with_group, path, hosts) == expected


def defaults(method: Any) -> dict[str, Any]:
    """What a method takes where nothing is said, by parameter."""
    parameters = inspect.signature(method).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


@pytest.mark.parametrize("made", [HostCommunicator, GroupCommunicator])
def test_what_is_declared_of_communicators_has_the_defaults_of_each(made: type) -> None:
    for name, method in inspect.getmembers(ringside.Communicator, inspect.isfunction):
        if name.startswith("_"):
            continue
        declared = {key: value for key, value in defaults(method).items() if value is not ...}
        assert declared.items() <= defaults(getattr(made, name)).items(), name
