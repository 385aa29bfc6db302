"""A run in the terminal: a live picture that fits 80 × 24, single lines for logs, and the closing words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ringside.monitor.job.questions import QUESTIONS, Question, read_answers
from ringside.monitor.run.algorithm_changes import revision_notes
from ringside.monitor.verdict import Verdict, headline, percent
from ringside.text import clock, ms, sparkline
from ringside.text import short_size as size
from ringside.view.run.live import RankFigures, RunFollower, ShownFinding
from ringside.view.tui.console import SafeConsole
from ringside.view.verdict_text import sentence, sign

RANKS_SHOWN = 10
BAR_CELLS = 36


def open_console(*, stderr: bool = False) -> Console:
    """Return a console on stdout or stderr; where that is no terminal, lines are as long as they are."""
    console = SafeConsole(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = 1000
    return console


def picture(run: RunFollower, title: str, elapsed_s: float, width: int = 80) -> RenderableType:
    """Return the live picture: at most 24 lines, at most `width` columns.

    Args:
        run: What is known of the run.
        title: What is running.
        elapsed_s: For how long, seconds.
        width: Columns there are.
    """
    parts: list[RenderableType] = [_title(run, title, elapsed_s, width), _progress(run, width), Text()]
    if run.step < 0:
        return Group(*parts[:2])
    return Group(*parts, _ranks(run), Text(), _sync(run, width), Text(), *_verdicts(run, width))


def status_line(run: RunFollower, elapsed_s: float) -> str:
    """Return where the run is, for terminals that cannot be drawn on: one line."""
    if run.step < 0:
        return f"{clock(elapsed_s)}  the ranks are starting"
    if run.stage == "comparison":
        return f"{clock(elapsed_s)}  the same training over {peer_name(run)} for comparison: {run.done:.0%}"
    loss = f"  loss {run.losses[-1]:.3f}" if run.losses else ""
    shown = sorted(run.figures(), key=lambda one: -one.own_seconds)[:4]
    own = "  ".join(
        f"rank {one.rank}: own {ms(one.own_seconds)} wait {ms(one.wait_seconds)}"
        for one in sorted(shown, key=lambda one: one.rank)
    )
    return f"{clock(elapsed_s)}  step {run.step + 1}{f'/{run.of}' if run.of else ''}{loss}  {own}"


def verdict_line(finding: ShownFinding) -> str:
    """Return a verdict as one line: who, since when, why, what it cost so far."""
    verdict = finding.verdict
    cause = f": {verdict.cause}" if verdict.cause else ""
    return f"{headline(verdict)} since step {verdict.since_step}{cause} (noticed at step {verdict.detected_step})"


def closing(summary: Mapping[str, Any], verdicts: Sequence[Verdict]) -> RenderableType:
    """Return the last words on a run: verdicts with price and advice first, the table of ranks, the four answers.

    Args:
        summary: The content of `summary.json`.
        verdicts: Its verdicts.
    """
    parts: list[RenderableType] = []
    for verdict in verdicts:
        parts += _told(verdict)
    if not summary["steps"]:
        return Group(*parts, Text("No training step was recorded.", style="bold yellow"))
    if not verdicts:
        parts.append(Text("No rank held the others up.", style="bold green"))
    parts += [Text(f"○ {words}", style="yellow") for words in revision_notes(summary)]
    parts += [Text(), rank_table(summary["ranks"]), Text(summary_line(summary), style="dim")]
    answers = read_answers(summary.get("questions"))
    return Group(*parts, *((Text(), answer_table(answers)) if answers else ()))


def rank_table(ranks: Iterable[Mapping[str, Any]]) -> Table:
    """Return `summary.json`'s ranks as a table, slowest first where there are many."""
    rows = list(ranks)
    if len(rows) > RANKS_SHOWN:
        rows = sorted(rows, key=lambda row: -(row["excess_ratio"] or 0.0))[:RANKS_SHOWN]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("rank", "own", "wait", "own against the others"):
        table.add_column(heading, justify="right")
    for row in rows:
        excess = row["excess_ratio"]
        table.add_row(
            str(row["rank"]),
            ms(row["own_seconds_median"]),
            ms(row["wait_seconds_median"]),
            "" if excess is None else f"{100 * excess:+.1f} %",
        )
    return table


def answer_table(answers: Mapping[str, Question]) -> Table:
    """Return the four questions: yes or no, the question, and why in a line of its own."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, text in QUESTIONS.items():
        if name in answers:
            table.add_row(Text(sign(answers[name]), style="bold"), Text(text))
            table.add_row("", Text(sentence(answers[name].words), style="dim"))
    return table


def summary_line(summary: Mapping[str, Any]) -> str:
    """Return steps, step time, synchronisation and our own cost in one line."""
    sync, step = summary["sync"], summary["step_seconds"]["median"]
    exposed = sync["exposed_seconds_per_step"]
    share = f" ({percent(exposed / step)} of the step)" if step > 0 else ""
    return (
        f"{summary['steps']} steps of {ms(step)}; {size(sync['payload_bytes_per_step'])} of gradients per step over "
        f"{sync['engine']}: blocked {ms(exposed)}{share}; watching cost {ms(summary['overhead']['seconds_per_step'])}"
        f" per step"
    )


def peer_name(run: RunFollower) -> str:
    """Return how the process group's own engine is called in prose."""
    return str(run.comparison.get("peer", "gloo")).capitalize()


def _title(run: RunFollower, title: str, elapsed_s: float, width: int) -> Text:
    left = Text.assemble(("ringside", "bold cyan"), " ", title)
    if run.info:
        left.append(f" · {run.ranks} ranks · gradients over {run.info.engine}", style="dim")
    left.truncate(width - 7)
    left.append(" " * max(width - left.cell_len - 6, 1))
    return left.append(clock(elapsed_s), style="dim")


def _progress(run: RunFollower, width: int) -> Text:
    if run.step < 0:
        return Text("the ranks are starting …", style="dim")
    if run.stage == "comparison":
        share, words = run.done, f"the same training over {peer_name(run)}, for comparison "
    else:
        share = (run.step + 1) / run.of if run.of else 0.0
        words = f"step {run.step + 1}{f' of at most {run.of}' if run.of else ''} "
    text = Text(words)
    loss = f"  loss {run.losses[-1]:.2f} " if run.losses else ""
    sparks = sparkline(list(run.losses), 16)
    cells = min(max(width - text.cell_len - len(loss) - len(sparks), 0), 24)
    full = round(cells * min(share, 1.0))
    text.append("━" * full, style="cyan").append("━" * (cells - full), style="bright_black")
    return text.append(loss).append(sparks, style="magenta")


def _ranks(run: RunFollower) -> Table:
    figures = run.figures()
    shown = figures
    if len(figures) > RANKS_SHOWN:
        slowest = sorted(figures, key=lambda one: -_number(one.own_seconds))[:RANKS_SHOWN]
        shown = sorted(slowest, key=lambda one: one.rank)
    longest = max((_number(one.own_seconds) + _number(one.wait_seconds) for one in shown), default=0.0)
    named = {rank for finding in run.findings if not finding.over for rank in finding.verdict.ranks}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("rank", "own", "wait"):
        table.add_column(heading, justify="right", no_wrap=True)
    legend = Text.assemble(("█", "cyan"), " own ", ("░", "yellow"), " waits for others")
    table.add_column(legend if len(shown) == len(figures) else legend + f" · the slowest of {len(figures)}")
    for one in shown:
        style = "bold red" if one.rank in named else ""
        bar = _bar(one, longest, "red" if one.rank in named else "cyan")
        table.add_row(Text(str(one.rank), style), Text(ms(one.own_seconds), style), ms(one.wait_seconds), bar)
    return table


def _bar(one: RankFigures, longest: float, style: str) -> Text:
    scale = BAR_CELLS / longest if longest > 0 else 0.0
    own = round(_number(one.own_seconds) * scale)
    both = round((_number(one.own_seconds) + _number(one.wait_seconds)) * scale)
    return Text("█" * own, style=style).append("░" * (both - own), style="yellow")


def _sync(run: RunFollower, width: int) -> Text:
    step, exposed = run.middle("step_seconds"), min(_known(one.exposed_seconds for one in run.figures()), default=0.0)
    if not step > 0:
        return Text()
    words = (
        f"a step takes {ms(step)}; {size(run.middle('payload_bytes'))} of gradients block it for {ms(exposed)} "
        f"({percent(exposed / step)})"
    )
    text = Text(words, style="dim")
    text.truncate(width)
    return text


def _verdicts(run: RunFollower, width: int) -> list[RenderableType]:
    if not run.findings:
        return [Text("● all ranks keep up with each other", style="green")]
    parts: list[RenderableType] = []
    for finding in run.findings[-2:]:
        verdict = finding.verdict
        style = "yellow" if finding.over else "bold red"
        parts.append(Text(f"● {headline(verdict)} since step {verdict.since_step}", style=style))
        parts.append(_indented(verdict.cause, width))
        if verdict.kind != "dead_rank":
            cost = f"cost so far: {finding.cost_rank_seconds:.1f} rank-seconds" + (" (over)" if finding.over else "")
            parts.append(_indented(cost, width, "bold"))
    return parts


def _indented(words: str, width: int, style: str = "") -> Text:
    text = Text("  " + words, style=style)
    text.truncate(width, overflow="ellipsis")
    return text


def _told(verdict: Verdict) -> list[RenderableType]:
    rows = [("why", verdict.cause), ("price", _price(verdict)), ("do", verdict.advice)]
    told = Table.grid(padding=(0, 2, 0, 0))
    for heading, words in rows:
        if words:
            told.add_row(Text(f"  {heading}", style="dim"), Text(words))
    return [Text(f"● {headline(verdict)} since step {verdict.since_step}.", style="bold red"), told]


def _price(verdict: Verdict) -> str:
    if verdict.cost_rank_seconds <= 0:
        return ""
    hours = verdict.cost_rank_seconds / 3600
    in_hours = f" ({hours:.2f} rank-hours)" if hours > 0.1 else ""
    return f"{verdict.cost_rank_seconds:.1f} rank-seconds so far{in_hours}; noticed at step {verdict.detected_step}"


def _number(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
