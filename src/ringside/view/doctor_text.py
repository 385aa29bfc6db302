"""What the doctor found in all, which files it read and where ranks stand, as lines of a terminal."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from ringside.doctor.findings import Findings, Sheet, is_enough_to_judge
from ringside.text import counted, figure, name_ranks, rank_list

MOST_STANDING_LINES = 16


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
    return [f"{sheet.title}:", *lines, *([f"… and {counted(left_out, 'more row')} in --json"] if left_out > 0 else [])]
