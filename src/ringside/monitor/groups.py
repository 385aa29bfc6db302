"""A job's process groups: which ranks do the same work, who waits for whom in which of them, and through whom.

Ranks of a job with tensor, pipeline or expert parallelism do different work by design. Only *peers* are compared: ranks
with the same coordinates along every dimension but the data-parallel ones. The mesh is read from the groups: those that
a `DeviceMesh` makes have its dimension's name.

A rank's own time needs no clock in common with other ranks, and neither does it here: all leave an all-reduce (or any
other collective that nobody leaves before the last has come) together, so who was blocked least in it came last, and
the others waited for that one as long as they were blocked longer.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ringside.monitor.run.records import Group, Rank, Row, StepRecord, events_of
from ringside.monitor.stats import known_median

DATA = frozenset({"dp", "ddp", "fsdp", "hsdp", "data", "replicate", "shard", "replica"})
"""Words in the name of a mesh's dimension along which ranks do the same work."""
STAGES = frozenset({"pp", "pipe", "pipeline", "stage", "stages"})
"""Words in the name of one along which they do different work, one after the other."""
DEFAULT = ("default_pg", "mesh_default", "undefined", "")
"""What torch calls groups that no mesh's dimension has named."""
UNNAMED_STAGES = "pp"
"""What a dimension is called whose groups have no name, and in which messages are sent."""
OTHER_GROUPS = "other groups"
"""What stands in place of a dimension for groups of which none is known."""


def dimension(group: Group) -> str:
    """Return the name of the mesh's dimension that a group lies along; empty where none is known."""
    return "" if group.description in DEFAULT else group.description.removeprefix("mesh_")


def _has(name: str, words: frozenset[str]) -> bool:
    return not words.isdisjoint(re.split(r"[^a-z]+", name.lower()))


class Mesh:
    """What is known of how a job's ranks are arranged.

    Args:
        ranks: Number of ranks.
        groups: The process groups that were used, by name; one with ranks that there are not is damaged, and left out.

    Attributes:
        coordinates: Of every rank, by the name of a dimension.
        peers: Ranks that do the same work, as a partition of all ranks: each ascending, in order of their first.
        is_known: Whether the groups tell which ranks do; if not, every rank is alone.
        has_stages: Whether ranks are stages of a pipeline.
    """

    def __init__(self, ranks: int, groups: Mapping[str, Group] = {}) -> None:
        self.ranks = ranks
        self.groups = {name: group for name, group in groups.items() if max(group.ranks, default=ranks) < ranks}
        self.coordinates: list[dict[str, int]] = [{} for _ in range(ranks)]
        along: dict[str, list[Group]] = defaultdict(list)
        for group in self.groups.values():
            name = dimension(group) or (UNNAMED_STAGES if group.has_messages else "")
            if len(group.ranks) > 1 and (len(group.ranks) < ranks or _has(name, STAGES)):
                along[name].append(group)
        unnamed = along.pop("", [])
        self.has_stages = any(_has(name, STAGES) for name in along)
        # The outermost dimension first: its ranks lie farthest apart.
        for name in sorted(along, key=lambda name: -max(group.ranks[1] - group.ranks[0] for group in along[name])):
            for group in along[name]:
                for index, rank in enumerate(group.ranks):
                    self.coordinates[rank][name] = index

        # Groups without a name lie across the other dimensions if they have at most one rank of each of their groups:
        # then their ranks do the same work. Two ways to lie across each other are two meshes that fit.
        models = [set(group.ranks) for name, members in along.items() if not _has(name, DATA) for group in members]
        data = [set(group.ranks) for name, members in along.items() if _has(name, DATA) for group in members]
        across = [set(group.ranks) for group in unnamed]
        crossing = any(one is not two and one & two and not one <= two and not two <= one
                       for one in across for two in across)  # fmt: skip
        self.is_known = not crossing and not (across and any(len(one & two) > 1 for one in across for two in models))
        if self.is_known:
            data += across
        if not models and not crossing:
            self.peers = [list(range(ranks))]
        else:
            self.peers = _components(ranks, data if self.is_known else [])
            # A pipeline's stage without replicas: its tensor-parallel ranks do nearly the same.
            if all(len(peers) == 1 for peers in self.peers) and self.is_known:
                beside = [set(group.ranks) for name, members in along.items() if not _has(name, STAGES)
                          for group in members]  # fmt: skip
                self.peers = _components(ranks, beside)
        self._peers_of = {rank: peers for peers in self.peers for rank in peers}

    def peers_of(self, rank: int) -> list[int]:
        """Return the ranks that do the same work as this one, and itself."""
        return self._peers_of[rank]

    @property
    def stages(self) -> list[list[int]]:
        """The ranks of every stage of the pipeline, in its order; none where there is no one pipeline of all ranks."""
        along = {name for own in self.coordinates for name in own if _has(name, STAGES)}
        if len(along) != 1:
            return []
        (name,) = along
        found: dict[int, list[int]] = defaultdict(list)
        for rank, own in enumerate(self.coordinates):
            found[own.get(name, -1)].append(rank)
        return [] if -1 in found else [found[stage] for stage in sorted(found)]


def describe_place(coordinates: Mapping[str, int]) -> str:
    """Return where a rank is, such as `dp 1, tp 0`; empty where no mesh is known."""
    return ", ".join(f"{name} {index}" for name, index in coordinates.items())


def kind_of_work(coordinates: Mapping[str, int]) -> dict[str, int]:
    """Return the coordinates that tell which part of the work a rank does, stages first: ranks that share them do the
    same."""
    parts = {name: index for name, index in coordinates.items() if not _has(name, DATA)}
    return dict(sorted(parts.items(), key=lambda part: not _has(part[0], STAGES)))


def place_in_mesh(coordinates: Mapping[str, int], rank: int) -> tuple[list[int], list[int], int]:
    """Return a key that sorts ranks by stage, then by the part of the work that they do, then replicas; by rank where
    no mesh is known."""
    replica = [index for name, index in coordinates.items() if _has(name, DATA)]
    return list(kind_of_work(coordinates).values()), replica, rank


def _components(ranks: int, links: Iterable[set[int]]) -> list[list[int]]:
    """Return the partition of ranks in which those that are linked are together."""
    of = {rank: {rank} for rank in range(ranks)}
    for link in links:
        joined = set().union(*(of[rank] for rank in link))
        of.update(dict.fromkeys(joined, joined))
    return sorted({id(part): sorted(part) for part in of.values()}.values())


class JobGroups:
    """The groups of a job that goes on, as its ranks use them for the first time.

    Args:
        ranks: Number of ranks.

    Attributes:
        mesh: What is known so far; another object whenever more is.
    """

    def __init__(self, ranks: int) -> None:
        self.mesh = Mesh(ranks)

    def learn(self, groups: Iterable[Group]) -> list[Group]:
        """Take in groups; return those that were not known, or not so well."""
        before = self.mesh.groups
        told: dict[str, Group] = {}
        for group in groups:
            known = told.get(group.name) or before.get(group.name)
            if known is None or (group.has_messages and not known.has_messages):
                told[group.name] = group
        mesh = Mesh(self.mesh.ranks, before | told)
        news = [group for name, group in mesh.groups.items() if before.get(name) != group]
        if news:
            self.mesh = mesh
        return news


class Waited(msgspec.Struct, frozen=True, kw_only=True):
    """How long one rank waited for another, in one group.

    Args:
        rank: Who waited.
        last: For whom.
        group: In which group.
        seconds: How long.
    """

    rank: Rank
    last: Rank
    group: str
    seconds: float


def who_waited(row: Row, mesh: Mesh) -> list[Waited]:
    """Return for every rank and group of one step how long it waited for the rank that came last.

    Args:
        row: The records of a step.
        mesh: Of the job.
    """
    blocked: dict[str, dict[int, float]] = defaultdict(dict)
    found = []
    for rank, record in row.items():
        for use in record.groups:
            if use.peer < 0:
                blocked[use.group][rank] = use.blocked_seconds
            elif use.blocked_seconds > 0:
                found.append(Waited(rank=rank, last=use.peer, group=use.group, seconds=use.blocked_seconds))
    for name, seconds in blocked.items():
        group = mesh.groups.get(name)
        if group is None or len(seconds) < len(group.ranks):
            continue  # whoever is missing may be the one that came last
        last = min(seconds, key=lambda rank: seconds[rank])
        found += [
            Waited(rank=rank, last=last, group=name, seconds=value - seconds[last])
            for rank, value in seconds.items()
            if value > seconds[last]
        ]
    return found


def chain(waits: Sequence[Waited], rank: int) -> list[Waited]:
    """Return for whom a rank waited longest, for whom that one did, and so on; never the same rank twice."""
    longest: dict[int, Waited] = {}
    for wait in waits:
        if wait.rank not in longest or wait.seconds > longest[wait.rank].seconds:
            longest[wait.rank] = wait
    links: list[Waited] = []
    seen = {rank}
    while rank in longest and (wait := longest[rank]).last not in seen:
        # What the last comer itself waited for explains its lateness only where it is a good part of it.
        if links and wait.seconds < links[-1].seconds / 2:
            break
        links.append(wait)
        rank = wait.last
        seen.add(rank)
    return links


def describe_chain(links: Sequence[Waited]) -> str:
    """Return a chain of two links at least in words, such as `7 waits for 5 by way of 4`."""
    by_way = " and ".join(str(link.last) for link in links[:-1])
    return f"{links[0].rank} waits for {links[-1].last} by way of {by_way}"


def read_chain(words: object) -> list[int]:
    """Return the ranks of a chain in words, from who waits to the one at its root; none where these are other words."""
    found = re.fullmatch(r"(\d{1,9}) waits for (\d{1,9}) by way of (\d{1,9}(?: and \d{1,9})*)", str(words))
    return [] if found is None else [int(found[1]), *map(int, found[3].split(" and ")), int(found[2])]


# -------------------------------------------------------------------------------------------------
# Waits along the dimensions of a mesh.


def blocked_by_dimension(record: StepRecord, mesh: Mesh) -> dict[str, float]:
    """Return how long one rank was blocked in one step, in seconds, along each dimension in whose groups it was.

    Args:
        record: Of the step.
        mesh: Of the job.
    """
    found: dict[str, float] = defaultdict(float)
    for use in record.groups:
        group = mesh.groups.get(use.group)
        name = dimension(group) if group is not None else ""
        # Unnamed groups: messages are a pipeline's; what a collective is for is not known.
        name = name or (UNNAMED_STAGES if use.peer >= 0 else OTHER_GROUPS)
        if 0 <= use.blocked_seconds < math.inf:
            found[name] += use.blocked_seconds
    return found


class Blocked(msgspec.Struct, frozen=True, kw_only=True):
    """How long ranks are blocked in the groups along one dimension: waiting for each other, and the transfer itself.

    Args:
        dimension: Its name, or `OTHER_GROUPS`.
        seconds_per_step: The mean over ranks, in the median step.
        step_ratio: The share of the median step; NaN: not known.
        ranks: Of every rank the seconds in its median step; NaN: it has no group along this dimension.
    """

    dimension: str
    seconds_per_step: float
    step_ratio: float
    ranks: list[float]


def sum_blocked(rows: Iterable[Row], mesh: Mesh, step_seconds: float) -> list[Blocked]:
    """Return how long ranks are blocked along each dimension, the outermost first; nothing where none is known.

    Args:
        rows: The records of some steps.
        mesh: Of the job.
        step_seconds: The median step.
    """
    # By step and rank; a rank that records no groups is not known to be blocked in none.
    each = [{rank: blocked_by_dimension(one, mesh) for rank, one in row.items() if one.groups} for row in rows]
    steps = [step for step in each if step]
    known = dict.fromkeys(name for place in mesh.coordinates for name in place)
    used = {name for step in steps for times in step.values() for name in times}
    names = [name for name in known if name in used] + sorted(used - set(known) - {OTHER_GROUPS})
    if not names:
        return []
    found = []
    for name in [*names, *({OTHER_GROUPS} & used)]:
        means = [sum(times.get(name, 0.0) for times in step.values()) / len(step) for step in steps]
        of_rank: list[list[float]] = [[] for _ in range(mesh.ranks)]
        for step in steps:
            for rank, times in step.items():
                if rank < mesh.ranks and name in times:
                    of_rank[rank].append(times[name])
        seconds = known_median(np.array(means))
        found.append(
            Blocked(
                dimension=name,
                seconds_per_step=seconds,
                step_ratio=seconds / step_seconds if step_seconds > 0 else math.nan,
                ranks=[known_median(np.array(times), math.nan) for times in of_rank],
            )
        )
    return found


def mean_waits(rows: Sequence[Row], mesh: Mesh, most: int) -> list[tuple[int, int, float]]:
    """Return rank, the rank that it waited for, and mean seconds per step, the longest first: at most so many, of at
    least 2% of the longest."""
    sums: dict[tuple[int, int], float] = defaultdict(float)
    for row in rows:
        for wait in who_waited(row, mesh):
            if wait.rank < mesh.ranks and wait.last < mesh.ranks and wait.seconds < math.inf:
                sums[wait.rank, wait.last] += wait.seconds
    longest = sorted(sums.items(), key=lambda entry: -entry[1])[:most]
    return [(*pair, seconds / len(rows)) for pair, seconds in longest if seconds > 0.02 * longest[0][1]]


# -------------------------------------------------------------------------------------------------
# What a run notes of its groups.


class _GroupsNamed(msgspec.Struct, frozen=True):
    groups: list[Group]


def read_groups(events: Iterable[Mapping[str, Any]]) -> dict[str, Group]:
    """Return the groups that a run's events of kind `groups` name, by name."""
    return {group.name: group for event in events_of(events, "groups", _GroupsNamed) for group in event.groups}
