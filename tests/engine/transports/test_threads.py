"""Threads as a transport."""

from __future__ import annotations

import pytest
from tests.support.thread_transport import Switchboard, Threads

from ringside.engine.transports.base import LinkError, LinkFailure

from .conformance import CHECKS, FAILURES, place
from .vertices import on_threads


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("check", [*CHECKS, *FAILURES])
def test_conforms(check: str, size: int) -> None:
    on_threads(size, {**CHECKS, **FAILURES}[check])


def test_a_deadline_names_the_vertex_that_sends_nothing() -> None:
    board = Switchboard(3, timeout_s=0.05)
    ends = [Threads(board, rank) for rank in range(3)]
    waits = ends[1].receive(0, place())
    with pytest.raises(LinkError) as raised:
        ends[2].receive(0, place()).wait()
    assert raised.value.cause == LinkFailure("late", 0)
    with pytest.raises(LinkError) as raised:
        waits.wait()
    assert raised.value.cause == LinkFailure("late", 0)
