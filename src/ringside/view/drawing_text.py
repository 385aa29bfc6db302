"""A schedule for the terminal, 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ringside.schedule import Schedule
from ringside.view.drawing_shape import Shape, Tree, shape_of
from ringside.view.drawing_story import Frame, Message, Story
from ringside.view.drawing_words import counted, span

WIDTH = 80
LEVELS = "·░▒▓█"
MARGIN = 8
MOST_MESSAGES = 64


def schedule_text(schedule: Schedule, title: str = "") -> str:
    """Return a schedule for the terminal, 80 columns wide: per round its messages and what every chunk holds.

    Args:
        schedule: A well-formed schedule of at most 64 ranks.
        title: Its name; the schedule's own by default.

    Raises:
        UsageError: The schedule is too large to be shown.
    """
    return "\n".join(_lines(Story(schedule), title or schedule.name)) + "\n"


def _lines(story: Story, title: str) -> Iterator[str]:
    s, shape = story.schedule, shape_of(story)
    facts = (counted(s.ranks, "rank"), counted(s.chunks, "chunk"), counted(s.rounds, "round"))
    yield f"{title} · " + " · ".join(facts)
    yield from _wrapped(_key(story), "")
    yield from _sketch(story, shape)
    for frame in story.frames():
        yield ""
        yield frame.name.lower()
        if frame.round < s.rounds:
            yield from _wrapped(_messages(frame), "  ")
        yield from _table(frame, shape)


def _key(story: Story) -> str:
    several = int(story.holders.sum(axis=0).max(initial=1)) > 1
    cells = "a cell names the ranks whose contributions it contains"
    if not _named(story):
        cells = f"a cell shows their share: {LEVELS[1]} one rank's, {LEVELS[-1]} all" if several else "█ is there"
    alike = "" if len(story.members) == story.schedule.chunks else "; chunks that travel alike share a column"
    return f"+ adds, = overwrites; rows are ranks, columns chunks; {cells}, when the round starts{alike}"


def _messages(frame: Frame) -> str:
    parts = [_message(frame.story, message) for message in frame.messages]
    shown = parts if len(parts) <= MOST_MESSAGES else [*parts[:60], f"… and {len(parts) - 60} more"]
    return "  ".join(shown) or "nothing is sent"


def _message(story: Story, message: Message) -> str:
    src, dst = (_vertex(story, vertex) for vertex in (message.src, message.dst))
    what = span(story.chunks_of(message.parts)).replace(", c", ",").replace("-c", "-")
    return f"{src}→{dst}\u00a0{'+' if message.reducing else '='}{what}"


def _vertex(story: Story, vertex: int) -> str:
    return str(vertex) if vertex < story.schedule.ranks else f"s{vertex}"


def _wrapped(text: str, indent: str) -> list[str]:
    lines = textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace("\u00a0", " ") for line in lines]


# ---- the shape


def _sketch(story: Story, shape: Shape) -> Iterator[str]:
    """Show the trees, side by side where there are two, and what else is worth a line."""
    if shape.closed and shape.order != tuple(range(len(shape.order))):
        yield from _wrapped("around: " + " → ".join(map(str, (*shape.order, shape.order[0]))), "")
    for number, host in enumerate(shape.hosts):
        yield from _wrapped(f"host {number}: ranks {', '.join(map(str, host))}", "")
    if not shape.trees:
        return
    yield ""
    blocks = [[f"tree of {span(story.chunks_of(tree.parts))}", *_branches(tree, tree.root)] for tree in shape.trees]
    wide = max(len(line) for block in blocks for line in block) + 6
    rows = max(map(len, blocks))
    columns = [block + [""] * (rows - len(block)) for block in blocks]
    if wide * len(blocks) <= WIDTH + 6:
        yield from ("".join(line.ljust(wide) for line in row).rstrip() for row in zip(*columns, strict=True))
    else:
        yield from (line for block in blocks for line in block)


def _branches(tree: Tree, rank: int, lead: str = "", own: str = "") -> Iterator[str]:
    yield f"{lead}{own}{rank}"
    children = tree.children(rank)
    below = lead + {"": "", "├─ ": "│  ", "└─ ": "   "}[own]
    for child in children:
        yield from _branches(tree, child, below, "└─ " if child == children[-1] else "├─ ")


# ---- the cells


def _width(story: Story) -> int:
    """Columns that a named cell takes."""
    names = max(len(story.name(part)) for part in range(len(story.members)))
    return max(int(story.holders.sum(axis=0).max(initial=1)), names) + 2


def _named(story: Story) -> bool:
    return story.schedule.ranks <= 10 and len(story.members) * _width(story) <= WIDTH - MARGIN


def _table(frame: Frame, shape: Shape) -> Iterator[str]:
    """One row per vertex, a line between hosts; wide ones in blocks of columns."""
    story = frame.story
    named, parts = _named(story), len(story.members)
    each = parts if named else WIDTH - MARGIN
    firsts = {host[0] for host in shape.hosts[1:]}
    for start in range(0, parts, each):
        block = range(start, min(start + each, parts))
        if named:
            yield " " * MARGIN + "".join(story.name(part).ljust(_width(story)) for part in block).rstrip()
        elif parts > each:
            yield f"{' ' * MARGIN}{story.name(block[0])} to {story.name(block[-1])}"
        for vertex in range(story.schedule.vertices):
            if vertex in firsts:
                yield "  ---"
            cells = (_cell(frame, vertex, part, named) for part in block)
            row = "".join(cell.ljust(_width(story)) if named else cell for cell in cells)
            yield f"  {_vertex(story, vertex):>3}   {row}".rstrip()


def _cell(frame: Frame, vertex: int, part: int, named: bool) -> str:
    holders: NDArray[np.int64] = np.flatnonzero(frame.story.holders[:, part])
    present = (frame.held[vertex, part, holders] > 0).tolist()
    if named:
        return "".join(str(rank) if there else "·" for rank, there in zip(holders.tolist(), present, strict=True))
    if sum(present) in (0, len(present)):
        return LEVELS[-1] if all(present) else LEVELS[0]
    return LEVELS[max(1, 4 * sum(present) // len(present))]
