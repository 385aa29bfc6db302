from __future__ import annotations

import pytest

from ringside.schedule import (
    ALGORITHMS,
    COLLECTIVES,
    Schedule,
    binomial_broadcast,
    by_name,
    direct,
    hierarchical,
    in_network,
    pipelined,
    relabel,
    ring,
    two_tree,
)
from ringside.view.schedule.frames import ScheduleFrames
from ringside.view.schedule.text import caption, schedule_text


def test_text_names_messages_and_contents():
    text = schedule_text(ring(3))
    assert text.splitlines()[0] == "ring · 3 ranks · 3 chunks · 4 rounds"
    first = text.split("round 2 of 4 · reduce-scatter")[0]
    assert "  0→1 +c2  1→2 +c0  2→0 +c1\n" in first
    assert "    1   ·1·  ·1·  ·1·\n" in first
    assert text.endswith(
        "done\n        c0   c1   c2\n    0   012  012  012\n    1   012  012  012\n    2   012  012  012\n"
    )


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        (name, ranks)
        for name in (*ALGORITHMS, *COLLECTIVES)
        for ranks in (1, 2, 8, 10, 11, 16, 64)
        if name != "direct_all_to_all" or ranks <= 16
    ],
)
def test_text_fits_a_terminal(name: str, ranks: int):
    assert max(map(len, schedule_text(by_name(name, ranks)).splitlines())) <= 80


def test_a_pipelined_schedule_fits_too():
    text = schedule_text(pipelined(ring(16), 8))
    assert max(map(len, text.splitlines())) <= 80
    assert "        c72 to c127\n" in text


def test_text_shows_shares_where_there_is_no_room_for_names():
    assert schedule_text(direct(12)).splitlines()[-1] == "   11   " + "█" * 12


TREES_OF_FIVE = """
tree of c0      tree of c1
0               1
└─ 4            └─ 0
   └─ 2            └─ 3
      ├─ 1            ├─ 2
      └─ 3            └─ 4
"""


def test_both_trees_stand_beside_each_other():
    assert TREES_OF_FIVE in schedule_text(two_tree(5))


def test_a_chunk_that_is_not_there_is_a_dot():
    lines = schedule_text(binomial_broadcast(3, 1)).splitlines()
    start = lines.index("round 1 of 2 · broadcast")
    assert lines[start + 1 : start + 6] == ["  1→2 =c0", "        c0", "    0   ·", "    1   1", "    2   ·"]


@pytest.mark.parametrize(
    ("schedule", "rounds"),
    [
        (by_name("tree", 40), ["16 ranks send to 8 ranks", "8 ranks send to 4 ranks"]),
        (in_network(40), ["40 ranks send to switch 40", "switch 40 sends to 40 ranks"]),
        (ring(7), ["every rank sends to its right neighbour"] * 2),
        (direct(7), ["every rank sends to all others"] * 2),
    ],
)
def test_many_messages_are_told_by_who_sends_to_whom(schedule: Schedule, rounds: list[str]):
    frames = list(ScheduleFrames(schedule).frames())
    assert [words in caption(one, 0) for one, words in zip(frames, rounds, strict=False)] == [True, True]


def test_a_switch_has_its_own_row_and_hosts_are_apart():
    assert "  0→s3 +c0  1→s3 +c0  2→s3 +c0\n" in schedule_text(in_network(3))
    assert "   s3   012\n" in schedule_text(in_network(3))
    text = schedule_text(hierarchical([2, 1]))
    assert "host 0: ranks 0, 1\nhost 1: ranks 2\n" in text
    assert "  ---\n    2   " in text


def test_a_ring_order_is_said():
    assert "around: 0 → 2 → 1 → 3 → 0\n" in schedule_text(relabel(ring(4), [0, 2, 1, 3]))
