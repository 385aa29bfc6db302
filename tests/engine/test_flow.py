"""Pieces of a large tensor: everything once, in the order in which messages need them, and nobody waits for ever."""

from __future__ import annotations

import threading

import pytest

from ringside.engine.flow import Stream, lane_bounds, lay_out
from ringside.engine.message_plan import plan_messages
from ringside.errors import ClosedError
from ringside.schedule import by_name

WAIT_S = 20.0


@pytest.mark.parametrize("name", ["ring", "tree", "two_tree", "halving_doubling", "direct", "chain"])
@pytest.mark.parametrize("hosts", [2, 3, 5])
@pytest.mark.parametrize("elements", [1, 7, 1000, 12345])
def test_every_element_is_in_one_piece_and_one_lane(name: str, hosts: int, elements: int) -> None:
    for host in range(hosts):
        layout = lay_out(plan_messages(by_name(name, hosts), host), elements, 50, 400, lanes=2, local_ranks=3)
        at = 0
        for piece in layout.pieces:
            assert piece.begin == at
            assert piece.bounds[0] == 0
            assert piece.bounds[2] == piece.bounds[3], "the third rank carries nothing"
            assert list(piece.bounds) == sorted(piece.bounds)
            at += piece.bounds[-1]
        assert at == elements
        assert sorted(map(str, layout.fills)) == sorted(map(str, layout.pieces))
        assert sorted(map(str, layout.ends)) == sorted(map(str, layout.pieces))
        assert max(piece.bounds[-1] for piece in layout.pieces) <= 400


def test_hosts_cut_alike_and_a_ring_begins_with_its_own_chunk() -> None:
    layouts = [lay_out(plan_messages(by_name("ring", 4), host), 64_000, 1000, 9000, 2, 2) for host in range(4)]
    assert len({layout.pieces for layout in layouts}) == 1
    firsts = [layout.fills[0].chunk for layout in layouts]
    assert sorted(firsts) == [0, 1, 2, 3]
    for layout in layouts:
        assert layout.ends[-1].chunk != layout.fills[0].chunk or len({p.chunk for p in layout.pieces}) == 1
        assert len({piece.chunk for piece in layout.ends}) == 4


def test_lanes_share_a_part_evenly_and_ranks_beyond_have_none() -> None:
    assert lane_bounds(10, 2, 3) == (0, 5, 10, 10)
    assert lane_bounds(7, 3, 3) == (0, 3, 6, 7)
    assert lane_bounds(0, 2, 2) == (0, 0, 0)
    assert lane_bounds(1, 4, 4) == (0, 1, 1, 1, 1)


def stream() -> tuple[Stream, list]:
    layout = lay_out(plan_messages(by_name("ring", 2), 0), 4000, 1000, 1000, 1, 1)
    return Stream(layout, [2] * len(layout.pieces)), list(layout.pieces)


def test_messages_wait_for_what_is_added_up_and_sharing_for_all_segments() -> None:
    flow, pieces = stream()
    order: list[str] = []

    def messages() -> None:
        for segment in (0, 1):
            flow.wait(0, segment)
            order.append(f"sent {segment}")
            flow.ready(0, segment)

    thread = threading.Thread(target=messages)
    thread.start()
    order.append("filled")
    flow.filled(pieces[0])
    assert flow.ended(pieces[0])
    order.append("ended")
    thread.join(WAIT_S)
    assert order == ["filled", "sent 0", "sent 1", "ended"]


def test_when_one_half_fails_the_other_does_not_wait() -> None:
    flow, pieces = stream()
    seen: list[object] = []

    def messages() -> None:
        try:
            flow.wait(0, 0)
        except ClosedError as error:
            seen.append(error)

    thread = threading.Thread(target=messages)
    thread.start()
    flow.stop()
    thread.join(WAIT_S)
    assert len(seen) == 1
    assert not flow.ended(pieces[1])


def test_a_piece_without_messages_of_this_rank_is_ended_at_once() -> None:
    layout = lay_out(plan_messages(by_name("ring", 2), 0), 4000, 1000, 1000, 1, 2)
    assert all(Stream(layout, [0] * len(layout.pieces)).ended(piece) for piece in layout.ends)
