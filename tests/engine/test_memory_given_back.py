"""Memory that a rank frees goes away on all ranks, the first piece of it as well as later ones."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from tests.support.ranks import communicator, on_ranks

pytestmark = pytest.mark.native

ELEMENTS = 1 << 20


def mapped_bytes() -> int:
    """Return how much memory of files without a name this process has mapped."""
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:" in line:
            begin, _, end = line.split()[0].partition("-")
            found += int(end, 16) - int(begin, 16)
    return found


def frees() -> list[int]:
    with communicator() as comm:
        before = mapped_bytes()
        found = []
        for _ in range(3):
            x = comm.empty(ELEMENTS, "float32")
            comm.all_reduce(x)
            found.append(mapped_bytes() - before)
            del x
            gc.collect()
            comm.all_reduce(comm.empty(16, "float32"))  # new memory is told of, and so is what has gone
            gc.collect()
            found.append(mapped_bytes() - before)
        return found


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_freed_is_given_back_by_all(size: int) -> None:
    for found in on_ranks(size, frees):
        held, freed = found[::2], found[1::2]
        assert held == [size * 4 * ELEMENTS] * 3, "every rank's"
        assert max(freed) < ELEMENTS
