"""The doctor's findings in plain words, for the terminal and the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from ringside.doctor.findings import Findings, Sheet, is_enough_to_judge
from ringside.monitor.verdict import Verdict, headline
from ringside.text import counted, figure, label, name_ranks, percent, rank_list, rank_time
from ringside.view.verdict_text import as_sentence

_MANY = 6
MOST_STANDING_LINES = 16


@dataclass(frozen=True)
class FindingText:
    """One verdict in words: each part a sentence, empty where there is nothing to say."""

    headline: str
    why: str
    price: str
    next: str


def overall_headline(findings: Findings) -> str:
    """Return the first line: what the files show in all; empty where the only verdict's own headline says it."""
    if not any(note.used for note in findings.notes):
        return "Nothing here could be read."
    causes = [verdict for verdict in findings.verdicts if "group" in verdict.evidence]
    if len(causes) > 1:
        named = [
            f"{name_ranks(cause.ranks) or 'culprit unknown'} ({cause.evidence.get('group_name') or 'group'} "
            f"{cause.evidence['group']})"
            for cause in causes
        ]
        return f"{len(causes)} causes: {'; '.join(named)}."
    if findings.verdicts:
        return ""
    if not is_enough_to_judge(findings):
        return "Not enough to judge: nothing wrong was found in what could be judged."
    return "Nothing wrong was found."


def files_line(findings: Findings) -> str:
    """Return in one line how many files of which kind were read, dumps with their ranks, and how many were not."""
    kinds = Counter(note.kind for note in findings.notes if note.used)
    dumps = [fact["ranks"] for name, fact in findings.facts.items() if name.startswith("flight_recorder")]
    read = []
    for kind, count in kinds.items():
        files = counted(count, kind if kind.endswith(("dump", "log", "trace")) else f"{kind} file".strip())
        ranks = f" ({name_ranks(dumps[0])})" if kind == "flight-recorder dump" and len(dumps) == 1 else ""
        read.append(files + ranks)
    ignored = sum(not note.used for note in findings.notes)
    parts = [f"Read: {', '.join(read) or 'nothing'}", f"ignored: {counted(ignored, 'file')}" if ignored else ""]
    return f"{'; '.join(filter(None, parts))} (-v lists them)."


def standing_lines(sheet: Sheet) -> list[str]:
    """Return a table of where ranks stand as lines of text; ranks that stand alike share a line, culprits first."""
    culprits = set(sheet.culprits)
    rows = sorted(enumerate(sheet.rows), key=lambda item: (item[0] not in culprits, str(item[1][1:])))
    cells = [["ranks", *sheet.columns[1:]]]
    for _, alike in groupby(rows, key=lambda item: (item[0] in culprits, item[1][1:])):
        same = [row for _, row in alike]
        ranks = rank_list(int(row[0]) for row in same if row[0] is not None)
        values = zip(sheet.columns[1:], same[0][1:], strict=True)
        cells.append([ranks, *(figure(name, value) for name, value in values)])
    left_out = len(cells) - 1 - MOST_STANDING_LINES
    cells = cells[: MOST_STANDING_LINES + 1]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return [f"{sheet.title}:", *lines, *([f"… and {left_out} more rows in --json"] if left_out > 0 else [])]


def finding_text(verdict: Verdict) -> FindingText:
    """Return a verdict in words; of kinds that the monitor has no sentence for, with one of its own."""
    cost = verdict.cost_rank_seconds
    return FindingText(
        headline=as_sentence(_headline(verdict)),
        why=as_sentence(verdict.cause),
        price=f"{rank_time(cost)} lost." if cost > 0 else "",
        next=as_sentence(verdict.advice),
    )


def _numbered(ranks: object) -> str:
    """A list of ranks as evidence holds it, by name: `rank 3`, `ranks 0-7 and 9`."""
    text = str(ranks)
    head, comma, tail = text.rpartition(", ")
    return f"{'rank' if text.isdigit() else 'ranks'} {head}{' and ' if comma else ''}{tail}"


def _headline(verdict: Verdict) -> str:
    ranks = verdict.ranks
    who = everyone = name_ranks(ranks) or "the job"
    if len(ranks) > _MANY:
        who = f"ranks {', '.join(map(str, ranks[: _MANY - 1]))} and {len(ranks) - _MANY + 1} more"
    plural = len(verdict.ranks) != 1
    if verdict.kind == "hang" and verdict.evidence.get("stopped"):
        return f"{who} stopped: the job hangs"
    if verdict.kind == "hang" and not ranks and verdict.evidence.get("missing_dumps"):
        waiting, dumps = (_numbered(verdict.evidence.get(name, "")) for name in ("victims", "missing_dumps"))
        wait = "waits" if waiting.startswith("rank ") else "wait"
        return (
            f"hung; culprit unknown: {waiting} {wait} in collectives that never completed; the dumps of {dumps} "
            "are missing"
        )
    if verdict.kind == "hang" and not verdict.ranks:
        return "the job hangs"
    if verdict.kind == "mismatch":
        if "collective" in verdict.evidence:
            return f"{who} called something else than the others"
        return (
            f"{who} {'differ' if plural else 'differs'} from the others in {verdict.evidence.get('what', 'something')}"
        )
    if verdict.kind == "broken_ring":
        fault = verdict.evidence.get("what")
        if fault == "crosses hosts":
            return "the ring crosses between hosts more often than it needs to"
        if fault == "sockets":
            return f"{who if verdict.ranks else 'traffic between hosts'} fell back to TCP sockets"
        return f"the ring is broken at {who}"
    if verdict.kind == "dead_rank":
        return f"{who} died" if verdict.ranks else "a rank died"
    per_step = verdict.evidence.get("collectives_per_step")
    if verdict.kind == "small_collectives" and per_step is not None and "small_ratio" not in verdict.evidence:
        return f"{float(per_step):.0f} collectives per step are launched"
    sentence = headline(verdict).replace(everyone, who)
    if plural and not sentence.startswith("the "):
        # The monitor names one rank at a time; several get, need and wait.
        for singular, several in (
            (" gets ", " get "),
            (" needs ", " need "),
            (" waits ", " wait "),
            (" is ", " are "),
            (" its ", " their "),
        ):
            sentence = sentence.replace(singular, several)
    return sentence


def what_if_line(content: Mapping[str, object]) -> str:
    """Return the figures of a replayed timeline in one line: shares as percentages, the rest as it is."""
    known = {key: value for key, value in content.items() if isinstance(value, float | int)}
    said = [f"slowdown {known['slowdown']:.3f}"] if "slowdown" in known else []
    said += [f"{label(key)} {percent(value)}" for key, value in known.items() if key.endswith("_share")]
    said += [f"cost {rank_time(3600 * known['cost_rank_hours'])}"] if "cost_rank_hours" in known else []
    return ", ".join(said)
