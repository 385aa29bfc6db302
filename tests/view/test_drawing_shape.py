from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from ringside.schedule import (
    ALGORITHMS,
    COLLECTIVES,
    Round,
    binomial_broadcast,
    by_name,
    chain,
    direct,
    from_rounds,
    hierarchical,
    in_network,
    parameter_server,
    pipelined,
    relabel,
    ring,
    tree,
    two_tree,
)
from ringside.view.schedule import layout as drawing_layout
from ringside.view.schedule.arrange import arrange_vertices
from ringside.view.schedule.frames import ScheduleFrames, ScheduleShape, hosts_of, shape_of
from ringside.view.schedule.layout import GraphLayout, Pills

Box = tuple[float, float, float, float]


def shape(schedule) -> ScheduleShape:
    return shape_of(ScheduleFrames(schedule))


def test_a_ring_is_a_circle_in_its_own_order():
    assert shape(ring(4)) == ScheduleShape("circle", (0, 1, 2, 3), closed=True)
    assert shape(relabel(ring(4), [0, 2, 1, 3])).order == (0, 2, 1, 3)
    assert not shape(direct(4)).closed


def test_a_chain_is_a_line_also_pipelined():
    assert shape(chain(6)) == ScheduleShape("line", (0, 1, 2, 3, 4, 5))
    assert shape(pipelined(chain(5), 3)).kind == "line"
    assert shape(chain(2)).kind == shape(ring(2)).kind == "line"


def test_a_server_is_in_the_middle_and_so_is_a_switch():
    assert shape(parameter_server(5)) == ScheduleShape("circle", (1, 2, 3, 4), centre=(0,))
    assert shape(in_network(3)) == ScheduleShape("circle", (0, 1, 2), centre=(3,))


@pytest.mark.parametrize("n", [3, 7, 8, 15, 64])
def test_a_two_tree_is_two_trees_whose_inner_ranks_differ(n: int):
    first, second = shape(two_tree(n)).trees
    inner = [{tree.parent[rank] for rank in tree.parent} for tree in (first, second)]
    assert inner[0] & inner[1] == ({0} if n % 2 else set())
    assert (first.parts, second.parts) == ((0,), (1,))
    assert len(first.parent) == len(second.parent) == n - 1
    assert shape(pipelined(two_tree(n), 2)).trees[1].parts == (2, 3)


def test_a_broadcast_hangs_from_its_root():
    (only,) = shape(binomial_broadcast(8, 3)).trees
    assert only.root == 3
    assert only.children(3) == [4, 5, 7]
    assert only.depth(2) == 3


def test_hosts_are_found_through_combinators():
    hosts = ((0, 1, 2), (3, 4), (5, 6, 7, 8))
    assert hosts_of(hierarchical([3, 2, 4])) == hosts
    assert hosts_of(pipelined(hierarchical([3, 2, 4]), 2)) == hosts
    assert hosts_of(relabel(hierarchical([2, 1]), [2, 0, 1])) == ((2, 0), (1,))
    assert shape(hierarchical([2, 2], outer=in_network)).centre == (4,)
    assert hosts_of(ring(4)) == ()


@pytest.mark.parametrize("n", [2, 5, 8, 15, 16, 33])
def test_trees_of_a_two_tree_cross_nowhere_and_stand_above_each_other(n: int):
    for number, branch in enumerate(shape(two_tree(n)).trees if n > 2 else ()):
        columns = branch.columns(range(n))
        assert len(set(columns.values())) == n
        assert all(columns[rank] == rank for rank in range(1, n))
        assert columns[0] == (n if number and n % 2 else 0)


def boxes(layout: GraphLayout) -> list[tuple[int, Box]]:
    """Everything drawn of vertices as boxes: discs and cells, or what holds both."""
    found: list[tuple[int, Box]] = []
    for index, node in enumerate(layout.nodes):
        r, (x, y) = layout.sizes.disc, node.card
        wide, high = layout.sizes.card(len(node.parts))
        if node.box:
            found.append((index, node.box))
        else:
            found += [(index, (node.x - r, node.y - r, node.x + r, node.y + r)), (index, (x, y, x + wide, y + high))]
    return found


@pytest.mark.parametrize(
    ("name", "n"),
    [
        (name, n)
        for name in (*ALGORITHMS, *COLLECTIVES)
        for n in (1, 2, 3, 4, 6, 9, 16, 17, 40, 64)
        if name not in ("direct_all_to_all", "direct_scatter", "direct_gather") or n <= 40
    ],
)
def test_nothing_overlaps_and_all_is_in_the_box(name: str, n: int):
    layout = arrange_vertices(ScheduleFrames(by_name(name, n)))
    x, y, wide, high = layout.box
    drawn = boxes(layout)
    for _, (left, top, right, bottom) in drawn:
        assert x <= left <= right <= x + wide
        assert y <= top <= bottom <= y + high
    for i, (a, (l1, t1, r1, b1)) in enumerate(drawn):
        for b, (l2, t2, r2, b2) in drawn[i + 1 :]:
            # A disc is round: its corners may meet its neighbour's cells.
            slack = 8 if n > 8 or a == b else 0
            assert min(r1, r2) - max(l1, l2) <= slack or min(b1, b2) - max(t1, t2) <= slack, (a, b)


@pytest.mark.parametrize("schedule", [tree(15), pipelined(two_tree(16), 4), chain(9), hierarchical([3, 2, 4])])
def test_cells_of_a_node_lie_in_its_card(schedule):
    layout = arrange_vertices(ScheduleFrames(schedule))
    for index, node in enumerate(layout.nodes):
        wide, high = layout.sizes.card(len(node.parts))
        for u, v in layout.cell_at(index):
            assert 0 <= u <= wide - layout.sizes.cell
            assert 0 <= v <= high - layout.sizes.cell


def test_arrows_end_at_their_vertices_and_the_two_directions_keep_apart():
    layout = arrange_vertices(ScheduleFrames(direct(5)))
    start, _, end = layout.curve(0, 2)
    back = layout.curve(2, 0)
    assert math.dist(start, (layout.nodes[0].x, layout.nodes[0].y)) == pytest.approx(layout.sizes.disc + 3)
    assert math.dist(end, (layout.nodes[2].x, layout.nodes[2].y)) == pytest.approx(layout.sizes.disc + 5)
    assert math.dist(layout.curve(0, 2)[1], back[1]) > 20


def test_labels_make_way_for_each_other():
    layout = arrange_vertices(ScheduleFrames(direct(5)))
    pills, curve = Pills(layout), layout.curve(0, 2)
    first, second = pills.place(curve, 0.5, 30, 12), pills.place(curve, 0.5, 30, 12)
    assert first
    assert second
    assert max(abs(first[0] - second[0]) - 30, abs(first[1] - second[1]) - 12) >= 0
    assert pills.place(curve, 0.5, 500, 500) is None


def test_the_page_tries_the_same_places_for_labels():
    script = (Path(drawing_layout.__file__).parents[1] / "static" / "schedule" / "drawing.js").read_text()
    (tried,) = re.findall(r"for \(const t of \[at, ([\d., ]+)\]\)", script)
    assert tuple(map(float, tried.split(", "))) == drawing_layout.TRIED


def test_edges_of_which_some_go_round_apart_are_no_tree():
    arcs = [(1, 0), (2, 3), (3, 4), (4, 2)]
    rounds = [Round([src], [dst], [0], [True]) for src, dst in arcs]
    assert shape(from_rounds("apart", 5, 1, rounds)).trees == ()
