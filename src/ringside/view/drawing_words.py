"""A schedule in words, and as a picture for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ringside.schedule import Round, Schedule, contributions

LISTED = 6
WIDTH = 80
LEVELS = "·░▒▓█"


def counted(count: int, noun: str) -> str:
    """Return `1 rank`, `2 ranks`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def round_caption(schedule: Schedule, k: int, step: Round, complete: int) -> str:
    """Say what happens in a round, and how many chunks are complete after it."""
    if len(step) <= LISTED:
        what = messages_in_words(step)
    else:
        what = f"{counted(len(step), 'message')}: {_shape(schedule, step)}"
    total = schedule.ranks * schedule.chunks
    return f"{what} Then {complete} of {total} chunks are complete."


def final_caption(schedule: Schedule, complete: int) -> str:
    """Say what the end is."""
    total = schedule.ranks * schedule.chunks
    if complete == total:
        return f"After {counted(schedule.rounds, 'round')} every rank holds the complete sum of every chunk."
    return f"After {counted(schedule.rounds, 'round')} only {complete} of {total} chunks are complete."


def messages_in_words(step: Round) -> str:
    """List the messages of a round: `Rank 0 sends c3 to rank 1, which adds it; ...`."""
    parts = [
        f"rank {src} sends c{chunk} to rank {dst}, which {'adds' if reducing else 'keeps'} it"
        for src, dst, chunk, reducing in step
    ]
    if not parts:
        return "Nothing is sent."
    sentence = "; ".join(parts) + "."
    return sentence[0].upper() + sentence[1:]


def _shape(schedule: Schedule, step: Round) -> str:
    """Describe a round by its pattern, without listing every message."""
    sends = np.bincount(step.src, minlength=schedule.ranks)
    receives = np.bincount(step.dst, minlength=schedule.ranks)
    if step.reduce.all():
        use = "adds what it receives"
    elif not step.reduce.any():
        use = "keeps what it receives"
    else:
        use = f"adds ({np.count_nonzero(step.reduce)}) or keeps what it receives"
    if len({*sends.tolist(), *receives.tolist()}) == 1:
        whom = "to its right neighbour" if _to_the_right(schedule, step) else f"and receives {sends[0]}"
        return f"every rank sends {counted(int(sends[0]), 'chunk')} {whom}, and {use}."
    senders, receivers = int(np.count_nonzero(sends)), int(np.count_nonzero(receives))
    return f"{counted(senders, 'rank')} send to {counted(receivers, 'rank')}; a receiver {use}."


def _to_the_right(schedule: Schedule, step: Round) -> bool:
    return bool(((step.src + 1) % schedule.ranks == step.dst).all())


def schedule_text(schedule: Schedule) -> str:
    """Return a schedule for the terminal, 80 columns wide: per round its messages and what every chunk holds."""
    return "\n".join(_lines(schedule)) + "\n"


def _lines(schedule: Schedule) -> Iterator[str]:
    facts = (counted(schedule.ranks, "rank"), counted(schedule.chunks, "chunk"), counted(schedule.rounds, "round"))
    yield f"{schedule.name} · " + " · ".join(facts)
    yield from _wrapped(_key(schedule), "")
    for k, held in enumerate(contributions(schedule)):
        yield ""
        if k < schedule.rounds:
            yield f"round {k}"
            yield from _wrapped(_messages(schedule.round(k)), "  ")
        else:
            yield "done"
        yield from _grid(held)


def _key(schedule: Schedule) -> str:
    cells = "a cell names the ranks whose contributions it contains"
    if not _named(schedule.ranks, schedule.chunks):
        cells = f"a cell shows their share: {LEVELS[0]} one rank's, {LEVELS[-1]} all"
    return f"+ adds, = overwrites; rows are ranks, columns chunks; {cells}, when the round starts"


def _messages(step: Round) -> str:
    parts = [f"{src}→{dst}\u00a0{'+' if reducing else '='}c{chunk}" for src, dst, chunk, reducing in step]
    shown = parts if len(parts) <= 64 else [*parts[:60], f"… and {len(parts) - 60} more"]
    return "  ".join(shown) or "nothing is sent"


def _wrapped(text: str, indent: str) -> list[str]:
    lines = textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False)
    return [line.replace("\u00a0", " ") for line in lines]


def _named(ranks: int, chunks: int) -> bool:
    return ranks <= 10 and chunks * (max(ranks, 3) + 2) <= WIDTH - 8


def _grid(held: NDArray[np.int64]) -> Iterator[str]:
    ranks, chunks, _ = held.shape
    named = _named(ranks, chunks)
    width = max(ranks, 3) + 2 if named else 1
    if named:
        yield " " * 8 + "".join(f"c{chunk}".ljust(width) for chunk in range(chunks)).rstrip()
    for rank in range(ranks):
        cells = (_cell(held[rank, chunk], named).ljust(width) for chunk in range(chunks))
        yield f"  {rank:>3}   " + "".join(cells).rstrip()


def _cell(counts: NDArray[np.int64], named: bool) -> str:
    present = (counts > 0).tolist()
    if named:
        return "".join(str(rank) if there else "·" for rank, there in enumerate(present))
    return LEVELS[0] if sum(present) == 1 < len(present) else LEVELS[-(-4 * sum(present) // len(present))]
