"""What the doctor found: verdicts first, then answers with numbers, then what could not be judged and why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from ringside.monitor.job.questions import QUESTIONS as QUESTIONS
from ringside.monitor.job.questions import Number as Number
from ringside.monitor.job.questions import Question as Question
from ringside.monitor.job.questions import to_plain
from ringside.monitor.run.directory import finite
from ringside.monitor.verdict import Verdict
from ringside.text import name_ranks

SCHEMA = 1

UNKNOWN_STEP = -1


def verdict_of_files(kind: str, ranks: Iterable[int], cause: str, evidence: dict[str, Number], advice: str) -> Verdict:
    """Return a verdict on a run whose files count no steps; arguments as for `Verdict`, ranks in any order."""
    return Verdict(
        kind=kind,
        ranks=sorted(set(ranks)),
        since_step=UNKNOWN_STEP,
        detected_step=UNKNOWN_STEP,
        excess_ratio=0.0,
        cause=cause,
        evidence=evidence,
        advice=advice,
    )


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """One line about one file.

    Args:
        file: Its name; `archive.tar.gz!member` inside an archive.
        kind: What it is, such as `flight-recorder dump`; empty where nobody knows.
        text: What was taken from it, or why it was not used.
        used: Whether anything of it was.
    """

    file: str
    kind: str = ""
    text: str = ""
    used: bool = True


class Unjudged(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something the files cannot tell.

    Args:
        what: What it is.
        why: Why they cannot.
        side: Whether nobody's health depends on it: a figure or a name that is missing beside what was judged.
    """

    what: str
    why: str
    side: bool = False


class TimeSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a lane.

    Args:
        start_s: Seconds from the lanes' common origin.
        end_s: Its end.
        kind: `compute`, `communication`, `hidden`, `wait`, `idle` or `missing`.
        name: What it was, for the reader who points at it.
    """

    start_s: float
    end_s: float
    kind: str
    name: str = ""


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank did over time. All lanes of one `title` share their origin and are drawn together."""

    title: str
    rank: int
    spans: list[TimeSpan]
    note: str = ""


class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """A table for the page and for `--json`; rows of text and numbers, `culprits` are the rows to mark."""

    title: str
    columns: list[str]
    rows: list[list[Number | None]]
    culprits: list[int] = []
    note: str = ""


class EvidenceHop(msgspec.Struct, frozen=True, kw_only=True):
    """One hop of a drawn ring or tree: ranks of the communicator, how it travels, and what is wrong with it."""

    src: int
    dst: int
    via: str = ""
    between_hosts: bool = False
    wrong: str = ""


class Rings(msgspec.Struct, frozen=True, kw_only=True):
    """One communicator's channels, drawn: every channel a list of hops.

    Args:
        title: What it is the drawing of.
        nranks: Ranks of the communicator.
        hosts: Host of each rank, in rank order; empty where it is not known.
        rings: Hops of each channel's ring, by channel.
        trees: Hops of each channel's tree (child to parent), by channel.
        note: What to know about it.
    """

    title: str
    nranks: int
    hosts: list[str] = []
    rings: dict[int, list[EvidenceHop]] = {}
    trees: dict[int, list[EvidenceHop]] = {}
    note: str = ""


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What one reader, or all of them, found.

    Args:
        verdicts: In the monitor's form; only culprits in `ranks`, victims in the evidence.
        questions: Answers, by their names in `QUESTIONS`.
        unjudged: What could not be judged and why.
        notes: One line per file.
        what_if: `slowdown`, `worst_worker_share`, `last_stage_share`, `cost_rank_hours` of a replayed timeline.
        more_what_if: The same of further jobs, where several were given.
        lanes: What ranks did over time.
        standings: Where ranks stand in the groups that verdicts are about: tables that the terminal shows as well.
        sheets: Further tables.
        rings: Drawings of communicators.
        facts: Further figures by name, shown as they are.
    """

    verdicts: list[Verdict] = []
    questions: dict[str, Question] = {}
    unjudged: list[Unjudged] = []
    notes: list[Note] = []
    what_if: dict[str, Any] | None = None
    more_what_if: list[dict[str, Any]] = []
    lanes: list[Lane] = []
    standings: list[Sheet] = []
    sheets: list[Sheet] = []
    rings: list[Rings] = []
    facts: dict[str, Any] = {}


def is_enough_to_judge(findings: Findings) -> bool:
    """Return whether an absence of verdicts means health: nothing that anybody's health depends on is unjudged."""
    return all(line.side for line in findings.unjudged)


def merge(findings: Iterable[Findings]) -> Findings:
    """Return several findings as one: lists one after the other, a question as answered by the first that could."""
    parts = list(findings)
    replayed = [found for part in parts for found in (part.what_if, *part.more_what_if) if found is not None]
    # Of several jobs the replay with the most steps and workers comes first.
    replayed.sort(key=lambda what_if: float(what_if.get("steps", 0) * what_if.get("workers", 1)), reverse=True)
    answers: dict[str, Question] = {}
    for part in parts:
        for name, answer in part.questions.items():
            if name not in answers or (answers[name].answer is None and answer.answer is not None):
                answers[name] = answer
    joined = {
        name: [item for part in parts for item in getattr(part, name)]
        for name in ("verdicts", "unjudged", "notes", "lanes", "standings", "sheets", "rings")
    }
    return Findings(
        **{**joined, "verdicts": _once(joined["verdicts"]), "unjudged": _once(joined["unjudged"])},
        questions=answers,
        what_if=replayed[0] if replayed else None,
        more_what_if=replayed[1:],
        facts={key: value for part in parts for key, value in part.facts.items()},
    )


def as_json(findings: Findings) -> dict[str, Any]:
    """Return what `ringside doctor --json` prints; no NaN and no infinity (null instead)."""
    plain = msgspec.to_builtins(findings)
    content: dict[str, Any] = finite(
        {
            "schema": SCHEMA,
            "verdicts": plain["verdicts"],
            "questions": to_plain(findings.questions),
            "unjudged": [{"what": line.what, "why": line.why} for line in findings.unjudged],
            "files": plain["notes"],
            **({"what_if": plain["what_if"]} if plain["what_if"] is not None else {}),
            **({"more_what_if": plain["more_what_if"]} if plain["more_what_if"] else {}),
            "facts": plain["facts"],
            "tables": [*plain["standings"], *plain["sheets"]],
            "rings": plain["rings"],
        }
    )
    return content


def _once(items: list[Any]) -> list[Any]:
    """The same items without repetitions, in their order (they hold lists and have no hash)."""
    kept: dict[bytes, Any] = {}
    for item in items:
        kept.setdefault(msgspec.json.encode(item), item)
    return list(kept.values())


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
