"""The shape of a schedule: whether its messages run round a ring, along a line, over trees, through a middle.

Read off the links that it uses, not off its name, so that an algorithm of one's own gets a fitting picture too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ringside.schedule import Schedule
from ringside.view.schedule.frames import ScheduleFrames

Edge = tuple[int, int]


@dataclass(frozen=True)
class Tree:
    """A tree over all ranks that some of the parts climb and descend.

    Args:
        root: Its root.
        parent: Every other rank's parent.
        parts: The parts that use it.
    """

    root: int
    parent: dict[int, int]
    parts: tuple[int, ...]

    def children(self, rank: int) -> list[int]:
        """Return a rank's children, ascending."""
        return sorted(child for child, parent in self.parent.items() if parent == rank)

    def depth(self, rank: int) -> int:
        """Return how far a rank is from the root."""
        return 0 if rank == self.root else 1 + self.depth(self.parent[rank])

    def below(self, rank: int) -> list[int]:
        """Return a rank and all its descendants."""
        return [rank, *(r for child in self.children(rank) for r in self.below(child))]


@dataclass(frozen=True)
class ScheduleShape:
    """How a schedule is to be laid out.

    Args:
        kind: `circle`, `line` or `tree`.
        order: The ranks around the circle or along the line; all of them but those in the middle.
        centre: Vertices in the middle of the circle: switches, or the rank with which all others talk.
        closed: Whether the circle is a ring: everybody sends to the next only.
        trees: One tree, or the two of a two-tree.
        hosts: The ranks of every host, where ranks are on hosts.
    """

    kind: Literal["circle", "line", "tree"]
    order: tuple[int, ...]
    centre: tuple[int, ...] = ()
    closed: bool = False
    trees: tuple[Tree, ...] = ()
    hosts: tuple[tuple[int, ...], ...] = ()


def shape_of(story: ScheduleFrames) -> ScheduleShape:
    """Return the shape of a schedule."""
    s = story.schedule
    ranks = tuple(range(s.ranks))
    switches = tuple(range(s.ranks, s.vertices))
    hosts = hosts_of(s)
    if switches or len(hosts) > 1:
        order = tuple(rank for host in hosts for rank in host) or ranks
        return ScheduleShape("circle", order, switches, hosts=hosts if len(hosts) > 1 else ())
    arcs = {(src, dst) for step in story.steps for src, dst, _, _ in step}
    if cycle := _cycle(arcs, s.ranks):
        return ScheduleShape("circle", cycle, closed=True)
    edges = _undirected(arcs)
    # A hub is the end of every link.
    common = set.intersection(*(set(edge) for edge in edges)) if s.ranks >= 4 and len(edges) == s.ranks - 1 else set()
    if common:
        hub = common.pop()
        return ScheduleShape("circle", tuple(rank for rank in ranks if rank != hub), (hub,))
    if (path := _path(edges, s.ranks)) and (s.ranks != 3 or path == ranks):
        return ScheduleShape("line", path)
    if s.ranks > 2 and (trees := _trees(story)):
        return ScheduleShape("tree", ranks, trees=trees)
    return ScheduleShape("circle", ranks)


def hosts_of(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of every host of a hierarchical schedule, also of a pipelined or renamed one; () of others."""
    if schedule.name.startswith("hierarchical") and schedule.parameters:
        first = schedule.parameters[0]
        if isinstance(first, tuple) and all(isinstance(inner, Schedule) for inner in first):
            sizes = [inner.ranks for inner in first]
            starts = [sum(sizes[:i]) for i in range(len(sizes))]
            return tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))
        names = schedule.parameters[1] if len(schedule.parameters) == 2 else None
        if isinstance(first, Schedule) and first.ranks == schedule.ranks:
            renamed = names if isinstance(names, tuple) else tuple(range(schedule.ranks))
            return tuple(tuple(int(renamed[rank]) for rank in host) for host in hosts_of(first))
    return ()


def _undirected(arcs: Iterable[Edge]) -> set[Edge]:
    return {(min(arc), max(arc)) for arc in arcs}


def _neighbours(edges: Iterable[Edge]) -> dict[int, list[int]]:
    near: dict[int, list[int]] = defaultdict(list)
    for a, b in sorted(edges):
        near[a].append(b)
        near[b].append(a)
    return near


def _cycle(arcs: set[Edge], n: int) -> tuple[int, ...]:
    """Return the ranks around the ring that the arcs are, from rank 0 on; () if they are none."""
    # Every rank has one successor; from rank 0 on they must lead through all and back.
    following = dict(arcs)
    if n < 3 or len(arcs) != n or len(following) != n:
        return ()
    order = [0]
    while len(order) < n and order[-1] in following:
        order.append(following[order[-1]])
    return tuple(order) if len(set(order)) == n and following.get(order[-1]) == 0 else ()


def _path(edges: set[Edge], n: int) -> tuple[int, ...]:
    """Return the ranks along the line that the edges are, from the lower end on; () if they are none."""
    near = _neighbours(edges)
    ends = [rank for rank, others in near.items() if len(others) == 1]
    if len(edges) != n - 1 or len(ends) != 2:
        return ()
    order = [min(ends)]
    while len(order) < n:
        # On a line only one neighbour is not where one came from.
        ahead = [rank for rank in near[order[-1]] if rank not in order[-2:]]
        if not ahead:
            return ()
        order.append(ahead[0])
    return tuple(order)


def _trees(story: ScheduleFrames) -> tuple[Tree, ...]:
    """Return the one or two trees that the parts run over; () if they do not."""
    uses: dict[tuple[frozenset[Edge], int | None], list[int]] = defaultdict(list)
    arcs: dict[int, set[tuple[int, int, bool]]] = defaultdict(set)
    for step in story.steps:
        for src, dst, chunk, reducing in step:
            if chunk in story.part_of:
                arcs[story.part_of[chunk]].add((src, dst, reducing))
    for part in range(len(story.members)):
        edges = frozenset(_undirected((src, dst) for src, dst, _ in arcs[part]))
        # The root is the only rank that adds up and never hands a part sum on, or hands out and never receives.
        handing = {src for src, _, reducing in arcs[part] if reducing}
        receiving = {dst for _, dst, _ in arcs[part]}
        roots = set(range(story.schedule.ranks)) - (handing or receiving)
        uses[edges, roots.pop() if len(roots) == 1 else None].append(part)
        if len(uses) > 2:
            return ()
    trees = [_rooted(edges, root, parts, story.schedule.ranks) for (edges, root), parts in uses.items()]
    return tuple(tree for tree in trees if tree) if all(trees) else ()


def _rooted(edges: frozenset[Edge], root: int | None, parts: list[int], n: int) -> Tree | None:
    if root is None or len(edges) != n - 1:
        return None
    near, row = _neighbours(edges), [root]
    parent: dict[int, int] = {}
    while row:
        rank = row.pop()
        for other in near[rank]:
            if other != parent.get(rank):
                # Reached twice: no tree.
                if other in parent or other == root:
                    return None
                parent[other] = rank
                row.append(other)
    return Tree(root, parent, tuple(parts)) if len(parent) == n - 1 else None
