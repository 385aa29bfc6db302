"""A schedule for the terminal, 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ringside.schedule import Schedule
from ringside.text import counted, name_vertices
from ringside.view.schedule.frames import Frame, Message, ScheduleFrames, ScheduleShape, Tree, shape_of

# -------------------------------------------------------------------------------------------------
# A schedule in words: what a round does, and what the end is.

LISTED = 6


def caption(frame: Frame, complete_after: int | None) -> str:
    """Return what a frame shows.

    Args:
        frame: The frame.
        complete_after: How many chunks are complete after its round; None for the end.
    """
    story, messages, s = frame.story, frame.messages, frame.story.schedule
    if complete_after is None:
        after = f"After {counted(s.rounds, 'round')}"
        if frame.complete < story.to_complete:
            return f"{after} only {frame.complete} of {counted(story.to_complete, 'chunk')} are complete."
        if s.collective.name == "barrier":
            return f"{after} every rank knows that all have arrived."
        if str(s.collective) == "all_reduce":
            return f"{after} every rank holds the complete sum of every chunk."
        kind = str(s.collective).replace("_", "-", s.collective.name.count("_"))
        return f"{after} the {kind} is complete: every chunk is where it is wanted."
    if len(messages) <= LISTED:
        what = messages_in_words(story, messages)
    else:
        moved = sum(int(story.weights[list(m.parts)].sum()) for m in messages)
        carrying = "" if moved == len(messages) else f" with {counted(moved, 'chunk')}"
        what = f"{counted(len(messages), 'message')}{carrying}: {_pattern(story.schedule, messages)}"
    if s.collective.name == "all_reduce" and messages:
        adding = {message.reducing for message in messages}
        sums = "Partial and finished" if len(adding) > 1 else "Partial" if adding == {True} else "Finished"
        what = f"{sums} sums travel on. {what}"
    return f"{what} Then {complete_after} of {counted(story.to_complete, 'chunk')} are complete."


def span(chunks: Sequence[int]) -> str:
    """Return chunk numbers, ascending, as `c3` or `c0-2, c7`."""
    runs: list[list[int]] = []
    for chunk in chunks:
        if runs and chunk == runs[-1][-1] + 1:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return ", ".join(f"c{run[0]}" if len(run) == 1 else f"c{run[0]}-{run[-1]}" for run in runs)


def messages_in_words(story: ScheduleFrames, messages: Sequence[Message]) -> str:
    """List the messages of a round: `Rank 0 sends c3 to rank 1, which adds it; ...`."""
    if not messages:
        return "Nothing is sent."
    clauses = []
    for message in messages:
        chunks = story.chunks_of(message.parts)
        src, dst = (name_vertices([vertex], story.schedule.ranks) for vertex in (message.src, message.dst))
        use = f"{'adds' if message.reducing else 'keeps'} {'it' if len(chunks) == 1 else 'them'}"
        if not message.reducing and story.holders.all():
            use = f"overwrites its {'copy' if len(chunks) == 1 else 'copies'}"
        clauses.append(f"{src} sends {span(chunks)} to {dst}, which {use}")
    sentence = "; ".join(clauses) + "."
    return sentence[0].upper() + sentence[1:]


def _pattern(s: Schedule, messages: Sequence[Message]) -> str:
    """Describe a round by its pattern, without listing every message."""
    sends = np.bincount([m.src for m in messages], minlength=s.vertices)
    receives = np.bincount([m.dst for m in messages], minlength=s.vertices)
    adding = sum(m.reducing for m in messages)
    use = "adds" if adding == len(messages) else "keeps" if not adding else f"adds ({adding}) or keeps"
    if len({*sends.tolist(), *receives.tolist()}) == 1:
        # All alike: the same distance, everybody, or so many each.
        distances = {(m.dst - m.src) % s.ranks for m in messages}
        if distances == {1}:
            whom = "to its right neighbour"
        elif len(distances) == 1:
            whom = f"to the rank {distances.pop()} further on"
        elif sends[0] == s.ranks - 1:
            whom = "to all others"
        else:
            whom = f"to {counted(int(sends[0]), 'rank')}"
        return f"every rank sends {whom}, and {use} what it receives."
    ends = []
    for vertices in (np.flatnonzero(sends).tolist(), np.flatnonzero(receives).tolist()):
        kind = "ranks" if max(vertices) < s.ranks else "switches" if min(vertices) >= s.ranks else "nodes"
        ends.append(name_vertices(vertices, s.ranks) if len(vertices) == 1 else f"{len(vertices)} {kind}")
    verb = "sends" if np.count_nonzero(sends) == 1 else "send"
    return f"{ends[0]} {verb} to {ends[1]}; a receiver {use} what comes."


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
    story = ScheduleFrames(schedule)
    shape = shape_of(story)
    facts = (counted(schedule.ranks, "rank"), counted(schedule.chunks, "chunk"), counted(schedule.rounds, "round"))
    lines = [f"{title or schedule.name} · " + " · ".join(facts)]

    # How to read it.
    cells = "a cell names the ranks whose contributions it contains"
    if not _named(story):
        several = int(story.holders.sum(axis=0).max(initial=1)) > 1
        cells = f"a cell shows their share: {LEVELS[1]} one rank's, {LEVELS[-1]} all" if several else "█ is there"
    alike = "" if len(story.members) == schedule.chunks else "; chunks that travel alike share a column"
    key = f"+ adds, = overwrites; rows are ranks, columns chunks; {cells}, when the round starts{alike}"
    lines += [*_wrapped(key, ""), *_sketch(story, shape)]

    for frame in story.frames():
        lines += ["", frame.heading.lower()]
        if frame.round < schedule.rounds:
            lines += _wrapped(_messages(frame), "  ")
        lines += _table(frame, shape)
    return "\n".join(lines) + "\n"


def _messages(frame: Frame) -> str:
    """A round's messages, as `0→1 +c3`; a no-break space keeps each on one line."""
    parts = []
    for message in frame.messages:
        src, dst = (_vertex(frame.story, vertex) for vertex in (message.src, message.dst))
        chunks = span(frame.story.chunks_of(message.parts)).replace(", c", ",").replace("-c", "-")
        parts.append(f"{src}→{dst}\u00a0{'+' if message.reducing else '='}{chunks}")
    shown = parts if len(parts) <= MOST_MESSAGES else [*parts[:60], f"… and {len(parts) - 60} more"]
    return "  ".join(shown) or "nothing is sent"


def _vertex(story: ScheduleFrames, vertex: int) -> str:
    return str(vertex) if vertex < story.schedule.ranks else f"s{vertex}"


def _wrapped(text: str, indent: str) -> list[str]:
    lines = textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace("\u00a0", " ") for line in lines]


# ---- the shape


def _sketch(story: ScheduleFrames, shape: ScheduleShape) -> Iterator[str]:
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


def _width(story: ScheduleFrames) -> int:
    """Columns that a named cell takes."""
    names = max(len(story.name(part)) for part in range(len(story.members)))
    return max(int(story.holders.sum(axis=0).max(initial=1)), names) + 2


def _named(story: ScheduleFrames) -> bool:
    return story.schedule.ranks <= 10 and len(story.members) * _width(story) <= WIDTH - MARGIN


def _table(frame: Frame, shape: ScheduleShape) -> Iterator[str]:
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
            cells = []
            for part in block:
                holders: NDArray[np.int64] = np.flatnonzero(story.holders[:, part])
                present = (frame.held[vertex, part, holders] > 0).tolist()
                if named:
                    ranks = zip(holders.tolist(), present, strict=True)
                    cells.append("".join(str(rank) if there else "·" for rank, there in ranks))
                elif sum(present) in (0, len(present)):
                    cells.append(LEVELS[-1] if all(present) else LEVELS[0])
                else:  # something, but not all: never the blocks of nothing or of everything
                    cells.append(LEVELS[max(1, 4 * sum(present) // len(present))])
            row = "".join(cell.ljust(_width(story)) if named else cell for cell in cells)
            yield f"  {_vertex(story, vertex):>3}   {row}".rstrip()
