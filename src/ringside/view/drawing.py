"""The picture of a schedule: who sends which chunk to whom in every round, and what every chunk already contains.

`schedule_svg` is one round as a figure for a report; `schedule_html` is a page that steps and plays through all of
them. Both only read the schedule; the page's script swaps in what was drawn here and computes nothing.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ringside.errors import UsageError
from ringside.schedule import Audit, Round, Schedule, contributions, verify
from ringside.view.drawing_layout import Layout, on_curve, rank_colour
from ringside.view.drawing_words import counted, final_caption, messages_in_words, round_caption

MOST_RANKS = 64

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Frame:
    """What is shown at once: a round's messages over what every chunk contains when it starts.

    Args:
        schedule: The schedule.
        round: The round, or `schedule.rounds` for the end.
        step: The round's transfers; none at the end.
        held: int64 [ranks, chunks, ranks], as `ringside.schedule.contributions` gives it.
    """

    schedule: Schedule
    round: int
    step: Round
    held: Counts

    @cached_property
    def complete(self) -> int:
        """How many of the ranks x chunks cells contain every contribution once."""
        return int((self.held == 1).all(axis=2).sum())

    @property
    def name(self) -> str:
        """The frame's name, as in the page's counter."""
        return "Done" if self.round == self.schedule.rounds else f"Round {self.round}"


def frames(schedule: Schedule) -> list[Frame]:
    """Return the frames of a schedule: one per round, and the end.

    Raises:
        UsageError: It has more ranks or chunks than a picture can show.
    """
    refuse_crowds(schedule)
    steps = [*(schedule.round(k) for k in range(schedule.rounds)), Round.of([])]
    held = contributions(schedule)
    return [Frame(schedule, k, step, counts) for k, (step, counts) in enumerate(zip(steps, held, strict=True))]


def refuse_crowds(schedule: Schedule) -> None:
    """Raise `UsageError` if the schedule is too large for a picture."""
    if max(schedule.ranks, schedule.chunks) > MOST_RANKS:
        raise UsageError(
            f"a picture has room for {MOST_RANKS} ranks and chunks, not {schedule.ranks} ranks with {schedule.chunks} "
            f"chunks; `ringside verify {schedule.name} --ranks {schedule.ranks}` audits it"
        )


def schedule_svg(schedule: Schedule, round: int) -> str:
    """Return one round of a schedule as a self-contained SVG figure.

    Args:
        schedule: A well-formed schedule of at most 64 ranks and chunks.
        round: The round to show, or `schedule.rounds` for the end.

    Raises:
        UsageError: The schedule is too large for a picture, or it has no such round.
    """
    if not 0 <= round <= schedule.rounds:
        raise UsageError(f"{schedule.name} of {schedule.ranks} ranks has rounds 0 to {schedule.rounds}, not {round}")
    return _svg(frames(schedule)[round], Layout(schedule.ranks, schedule.chunks))


def caption(frame: Frame, after: Frame | None) -> str:
    """Say in words what a frame shows; `after` is the frame that follows, None at the end."""
    if after is None:
        return final_caption(frame.schedule, frame.complete)
    return round_caption(frame.schedule, frame.round, frame.step, after.complete)


def _svg(frame: Frame, layout: Layout) -> str:
    schedule = frame.schedule
    style = _asset("drawing_svg.css")
    view = " ".join(_number(value) for value in layout.box)
    label = f"{schedule.name} on {counted(schedule.ranks, 'rank')}: {frame.name.lower()}"
    ranks = "".join(_rank(frame, layout, rank) for rank in range(schedule.ranks))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ringside-drawing" viewBox="{view}" role="img" '
        f'aria-label="{escape(label)}"><style>{style}</style>'
        f'<g class="arrows">{_arrows(frame, layout)}</g><g class="ranks">{ranks}</g></svg>'
    )


def _rank(frame: Frame, layout: Layout, rank: int) -> str:
    x, y = layout.disc_at(rank)
    cells = "".join(_cell(frame, layout, rank, chunk) for chunk in range(layout.chunks))
    return (
        f'<g class="rank" data-rank="{rank}"><circle class="disc" cx="{_number(x)}" cy="{_number(y)}" '
        f'r="{_number(layout.disc)}" fill="{rank_colour(rank, layout.ranks)}"><title>rank {rank}</title></circle>'
        f'<text class="name{"" if layout.strips else " small"}" x="{_number(x)}" y="{_number(y)}">{rank}</text>'
        f"{cells}</g>"
    )


def _cell(frame: Frame, layout: Layout, rank: int, chunk: int) -> str:
    x, y = layout.cell_at(rank, chunk)
    counts = frame.held[rank, chunk]
    size = _number(layout.cell)
    parts = _strips(layout, counts) if layout.strips else _level(layout, counts)
    label = f'<text class="chunk" x="{_number(layout.cell / 2)}" y="-4">c{chunk}</text>' if layout.strips else ""
    return (
        f'<g class="cell{_state(counts)}" transform="translate({_number(x)} {_number(y)})">'
        f"<title>{_content(rank, chunk, counts)}</title>"
        f'<rect class="track" width="{size}" height="{size}" rx="2"/>{parts}'
        f'<rect class="edge" width="{size}" height="{size}" rx="2"/>{label}</g>'
    )


def _strips(layout: Layout, counts: Counts) -> str:
    width = layout.cell / layout.ranks
    return "".join(
        f'<rect class="part{" on" if count else ""}" x="{_number(rank * width)}" width="{_number(width)}" '
        f'height="{_number(layout.cell)}" fill="{rank_colour(rank, layout.ranks)}"/>'
        for rank, count in enumerate(counts.tolist())
    )


def _level(layout: Layout, counts: Counts) -> str:
    share = np.count_nonzero(counts) / layout.ranks
    size = _number(layout.cell)
    return f'<rect class="level" width="{size}" height="{size}" style="transform:scaleY({share:.3f})"/>'


def _state(counts: Counts) -> str:
    return " double" if (counts > 1).any() else " done" if (counts == 1).all() else ""


def _content(rank: int, chunk: int, counts: Counts) -> str:
    ranks = np.flatnonzero(counts).tolist()
    what = "the sum of all ranks" if len(ranks) == len(counts) > 1 else " + ".join(f"x{r}" for r in ranks)
    return f"rank {rank}, chunk {chunk}: {what}"


def _crowded(frame: Frame) -> bool:
    """Whether a round has too many messages to put a label on each."""
    return len(frame.step) > 2 * frame.schedule.ranks and frame.schedule.ranks > 3


def _arrows(frame: Frame, layout: Layout) -> str:
    together: dict[tuple[int, int, bool], list[int]] = defaultdict(list)
    for src, dst, chunk, reducing in frame.step:
        together[src, dst, reducing].append(chunk)
    pairs = {(src, dst) for src, dst, _ in together}
    crowded = _crowded(frame)
    return "".join(
        _crowded_arrow(layout, src, dst, reducing, chunks)
        if crowded
        else _arrow(frame, layout, src, dst, reducing, chunks, 0.36 if (dst, src) in pairs else 0.5)
        for (src, dst, reducing), chunks in together.items()
    )


def _arrow(
    frame: Frame, layout: Layout, src: int, dst: int, reducing: bool, chunks: list[int], at: float
) -> str:  # fmt: skip
    label = ""
    if layout.labels:
        bars = "" if len(chunks) > 1 or layout.ranks > 8 else _carried(layout, frame.held[src, chunks[0]])
        label = _pill(reducing, chunks, bars)
    return _drawn_arrow(layout, src, dst, reducing, at, label)


def _crowded_arrow(layout: Layout, src: int, dst: int, reducing: bool, chunks: list[int]) -> str:
    """One of too many arrows to label: thin, in its sender's colour; the label shows when pointed at."""
    dot = f'<circle class="dot" r="3" fill="{rank_colour(src, layout.ranks)}"/>' if layout.labels else ""
    label = f'{dot}<g class="late">{_pill(reducing, chunks, "")}</g>' if layout.labels else ""
    return _drawn_arrow(layout, src, dst, reducing, 0.3, label, rank_colour(src, layout.ranks))


def _drawn_arrow(
    layout: Layout, src: int, dst: int, reducing: bool, at: float, label: str, colour: str = ""
) -> str:  # fmt: skip
    curve = start, control, end = layout.curve(src, dst)
    kind = ("add" if reducing else "copy") + (" thin" if colour else "")
    style = f' style="--add:{colour};--copy:{colour}"' if colour else ""
    pill = f'<g class="pill" transform="translate({_point(on_curve(curve, at))})">{label}</g>' if label else ""
    return (
        f'<g class="arrow {kind}" data-src="{src}" data-dst="{dst}"{style}>'
        f'<path class="line" d="M{_point(start)}Q{_point(control)} {_point(end)}"/>'
        f"{_head(control, end, layout.disc / 19 * (0.7 if colour else 1))}{pill}</g>"
    )


def _head(control: tuple[float, float], end: tuple[float, float], scale: float) -> str:
    along = np.array(end) - np.array(control)
    along /= np.hypot(*along)
    across = np.array([-along[1], along[0]])
    back = np.array(end) - 9 * scale * along
    corners = (np.array(end) + 2 * along, back + 4.6 * scale * across, back - 4.6 * scale * across)
    return '<path class="head" d="M' + "L".join(_point((x, y)) for x, y in corners) + 'Z"/>'


def _pill(reducing: bool, chunks: Sequence[int], bars: str) -> str:
    what = " ".join(f"c{chunk}" for chunk in chunks) if len(chunks) <= 3 else f"{len(chunks)} chunks"
    text = f"{'+' if reducing else '='} {what}"
    width, height = 7 * len(text) + 12, 26 if bars else 19
    return (
        f'<rect x="{_number(-width / 2)}" y="{_number(-height / 2)}" width="{_number(width)}" '
        f'height="{_number(height)}" rx="{_number(min(height / 2, 8))}"/>'
        f'<text y="{-3 if bars else 0}">{text}</text>{bars}'
    )


def _carried(layout: Layout, counts: Counts) -> str:
    """Draw which contributions a message carries, under its name."""
    width = 26 / layout.ranks
    return "".join(
        f'<rect class="{"bar" if count else "bar off"}" x="{_number(rank * width - 13)}" y="6" '
        f'width="{_number(width - 0.6)}" height="4"'
        + (f' style="fill:{rank_colour(rank, layout.ranks)}"/>' if count else "/>")
        for rank, count in enumerate(counts.tolist())
    )


def schedule_html(schedule: Schedule) -> str:
    """Return a page that steps and plays through a schedule; one file that needs no other.

    Raises:
        UsageError: The schedule is too large for a picture.
    """
    shown = frames(schedule)
    layout = Layout(schedule.ranks, schedule.chunks)
    captions = [caption(frame, after) for frame, after in zip(shown, [*shown[1:], None], strict=True)]
    fields = {
        "title": escape(f"{schedule.name}, {counted(schedule.ranks, 'rank')}"),
        "facts": _facts(verify(schedule)),
        "css": _asset("drawing_page.css"),
        "svg": _svg(shown[0], layout),
        "caption": escape(captions[0]),
        "name": shown[0].name,
        "span": f"of 0 to {schedule.rounds - 1}" if schedule.rounds else "",
        "last": str(schedule.rounds),
        "legend": _legend(layout, any(_crowded(frame) for frame in shown)),
        "words": "".join(_round_in_words(frame) for frame in shown[:-1]) or "<li>Nothing is sent.</li>",
        "data": _data(shown, layout, captions),
        "js": _asset("drawing.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda hole: fields[hole[1]], _asset("drawing.html"))


def _facts(audit: Audit) -> str:
    facts = [
        counted(audit.chunks, "chunk"),
        counted(audit.rounds, "round"),
        f"each rank sends up to {float(audit.max_bytes_sent):.4g} × the tensor",
        counted(audit.max_ports, "port"),
        "proved right" if audit.ok else f"WRONG: {audit.problems[0].message}",
    ]
    return " · ".join(escape(fact) for fact in facts)


def _legend(layout: Layout, crowded: bool) -> str:
    hint = "</span><span>point at a rank to see its messages alone" if crowded else ""
    if not layout.strips:
        return f"a cell fills up with the share of ranks whose contribution it contains{hint}"
    swatches = "".join(f'<i style="background:{rank_colour(rank, layout.ranks)}"></i>' for rank in range(layout.ranks))
    return f'a cell has one strip per rank<span class="swatches">{swatches}</span>whose contribution it contains{hint}'


def _round_in_words(frame: Frame) -> str:
    return f'<li value="{frame.round}" id="words-{frame.round}">{escape(messages_in_words(frame.step))}</li>'


def _data(shown: Sequence[Frame], layout: Layout, captions: Sequence[str]) -> str:
    """Return the page's data as JSON: of every frame its arrows, its caption and the cells that changed before it."""
    entries = []
    before = np.full_like(shown[0].held, -1)
    for frame, words in zip(shown, captions, strict=True):
        changed = np.argwhere((frame.held != before).any(axis=2)).tolist()
        entries.append(
            {
                "name": frame.name,
                "caption": words,
                "arrows": _arrows(frame, layout),
                "cells": [_cell_data(rank, chunk, frame.held[rank, chunk]) for rank, chunk in changed],
            }
        )
        before = frame.held
    data = {"ranks": layout.ranks, "chunks": layout.chunks, "frames": entries}
    return json.dumps(data, separators=(",", ":")).replace("</", "<\\/")


def _cell_data(rank: int, chunk: int, counts: Counts) -> list[object]:
    members = "".join("1" if count else "0" for count in counts.tolist())
    return [rank, chunk, members, _state(counts).strip()]


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0").replace("-0", "0") if abs(value) < 1 else f"{value:.1f}".removesuffix(".0")


def _point(point: tuple[float, float]) -> str:
    return f"{_number(point[0])} {_number(point[1])}"


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
