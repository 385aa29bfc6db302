"""The words of `ringside top`: its first line, its verdicts, and everything that is known of one rank."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from rich.text import Text

from ringside.monitor.assessment import describe_assessment
from ringside.monitor.groups import describe_place
from ringside.monitor.price import MONEY, PER_RANK_HOUR, known_rate, money
from ringside.monitor.run.directory import finite
from ringside.monitor.run.records import StepRecord
from ringside.monitor.verdict import headline, onset
from ringside.text import duration, figure, percent, signed_percent, title
from ringside.view.mesh_text import blocked_line, chain_line
from ringside.view.run.follower import progress_text
from ringside.view.tui.console import printable
from ringside.view.tui.rank_table import SortOrder, Sparks, arrange_ranks, fit_columns, heading_line, rank_line
from ringside.view.tui.source import Open, Snapshot
from ringside.view.verdict_text import FEWEST_STEPS, OWN_TIME, cost_text

STALE_S = 10.0
"""So long without news is worth a word."""

UNSURE = 0.1
"""An excess above this is no peace, verdict or not."""

PHASES = ("data", "forward", "backward", "optimizer", "own", "wait", "exposed", "wire", "step")
PHASE_WORDS = {"wire": "in flight", "data": "data loading"}

UNPRICED = ("dead_rank", "hang", "mismatch", "diverged", "broken_ring")


def first_line(snapshot: Snapshot, width: int, *, remarks: Sequence[str] = ()) -> Text:
    """Return what is shown, how far it is, and remarks at the right, in `width` cells."""
    right = printable(" · ".join(remarks))
    text = Text.assemble(
        ("ringside top", "bold cyan"),
        " ",
        (printable((snapshot.info.name if snapshot.info else "") or snapshot.where), "bold"),
    )
    stage = progress_text(snapshot.recorded, snapshot.step, snapshot.of)
    if snapshot.info is None:
        stage = "no run yet"
    elif snapshot.reading:
        stage = "reading"
    elif snapshot.step < 0:
        stage = "ended before its first step" if snapshot.stage == "ended" else "the ranks are starting"
    elif snapshot.stage != "training":
        stage = f"{printable(snapshot.stage)} · {stage}"
    text.append(f" · {stage}")
    if snapshot.info is not None:
        text.append(f" · {snapshot.info.world_size} ranks · {printable(snapshot.info.engine)}", style="dim")
    room = max(width - len(right) - 1, 0) if right else width
    text.truncate(room, overflow="ellipsis")
    if right:
        text.append(" " * max(width - text.cell_len - len(right), 1)).append(right, style="bold yellow")
    text.truncate(width)
    return text


def verdict_block(snapshot: Snapshot, width: int, height: int) -> Text:
    """Return the verdicts, those that are open first, in at most `height` lines of `width` cells.

    The first is shown with why, price and what to do, the others with a line each, as far as there is room; below them,
    the newest note.
    """
    if height < 3 or not snapshot.notes:
        return _verdicts(snapshot, width, height)
    return Text("\n").join([_verdicts(snapshot, width, height - 1), *_note(snapshot.notes[-1], width, 1)])


def _verdicts(snapshot: Snapshot, width: int, height: int) -> Text:
    if snapshot.trouble:
        return _join(_paragraph("● ", snapshot.trouble, width, "bold yellow", lines=max(height, 1)), height)
    if snapshot.reading:
        return _join(_paragraph("○ ", snapshot.reading, width, "yellow", lines=max(height, 1)), height)
    if not snapshot.verdicts:
        words, style = _no_verdict(snapshot)
        return _join(_paragraph("● ", words, width, style, lines=max(height, 1)), height)
    first, *others = snapshot.verdicts
    # The first verdict needs four lines at least; further ones have a line each, three at most.
    below = min(len(others), max(height - 4, 0), 3)
    lines = verdict_lines(first, width, lines_each=2 if height - below >= 7 else 1)[: max(height - below, 1)]
    for verdict in others[:below]:
        lines += _paragraph("● ", verdict_headline(verdict), width, _style(verdict), lines=1)
    hidden = len(others) - below
    if hidden > 0 and lines:
        # At the end of the last line, where it leaves something of that.
        note = f"and {hidden} more: v"
        room = width - len(note) - 2
        if room >= 8:
            last = lines[-1].copy()
            last.truncate(room, overflow="ellipsis")
            lines[-1] = last.append("  " + note, style="not bold dim")
    return _join(lines, height)


def _no_verdict(snapshot: Snapshot) -> tuple[str, str]:
    if snapshot.calm is not None:
        return f"{snapshot.calm.headline} {snapshot.calm.text}", "green" if snapshot.calm.sure else "yellow"
    known = [rank.excess_ratio for rank in snapshot.ranks if math.isfinite(rank.excess_ratio)]
    if snapshot.info is None or snapshot.step < 0:
        return f"waiting for the first step of {printable(snapshot.where)}", "dim"
    if snapshot.recorded < FEWEST_STEPS:
        return f"too few steps for a verdict: it takes {FEWEST_STEPS}", "dim"
    if len(known) < 2:
        return "there is nobody to wait for: one rank is all there is", "green"
    if snapshot.undecided.startswith("rank "):  # suspected
        return f"no verdict so far; {snapshot.undecided}", "yellow"
    found = snapshot.assessment
    if max(known) > UNSURE:
        return f"no verdict so far; the slowest takes {percent(max(known))} longer than the others", "yellow"
    slowest = f"the slowest takes {percent(max(known))} longer than the others"
    if found.state == "undecided":
        return f"no verdict so far; {slowest}, in too few or too unsteady steps to be sure", "dim"
    return f"no straggler; {slowest}. {describe_assessment(found)}", "green"


def verdict_lines(verdict: Open, width: int, lines_each: int = 1000) -> list[Text]:
    """Return one verdict: headline, why, price, what to do, through whom others wait; each in at most `lines_each`
    lines."""
    lines = _paragraph("● ", verdict_headline(verdict), width, _style(verdict), lines=lines_each)
    advice = "" if verdict.over else verdict.verdict.advice
    parts = (("why", verdict.verdict.cause, ""), ("cost", price_text(verdict), "bold"), ("do", advice, ""))
    for name, text, style in (*parts, ("chain", chain_line(verdict.verdict), "")):
        if text:
            lines += _paragraph(f"  {name:<7}", text, width, style, lines=lines_each)
    return lines


def price_text(verdict: Open) -> str:
    """Return what a verdict cost, in words; nothing for kinds that have no price or where none could be measured."""
    cost = verdict.cost_rank_seconds
    if verdict.verdict.kind in UNPRICED or not (math.isfinite(cost) and cost > 0):
        return ""
    return f"{cost_text(cost)} lost, summed over ranks"


def verdict_headline(verdict: Open) -> str:
    """Return who and since when, one sentence; whether it is over."""
    who = verdict.words or headline(verdict.verdict)
    return f"{who} {onset(verdict.verdict)}{' (resolved)' if verdict.over else ''}"


def _style(verdict: Open) -> str:
    return "yellow" if verdict.over else "bold red"


def all_verdicts(snapshot: Snapshot, width: int) -> Text:
    """Return every verdict in full, and every note."""
    lines: list[Text] = []
    for verdict in snapshot.verdicts:
        lines += [*verdict_lines(verdict, width), *_evidence(verdict, width), Text()]
    lines = lines or [Text("No verdict so far.")]
    return Text("\n").join([*lines, *(line for note in snapshot.notes for line in _note(note, width, 1000))])


def _note(text: str, width: int, lines: int) -> list[Text]:
    return _paragraph("○ ", text, width, "yellow", lines=lines)


def rank_detail(snapshot: Snapshot, rank: int, width: int) -> Text:
    """Return what is known of one rank: its figures, its verdicts with evidence, its phases over steps, its vitals."""
    figures = next((each for each in snapshot.ranks if each.rank == rank), None)
    if figures is None:
        return Text(f"rank {rank} is not in this run any more", style="dim")
    pids = snapshot.info.pids if snapshot.info is not None else []
    who = Text(f"rank {rank}", style="bold cyan")
    place = printable(describe_place(figures.coordinates))
    who.append(f" · {place}" if place else "", style="bold")
    who.append(f" · {printable(figures.host)}" if figures.host else "", style="bold")
    if rank < len(pids):
        who.append(f" · pid {pids[rank]}", style="dim")
    who.append(f" · newest step {figures.step}" if figures.step >= 0 else " · no step yet", style="dim")
    times = (("own", figures.own_seconds), ("wait", figures.wait_seconds), ("wire", figures.wire_seconds))
    medians = "  ".join(f"{name} {duration(value)}" for name, value in times)
    excess = signed_percent(figures.excess_ratio)
    lines = [who, Text(f"{medians}  excess {excess}  (medians, {snapshot.window})")]
    blocked = [(one.dimension, one.ranks[rank]) for one in snapshot.blocked if rank < len(one.ranks)]
    if blocked:
        each = "  ".join(f"{name} {duration(seconds)}" for name, seconds in blocked)
        lines += _paragraph("blocked per step: ", each, width, "", lines=9)
    lines.append(Text())
    for verdict in snapshot.verdicts:
        if rank in verdict.verdict.ranks:
            lines += [*verdict_lines(verdict, width), *_evidence(verdict, width), Text()]
    lines += _phases(snapshot.detail, width)
    lines += _vitals(snapshot.detail, width)
    return Text("\n").join(lines)


def _evidence(verdict: Open, width: int) -> list[Text]:
    facts = " · ".join(f"{title(name)} {figure(name, value)}" for name, value in verdict.verdict.evidence.items())
    return _paragraph("  facts  ", facts, width, "dim", lines=1000) if facts else []


def _phases(records: Sequence[StepRecord], width: int) -> list[Text]:
    if not records:
        return [Text("its phases are not known here", style="dim")]
    cells = min(width - 36, 60) if width >= 40 else 0
    steps = np.array([record.step for record in records], dtype=np.int64)
    heading = f"  {'':<13}{'median':>9}{'newest':>9}  over its last {len(records)} steps"
    lines = [Text(heading, style="dim")]
    for phase in PHASES:
        values = np.array([getattr(record, f"{phase}_seconds") for record in records], dtype=np.float64)
        known = values[np.isfinite(values)]
        if not known.size or (not known.any() and phase not in ("own", "wait")):
            continue
        name = PHASE_WORDS.get(phase, phase)
        middle, newest = duration(float(np.median(known))), duration(float(values[-1]))
        style = "bold" if phase in ("own", "step") else ""
        lines.append(
            Text(f"  {name:<13}{middle:>9}{newest:>9}  ", style).append(Sparks(steps, values[:, None], cells).line(0))
        )
    return lines


def _vitals(records: Sequence[StepRecord], width: int) -> list[Text]:
    # Only some records carry vitals: the newest that does.
    found = next((record for record in reversed(records) if record.vitals is not None), None)
    if found is None or found.vitals is None:
        return []
    known = {
        name: value for name, value in msgspec.structs.asdict(found.vitals).items()
        if value is not None and name not in ("reading_seconds", "gpu_reasons")
    }  # fmt: skip
    period = known.pop("seconds", 0.0)
    words = " · ".join(f"{title(name)} {figure(name, value)}" for name, value in known.items())
    if not words:
        return []
    return [
        Text(),
        *_paragraph("  vitals ", f"{words} (in {duration(period)}, at step {found.step})", width, "", lines=9),
    ]


def _paragraph(lead: str, words: str, width: int, style: str, *, lines: int) -> list[Text]:
    """Wrap words to `width` cells and at most `lines` lines, the following ones below the first."""
    room = max(width - len(lead), 1)
    wrapped = textwrap.wrap(printable(words), room, max_lines=lines, placeholder=" …" if room > 2 else "") or [""]
    hang = lead if lead.strip() == "" else " " * len(lead)
    parts = [Text((lead if not number else hang) + line, style=style) for number, line in enumerate(wrapped)]
    if lead.startswith("  "):
        parts[0].stylize("not bold dim", 0, len(lead))
    for part in parts:
        part.truncate(max(width, 0))
    return parts


def _join(lines: Iterable[Text], height: int) -> Text:
    return Text("\n").join(list(lines)[: max(height, 0)])


# -------------------------------------------------------------------------------------------------
# `ringside top --once`: the run as it is now, as a table or as JSON: for scripts, and for dumb terminals.

SCHEMA = 1


def once_lines(snapshot: Snapshot, order: SortOrder, width: int) -> Iterator[str]:
    """Yield the lines of `--once`: what runs, the verdicts, then one line per rank; no colours, no control characters.

    Args:
        snapshot: The run.
        order: Which ranks, in which order.
        width: Cells of a line at most.
    """
    yield first_line(snapshot, width).plain.rstrip()
    yield from (line.rstrip() for line in verdict_block(snapshot, width, 24).plain.split("\n"))
    columns = fit_columns(snapshot, width)
    yield ""
    if snapshot.blocked:
        yield printable(blocked_line(snapshot.blocked))[:width]
    yield OWN_TIME[:width]
    yield heading_line(columns, order, snapshot.window).rstrip()
    sparks = Sparks(snapshot.steps, snapshot.own_seconds, columns.spark)
    for rank in arrange_ranks(snapshot.ranks, order):
        yield rank_line(rank, columns, sparks.line(rank.rank)).rstrip()


def as_json(snapshot: Snapshot, order: SortOrder) -> dict[str, Any]:
    """Return a run as plain data: what is not known is null, times are seconds."""
    rate = known_rate()
    content: dict[str, Any] = finite({
        "schema": SCHEMA,
        "where": snapshot.where,
        "name": snapshot.info.name if snapshot.info else "",
        "stage": snapshot.stage,
        "step": snapshot.step,
        "of": snapshot.of,
        "trouble": snapshot.trouble,
        "verdicts": [
            {
                **msgspec.to_builtins(shown.verdict),
                "cost_rank_seconds": shown.cost_rank_seconds,
                "over": shown.over,
                **({} if rate is None else {MONEY: money(shown.cost_rank_seconds, rate)}),
            }
            for shown in snapshot.verdicts
        ],
        **({} if rate is None else {PER_RANK_HOUR: rate}),
        "notes": list(snapshot.notes),
        # Where a rank is in the mesh, only where that is known.
        "ranks": [
            {key: value for key, value in dataclasses.asdict(rank).items() if value or key != "coordinates"}
            for rank in arrange_ranks(snapshot.ranks, order)
        ],
        **({"blocked": list(snapshot.blocked)} if snapshot.blocked else {}),
    })  # fmt: skip
    return content
