"""A schedule in words: what a round does, and what the end is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringside.schedule import Schedule
from ringside.view.drawing_story import Frame, Message, Story

LISTED = 6


def counted(count: int, noun: str) -> str:
    """Return `1 rank`, `2 ranks`, `2 switches`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{'' if count == 1 else plural}"


def caption(frame: Frame, complete_after: int | None) -> str:
    """Say what a frame shows.

    Args:
        frame: The frame.
        complete_after: How many chunks are complete after its round; None for the end.
    """
    if complete_after is None:
        return _end(frame)
    story, messages = frame.story, frame.messages
    if len(messages) <= LISTED:
        what = messages_in_words(story, messages)
    else:
        moved = sum(int(story.weights[list(m.parts)].sum()) for m in messages)
        carrying = "" if moved == len(messages) else f" with {counted(moved, 'chunk')}"
        what = f"{counted(len(messages), 'message')}{carrying}: {_pattern(story.schedule, messages)}"
    return f"{what} Then {complete_after} of {counted(story.to_complete, 'chunk')} are complete."


def _end(frame: Frame) -> str:
    story, s = frame.story, frame.story.schedule
    after = f"After {counted(s.rounds, 'round')}"
    if frame.complete < story.to_complete:
        return f"{after} only {frame.complete} of {counted(story.to_complete, 'chunk')} are complete."
    if s.collective.name == "barrier":
        return f"{after} every rank knows that all have arrived."
    if str(s.collective) == "all_reduce":
        return f"{after} every rank holds the complete sum of every chunk."
    kind = str(s.collective).replace("_", "-", s.collective.name.count("_"))
    return f"{after} the {kind} is complete: every chunk is where it is wanted."


def vertex_name(schedule: Schedule, vertex: int) -> str:
    """Return `rank 3` or `switch 8`."""
    return f"{'rank' if vertex < schedule.ranks else 'switch'} {vertex}"


def span(chunks: Sequence[int]) -> str:
    """Return chunk numbers, ascending, as `c3` or `c0-2, c7`."""
    runs: list[list[int]] = []
    for chunk in chunks:
        if runs and chunk == runs[-1][-1] + 1:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return ", ".join(f"c{run[0]}" if len(run) == 1 else f"c{run[0]}-{run[-1]}" for run in runs)


def messages_in_words(story: Story, messages: Sequence[Message]) -> str:
    """List the messages of a round: `Rank 0 sends c3 to rank 1, which adds it; ...`."""
    if not messages:
        return "Nothing is sent."
    sentence = "; ".join(_in_words(story, message) for message in messages) + "."
    return sentence[0].upper() + sentence[1:]


def _in_words(story: Story, message: Message) -> str:
    chunks = story.chunks_of(message.parts)
    src, dst = (vertex_name(story.schedule, vertex) for vertex in (message.src, message.dst))
    use = f"{'adds' if message.reducing else 'keeps'} {'it' if len(chunks) == 1 else 'them'}"
    return f"{src} sends {span(chunks)} to {dst}, which {use}"


def _pattern(s: Schedule, messages: Sequence[Message]) -> str:
    """Describe a round by its pattern, without listing every message."""
    sends = np.bincount([m.src for m in messages], minlength=s.vertices)
    receives = np.bincount([m.dst for m in messages], minlength=s.vertices)
    adding = sum(m.reducing for m in messages)
    use = "adds" if adding == len(messages) else "keeps" if not adding else f"adds ({adding}) or keeps"
    if len({*sends.tolist(), *receives.tolist()}) == 1:
        whom = _whom(s, messages, int(sends[0]))
        return f"every rank sends {whom}, and {use} what it receives."
    senders, receivers = (_vertices(s, np.flatnonzero(counts).tolist()) for counts in (sends, receives))
    return (
        f"{senders} {'sends' if np.count_nonzero(sends) == 1 else 'send'} to {receivers}; a receiver {use} what comes."
    )


def _whom(s: Schedule, messages: Sequence[Message], each: int) -> str:
    distances = {(m.dst - m.src) % s.ranks for m in messages}
    if distances == {1}:
        return "to its right neighbour"
    if len(distances) == 1:
        return f"to the rank {distances.pop()} further on"
    if each == s.ranks - 1:
        return "to all others"
    return f"to {counted(each, 'rank')}"


def _vertices(s: Schedule, vertices: Sequence[int]) -> str:
    if len(vertices) == 1:
        return vertex_name(s, vertices[0])
    return counted(
        len(vertices), "rank" if max(vertices) < s.ranks else "switch" if min(vertices) >= s.ranks else "node"
    )
