"""A run in the terminal: a live picture that fits 80 × 24, single lines for logs, and what is printed at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ringside.monitor.job.questions import read_answers
from ringside.monitor.run.records import summary_notes
from ringside.monitor.stats import known_or_0
from ringside.monitor.verdict import Verdict, headline, onset
from ringside.text import clock, counted, duration, percent, size, sparkline
from ringside.view.mesh_text import blocked_line, chain_line, mesh_order, rank_cells, read_blocked
from ringside.view.run.follower import HISTORY_STEPS, RECENT_STEPS, RunFollower, ShownFinding
from ringside.view.tui.console import SafeConsole, WithoutTrailingBlanks
from ringside.view.verdict_text import RANKS_CAPTION, as_sentence, checks, cost_text, describe_calm, slowest_first

RANKS_SHOWN = 10
BAR_CELLS = 36
CELL_STEPS = 4
"""Steps that a cell of a rank's history is the median of."""
HISTORY_WIDTH = 76
"""Columns from which there is room for it."""
LINE_EVERY_S = 5.0


def open_console(*, stderr: bool = False) -> Console:
    """Return a console on stdout or stderr; where that is no terminal, lines are as long as they are."""
    console = SafeConsole(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = 1000
    return console


class LiveDisplay:
    """What happens now, on stderr: a picture that is overwritten on a terminal, a line every few seconds elsewhere.

    Args:
        quiet: Show neither, only what is printed.

    Attributes:
        console: Where to.
        is_drawn: Whether pictures are shown.
    """

    def __init__(self, *, quiet: bool) -> None:
        self.console = open_console(stderr=True)
        self.is_drawn = self.console.is_terminal and not quiet
        self._live = Live(console=self.console, auto_refresh=False, transient=True)
        self._quiet, self._last_s = quiet, -math.inf

    def __enter__(self) -> LiveDisplay:
        if self.is_drawn:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, line: Callable[[], str], picture: Callable[[], RenderableType] | None = None) -> None:
        """Show where things are, by a picture or, where there is none, that line."""
        if self.is_drawn:
            self._live.update(picture() if picture is not None else Text(line()), refresh=True)
        elif not self._quiet and time.monotonic() - self._last_s >= LINE_EVERY_S:
            self.print(line())

    def print(self, line: str) -> None:
        """Print a line that stays."""
        self._last_s = time.monotonic()
        self.console.print(line, soft_wrap=True, markup=False)


def live_picture(run: RunFollower, title: str, elapsed_s: float, width: int = 80) -> RenderableType:
    """Return the live picture: at most 24 lines, at most `width` columns.

    Args:
        run: What is known of the run.
        title: What is running.
        elapsed_s: For how long, seconds.
        width: Columns there are.
    """
    head = Text.assemble(("ringside", "bold cyan"), " ", title)
    if run.info:
        head.append(f" · {run.ranks} ranks · gradients over {run.info.engine}", style="dim")
    head.truncate(width - 7)
    head.append(" " * max(width - head.cell_len - 6, 1)).append(clock(elapsed_s), style="dim")
    if run.step < 0:
        return Group(head, Text("the ranks are starting …", style="dim"))

    # How far it is, the ranks, what a step takes, and how long its gradients block it.
    if run.stage == "comparison":
        share, words = run.done, f"the same training over {peer_name(run)}, for comparison "
    else:
        share = (run.step + 1) / run.of if run.of else 0.0
        words = f"{run.progress()} "
    progress = Text(words)
    loss = f"  loss {run.losses[-1]:.2f} " if run.losses else ""
    sparks = sparkline(list(run.losses), 16)
    cells = min(max(width - progress.cell_len - len(loss) - len(sparks), 0), 24)
    full = round(cells * min(share, 1.0))
    progress.append("━" * full, style="cyan").append("━" * (cells - full), style="bright_black")
    progress.append(loss).append(sparks, style="magenta")
    step = run.median("step_seconds")
    exposed = run.exposed_seconds()
    sync = Text()
    if step > 0:
        gradients = f"{size(run.median('payload_bytes'))} of gradients, exposed {duration(exposed)}"
        medians = f"{duration(step)} (median, last {RECENT_STEPS} steps)"
        sync = Text(f"a step takes {medians}; {gradients} ({percent(exposed / step)})", style="dim")
        sync.truncate(width)
    parts: list[RenderableType] = [head, progress, Text(), _ranks(run, width), Text(), sync, Text()]

    # The newest verdicts.
    if not run.findings:
        parts.append(Text("● no verdict so far"))
        if words := run.undecided.describe():
            line = Text(f"  {words}")
            line.truncate(width, overflow="ellipsis")
            parts.append(line)
    for finding in run.findings[-2:]:
        verdict, style = finding.verdict, "yellow" if finding.over else "bold red"
        parts.append(Text(f"● {headline(verdict)} {onset(verdict)}", style=style))
        lines = [Text(f"  {verdict.cause}")]
        if verdict.kind != "dead_rank":
            resolved = " (resolved)" if finding.over else ""
            lines.append(Text(f"  cost so far: {cost_text(finding.cost_rank_seconds)}{resolved}", style="bold"))
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        parts += lines
    return Group(*parts)


def status_line(run: RunFollower, elapsed_s: float) -> str:
    """Return where the run is, for terminals that cannot be drawn on: one line."""
    if run.step < 0:
        return f"{clock(elapsed_s)}  the ranks are starting"
    if run.stage == "comparison":
        return f"{clock(elapsed_s)}  the same training over {peer_name(run)} for comparison: {percent(run.done)}"
    loss = f"  loss {run.losses[-1]:.3f}" if run.losses else ""
    own, wait = run.rank_medians("own_seconds"), run.rank_medians("wait_seconds")
    shown = sorted(sorted(range(run.ranks), key=lambda rank: -own[rank])[:4])
    times = "  ".join(f"rank {rank}: own {duration(own[rank])} wait {duration(wait[rank])}" for rank in shown)
    return f"{clock(elapsed_s)}  {run.progress()}{loss}  {times}  (medians, last {RECENT_STEPS} steps)"


def verdict_line(finding: ShownFinding) -> str:
    """Return a verdict as one line: who, since when, why, what it cost so far."""
    verdict = finding.verdict
    cause = f": {verdict.cause}" if verdict.cause else ""
    return f"{headline(verdict)} {onset(verdict)}{cause} (detected at step {verdict.detected_step})"


def closing_summary(summary: Mapping[str, Any], verdicts: Sequence[Verdict]) -> RenderableType:
    """Return what is printed when a run has ended: verdicts first, the table of ranks, the checks.

    Args:
        summary: The content of `summary.json`.
        verdicts: Its verdicts.
    """
    parts: list[RenderableType] = []
    for verdict in verdicts:
        parts.append(Text(f"● {headline(verdict)} {onset(verdict)}.", style="bold red"))
        cost = verdict.cost_rank_seconds
        lost = f"{cost_text(cost, summary)} lost, summed over ranks"
        price = f"{lost}; detected at step {verdict.detected_step}" if cost > 0 else ""
        lines = Table.grid(padding=(0, 2, 0, 0))
        for heading, text in (
            ("why", verdict.cause), ("cost", price), ("do", verdict.advice), ("chain", chain_line(verdict))
        ):  # fmt: skip
            if text:
                lines.add_row(Text(f"  {heading}", style="dim"), Text(text))
        parts.append(lines)
    if not summary["steps"]:
        return WithoutTrailingBlanks(Group(*parts, Text("No training step was recorded.", style="bold yellow")))
    if not verdicts:
        calm = describe_calm(summary)
        parts.append(Text(f"{calm.headline} {calm.text}", style="bold green" if calm.sure else "bold yellow"))
    parts += [Text(f"○ {note}", style="yellow") for note in summary_notes(summary)]
    # Steps, step time, synchronisation and our own cost in one line.
    sync, step = summary["sync"], summary["step_seconds"]["median"]
    exposed = sync["exposed_seconds_per_step"]
    share = f" ({percent(exposed / step)} of the step)" if step > 0 else ""
    line = (
        f"Medians, whole run: {counted(summary['steps'], 'step')} of {duration(step)}; "
        f"{size(sync['payload_bytes_per_step'])} of gradients per step over {sync['engine']}: "
        f"exposed {duration(exposed)}{share}; "
        f"monitoring overhead {duration(summary['overhead']['seconds_per_step'])} per step on average"
    )
    parts += [Text(), Text(RANKS_CAPTION, style="dim"), rank_table(summary), Text(line, style="dim")]
    if blocked := read_blocked(summary):
        parts.append(Text(as_sentence(f"{blocked_line(blocked)} (median step, whole run)"), style="dim"))

    found = checks(read_answers(summary.get("questions")), verdicts).values()
    if found:
        table = Table.grid(padding=(0, 1, 0, 0))
        for check in found:
            table.add_row(Text(check.mark, style="bold"), Text(check.heading))
            table.add_row("", Text(check.caption, style="dim"))
        parts += [Text(), table]
    return WithoutTrailingBlanks(Group(*parts))


def rank_table(summary: Mapping[str, Any]) -> Table:
    """Return the ranks of a summary as a table: slowest first where there are many, else as the mesh arranges them."""
    ranks = mesh_order(summary["ranks"])
    if len(ranks) > RANKS_SHOWN:
        ranks = slowest_first(summary)[:RANKS_SHOWN]
    columns, rows = rank_cells(ranks, hosts=False)
    headings = {"own": "own time", "excess": "own vs others' median"}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(headings.get(column, column), justify="left" if column == "place" else "right")
    for row in rows:
        table.add_row(*row)
    return table


def peer_name(run: RunFollower) -> str:
    """Return how the process group's own engine is called in prose."""
    return str(run.comparison.get("peer", "gloo")).capitalize()


def _ranks(run: RunFollower, width: int) -> Table:
    own, wait = run.rank_medians("own_seconds"), run.rank_medians("wait_seconds")
    # Of what is not known there is no bar.
    own_bar, wait_bar = known_or_0(np.array([own, wait])).tolist()
    shown: Sequence[int] = range(run.ranks)
    if run.ranks > RANKS_SHOWN:
        shown = sorted(sorted(shown, key=lambda rank: -own_bar[rank])[:RANKS_SHOWN])
    longest = max((own_bar[rank] + wait_bar[rank] for rank in shown), default=0.0)
    scale = BAR_CELLS / longest if longest > 0 else 0.0
    named = {rank for finding in run.findings if not finding.over for rank in finding.verdict.ranks}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("rank", "own", "wait"):
        table.add_column(heading, justify="right", no_wrap=True)
    legend = Text.assemble(("█", "cyan"), " own ", ("░", "yellow"), " waits for others")
    table.add_column(legend if len(shown) == run.ranks else legend + f" · the slowest of {run.ranks}")
    histories = _histories(run) if len(shown) == run.ranks and width >= HISTORY_WIDTH else {}
    if histories:
        table.add_column(f"last {HISTORY_STEPS} steps")
    for rank in shown:
        style = "bold red" if rank in named else ""
        cells, both = round(own_bar[rank] * scale), round((own_bar[rank] + wait_bar[rank]) * scale)
        bar = Text("█" * cells, style="red" if rank in named else "cyan").append("░" * (both - cells), style="yellow")
        times = Text(duration(own[rank]), style), duration(wait[rank])
        history = [Text(histories[rank], style or "cyan")] if histories else []
        table.add_row(Text(str(rank), style), *times, bar, *history)
    return table


def _histories(run: RunFollower) -> dict[int, str]:
    """Return each rank's own times in the newest steps, drawn on one scale: they part where one becomes slower."""
    cells = len(run.own) // CELL_STEPS
    if not cells:
        return {}
    newest = np.array(run.own)[-cells * CELL_STEPS :]
    medians = np.median(newest.reshape(cells, CELL_STEPS, run.ranks), axis=1).T
    drawn = sparkline(medians.ravel().tolist(), medians.size)
    return {rank: drawn[rank * cells : (rank + 1) * cells] for rank in range(run.ranks)}
