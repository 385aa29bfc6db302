"""What is drawn of a schedule: its messages round by round, what everything contains, and the shape of it all.

Chunks that travel alike (the same transfers in the same rounds, held and wanted by the same ranks) are drawn as one
*part*; where no two do, which is usual, a part is a chunk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ringside.errors import UsageError
from ringside.schedule import Round, Schedule, contributions

MOST_RANKS = 64
MOST_CELLS = 1 << 14
MOST_VALUES = 1 << 24

Held = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Message:
    """Everything that one vertex hands another in a round to the same use.

    Args:
        src: The sending vertex.
        dst: The receiving vertex.
        reducing: Whether the receiver adds it to its own; otherwise it replaces it.
        parts: What is sent: numbers of parts, ascending.
    """

    src: int
    dst: int
    reducing: bool
    parts: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Frame:
    """What is shown at once: a round's messages over what every part contains when it starts.

    Args:
        story: What it is a frame of.
        round: The round, or the number of rounds for the end.
        messages: The round's messages; none at the end.
        held: uint8 [vertices, parts, ranks]: whose contribution is in there, 2 for more than once.
    """

    story: ScheduleFrames
    round: int
    messages: tuple[Message, ...]
    held: Held

    @cached_property
    def done(self) -> NDArray[np.bool_]:
        """Which parts are complete where they are wanted, bool [vertices, parts]."""
        story = self.story
        right = self.held == story.holders.T if story.once else (self.held > 0) == story.holders.T
        found: NDArray[np.bool_] = right.all(axis=2) & story.required
        return found

    @cached_property
    def double(self) -> NDArray[np.bool_]:
        """Which parts contain something more than once though they must not, bool [vertices, parts]."""
        found: NDArray[np.bool_] = np.logical_and(self.held.max(axis=2) > 1, self.story.once)
        return found

    @property
    def complete(self) -> int:
        """How many chunks are complete where they are wanted, over all ranks."""
        return int(self.done.sum(axis=0) @ self.story.weights)

    @property
    def name(self) -> str:
        """The frame's name, rounds counted from 1: `Round 2`, or `Done`."""
        return "Done" if self.round == self.story.schedule.rounds else f"Round {self.round + 1}"

    @property
    def phase(self) -> str:
        """What its round does for the whole; empty at the end."""
        return "" if self.round == self.story.schedule.rounds else self.story.phases[self.round]

    @property
    def heading(self) -> str:
        """Name and phase: `Round 2 of 6 · reduce-scatter`."""
        return f"{self.name} of {self.story.schedule.rounds} · {self.phase}" if self.phase else self.name


@dataclass(frozen=True, eq=False)
class ScheduleFrames:
    """A schedule made ready to be drawn.

    Args:
        schedule: A well-formed schedule.

    Raises:
        UsageError: It has more than 64 ranks, or more chunks than a picture can show.
    """

    schedule: Schedule

    def __post_init__(self) -> None:
        s = self.schedule
        if s.ranks > MOST_RANKS:
            raise UsageError(
                f"a picture has room for {MOST_RANKS} ranks, not {s.ranks}; "
                f"`ringside verify {s.name.split()[0]} --ranks {s.ranks}` audits it"
            )
        if s.vertices * s.chunks * s.ranks > MOST_VALUES:
            raise UsageError(self._crowded(s.chunks))
        if sum(map(len, self.shown)) > MOST_CELLS:
            raise UsageError(self._crowded(len(self.members)))

    def _crowded(self, chunks: int) -> str:
        s = self.schedule
        return f"{chunks} chunks on each of {s.ranks} ranks are too many for a picture; take fewer segments or ranks"

    @cached_property
    def steps(self) -> tuple[Round, ...]:
        """All rounds."""
        return tuple(self.schedule.round(k) for k in range(self.schedule.rounds))

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The chunks of every part, ascending."""
        s = self.schedule
        histories: list[list[object]] = [[] for _ in range(s.chunks)]
        for table in (s.collective.holds(s.ranks, s.chunks), s.collective.wants(s.ranks, s.chunks)):
            for chunk in range(s.chunks):
                histories[chunk].append(table[:, chunk].tobytes())
        # A chunk's whole history is its key: those with the same one are drawn as one part.
        for k, step in enumerate(self.steps):
            for src, dst, chunk, reducing in step:
                histories[chunk].append((k, src, dst, reducing))
        alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for chunk, history in enumerate(histories):
            alike[tuple(history)].append(chunk)
        return tuple(tuple(chunks) for chunks in alike.values())

    @cached_property
    def part_of(self) -> dict[int, int]:
        """The part that a chunk stands for; only the first chunk of every part is in here."""
        return {chunks[0]: part for part, chunks in enumerate(self.members)}

    @cached_property
    def weights(self) -> NDArray[np.int64]:
        """How many chunks every part has, int64 [parts]."""
        return np.array([len(chunks) for chunks in self.members], dtype=np.int64)

    @property
    def once(self) -> bool:
        """Whether a contribution may be in a result only once."""
        return self.schedule.collective.exactly_once

    @cached_property
    def holders(self) -> NDArray[np.bool_]:
        """Whose contributions the result of a part consists of, bool [ranks, parts]."""
        return self.schedule.collective.holds(self.schedule.ranks, self.schedule.chunks, self._first)

    @cached_property
    def required(self) -> NDArray[np.bool_]:
        """Where the result of a part must be at the end, bool [vertices, parts]."""
        s = self.schedule
        wants = s.collective.wants(s.ranks, s.chunks, self._first)
        return np.concatenate([wants, np.zeros((s.switches, len(self.members)), dtype=np.bool_)])

    @property
    def to_complete(self) -> int:
        """How many chunks must be complete at the end, over all ranks."""
        return int(self.required.sum(axis=0) @ self.weights)

    @property
    def _first(self) -> NDArray[np.int64]:
        return np.array([chunks[0] for chunks in self.members], dtype=np.int64)

    @cached_property
    def shown(self) -> tuple[tuple[int, ...], ...]:
        """Which parts are drawn at every vertex: all, or where those are too many, what it ever has to do with."""
        s, parts = self.schedule, len(self.members)
        if parts <= MOST_RANKS or len(self.steps) == 0:
            return (tuple(range(parts)),) * s.vertices
        # What a vertex starts with, must end with, or ever receives.
        touched = self.required.copy()
        touched[: s.ranks] |= self.holders
        for k in range(s.rounds):
            for message in self.messages(k):
                touched[message.dst, list(message.parts)] = True
        return tuple(tuple(np.flatnonzero(row).tolist()) for row in touched)

    def messages(self, k: int) -> tuple[Message, ...]:
        """Return the messages of round k, in the order in which they begin in it; of the end, none."""
        if k == self.schedule.rounds:
            return ()
        together: dict[tuple[int, int, bool], set[int]] = defaultdict(set)
        for src, dst, chunk, reducing in self.steps[k]:
            if chunk in self.part_of:
                together[src, dst, reducing].add(self.part_of[chunk])
        return tuple(Message(*key, tuple(sorted(parts))) for key, parts in together.items())

    @cached_property
    def phases(self) -> tuple[str, ...]:
        """What every round does for the whole, by round: `reduce-scatter`, `all-gather between hosts`.

        Read off the messages, those that add and those that copy, inside hosts and between them, each for itself.
        """
        s = self.schedule
        if str(s.collective) != "all_reduce":
            return (s.collective.name.replace("_", "-"),) * s.rounds
        host_of = {rank: number for number, host in enumerate(hosts_of(s)) for rank in host}

        def kind(message: Message) -> tuple[bool, bool]:
            return message.reducing, host_of.get(message.src) != host_of.get(message.dst)

        rounds = [self.messages(k) for k in range(s.rounds)]
        names = {
            one: _phase([[message for message in step if kind(message) == one] for step in rounds])
            for one in {kind(message) for step in rounds for message in step}
        }
        found = []
        for step in rounds:
            kinds = sorted({kind(message) for message in step}, reverse=True)
            does = " and ".join(dict.fromkeys(names[one] for one in kinds))
            crossing = {crosses for _, crosses in kinds}
            where = (
                (" between hosts" if True in crossing else " inside hosts") if host_of and len(crossing) == 1 else ""
            )
            found.append(does + where)
        return tuple(found)

    def frames(self) -> Iterator[Frame]:
        """Yield the frames: one per round, and the end."""
        for k, counts in enumerate(contributions(self.schedule)):
            held = np.minimum(counts[:, self._first], 2).astype(np.uint8)
            yield Frame(self, k, self.messages(k), held)

    def name(self, part: int) -> str:
        """Return a part's name, short enough for its cell: `c3`, or `c3…` where it stands for several chunks."""
        chunks = self.members[part]
        return f"c{chunks[0]}{'…' if len(chunks) > 1 else ''}"

    def label(self, parts: Sequence[int]) -> str:
        """Return what a message of some parts is called on its arrow: `c3`, `c3 c7`, `c0-3` or `6 chunks`."""
        chunks = self.chunks_of(parts)
        if len(chunks) <= 2:
            return " ".join(f"c{chunk}" for chunk in chunks)
        together = chunks[-1] - chunks[0] == len(chunks) - 1
        return f"c{chunks[0]}-{chunks[-1]}" if together else f"{len(chunks)} chunks"

    def chunks_of(self, parts: Sequence[int]) -> list[int]:
        """Return the chunks that parts stand for, ascending."""
        return sorted(chunk for part in parts for chunk in self.members[part])


def _phase(steps: Sequence[Sequence[Message]]) -> str:
    """Return what messages do that all add, or all copy: by how many have the sums at the end, or the copies first.

    Args:
        steps: The messages of every round; at least one of them has some.
    """
    reducing = any(message.reducing for step in steps for message in step)
    having: dict[int, set[int]] = defaultdict(set)
    touching: dict[int, set[int]] = defaultdict(set)
    # Who copies a part that nobody gave it is, backwards, who adds up a part and does not hand it on.
    for step in steps if reducing else reversed(steps):
        arcs = [(m.src, m.dst, m.parts) if reducing else (m.dst, m.src, m.parts) for m in step]
        for src, _, parts in arcs:
            for part in parts:
                having[part].discard(src)
        for src, dst, parts in arcs:
            for part in parts:
                having[part].add(dst)
                touching[part] |= {src, dst}
    if reducing and any(2 * len(having[part]) > len(touching[part]) for part in having):
        return "all-reduce"
    # Shared out among most of the vertices, or with a few of them.
    shared = 2 * len(set().union(*having.values())) > len(set().union(*touching.values()))
    return ("reduce-scatter" if shared else "reduce") if reducing else ("all-gather" if shared else "broadcast")


# -------------------------------------------------------------------------------------------------
# The shape: whether its messages run round a ring, along a line, over trees, through a middle.
#
# Read off the links that it uses, not off its name, so that an algorithm of one's own gets a fitting picture too.

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

    def in_order(self, rank: int) -> list[int]:
        """Return a rank and all its descendants from left to right, itself in the middle of its children."""
        children = self.children(rank)
        half = len(children) // 2
        before = [r for child in children[:half] for r in self.in_order(child)]
        after = [r for child in children[half:] for r in self.in_order(child)]
        return [*before, rank, *after]

    def columns(self, ranks: Sequence[int]) -> dict[int, int]:
        """Return every rank's column: by rank where each subtree is a run of ranks, perhaps round the end, else by
        branch.

        So the ranks of the two in-order trees of a two-tree stand above each other, and no two links cross.
        """
        n = len(ranks)
        subtrees = [self.below(rank) for rank in ranks]
        for turn in range(n):
            spans = [[(rank - turn) % n for rank in below] for below in subtrees]
            if all(max(span) - min(span) + 1 == len(span) for span in spans):
                return {rank: turn + (rank - turn) % n for rank in ranks}
        return {rank: column for column, rank in enumerate(self.in_order(self.root))}


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
