"""Reader of torchelastic's error files (`TORCHELASTIC_ERROR_FILE`): the exception that ended one worker."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ringside.decoding import UNDECODABLE, converted, plain_count
from ringside.doctor.files.source import Progress, Source
from ringside.doctor.findings import Findings, Note, verdict_of_files
from ringside.text import first_line, rank_list

KIND = "torchelastic error file"
MOST_BYTES = 16 << 20
_HEAD = re.compile(rb'\A\s*\{\s*"message"\s*:')
_RANK = re.compile(r"(?:^|/)(?:rank[_-]?)?(\d+)/error\.json$|rank[_-]?(\d+)")
_LOST_PEER = re.compile(
    r"Connection (?:closed|reset)|[Tt]imed out|Timeout|NCCL error|remote process exited|PeerLostError|DeadlineError"
    r"|SignalException|ChildFailedError"
)


class _File(msgspec.Struct):
    message: dict[str, Any] | str


def matches(source: Source) -> bool:
    """Return whether a source is the JSON that torchelastic's error handler writes."""
    return bool(_HEAD.match(source.head)) and (b"extraInfo" in source.head or b"errorCode" in source.head)


def read(sources: Sequence[Source], progress: Progress) -> Findings:
    """Name the worker that failed first; errors that only report a lost peer are victims."""
    errors: list[tuple[str, dict[str, Any]]] = []
    notes = []
    for source in sources:
        try:
            message = msgspec.json.decode(source.read(MOST_BYTES), type=_File).message
        except UNDECODABLE as error:
            notes.append(Note(file=source.name, kind=KIND, text=f"breaks off or is damaged ({error})", used=False))
            continue
        # Nothing below is certain to be there, or of its type: any program may have written the file.
        inner = message if isinstance(message, dict) else {"message": message}
        extra = inner.get("extraInfo")
        extra = extra if isinstance(extra, dict) else {}
        match = _RANK.search(source.name)
        rank = plain_count(extra.get("rank", match and next(group for group in match.groups() if group)))
        found = {
            "message": str(inner.get("message", "")),
            "stack": str(extra.get("py_callstack", "")),
            "time": converted(extra.get("timestamp"), float, 0.0),
            "rank": rank if rank >= 0 else None,
        }
        errors.append((source.name, found))
    # Who raised first, but those last that only lost a peer: they are victims, whatever their clocks show.
    errors.sort(key=lambda item: (bool(_LOST_PEER.search(item[1]["message"])), item[1]["time"]))
    notes += [Note(file=name, kind=KIND, text=first_line(error["message"])) for name, error in errors]
    if not errors:
        return Findings(notes=notes)
    file, first = errors[0]
    others = {error["rank"] for _, error in errors[1:] if error["rank"] is not None} - {first["rank"]}
    last = next((line.strip() for line in reversed(first["stack"].splitlines()) if line.strip()), "")
    who = f"rank {first['rank']}" if first["rank"] is not None else "a worker"
    verdict = verdict_of_files(
        kind="dead_rank",
        ranks=[first["rank"]] if first["rank"] is not None else [],
        cause=f"{who} raised first: {first_line(first['message'])}",
        evidence={
            "file": file,
            "message": first_line(first["message"]),
            **({"stack_ends": first_line(last)} if last else {}),
            **({"time_unix": first["time"]} if first["time"] else {}),
            **({"victims": rank_list(others)} if others else {}),
        },
        advice="Read the whole stack in this file; the others' errors came after it and mostly because of it.",
    )
    return Findings(verdicts=[verdict], notes=notes)
