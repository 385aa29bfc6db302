"""Reader of what the debug server of torch 2.15 writes of `/c10d_health_check`: whose backends timed out or failed.

It does not say who was waited for, and a rank stays unhealthy once it was: the dumps that `/fr_dump_file` writes tell.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from ringside.decoding import UNDECODABLE
from ringside.doctor.files.source import Progress, Source
from ringside.doctor.findings import Findings, Note, Unjudged
from ringside.text import name_ranks

KIND = "c10d health check"
MOST_BYTES = 16 << 20
_RANK = re.compile(r"^=== Rank (\d{1,7}): .*/c10d_health_check\b.*===$", re.MULTILINE)


class _Health(msgspec.Struct):
    healthy: bool
    unhealthy_backends: list[str] = []


def matches(source: Source) -> bool:
    """Return whether a source holds the answers to a health check, rank by rank."""
    return bool(_RANK.search(source.head.decode("utf-8", "replace")))


def read(sources: Sequence[Source], progress: Progress) -> Findings:
    """Say which ranks are unhealthy, and which did not answer."""
    unhealthy: dict[int, set[str]] = {}
    silent: set[int] = set()
    notes = []
    for source in sources:
        progress.begin(f"reading {source.name}")
        _, *parts = _RANK.split(source.read(MOST_BYTES).decode("utf-8", "replace"))
        for rank, text in zip(map(int, parts[::2]), parts[1::2], strict=True):
            try:
                health = msgspec.json.decode(text.strip().partition("\n")[0], type=_Health)
            except UNDECODABLE:
                silent.add(rank)
                continue
            if not health.healthy:
                unhealthy.setdefault(rank, set()).update(health.unhealthy_backends)
        notes.append(Note(file=source.name, kind=KIND, text=f"of {len(parts) // 2} ranks"))
    unjudged = []
    if unhealthy:
        backends = ", ".join(sorted(set().union(*unhealthy.values()))) or "a backend"
        why = f"{backends} timed out or failed there, and who was waited for is in the dumps: give them (/fr_dump_file)"
        who = f"{name_ranks(sorted(unhealthy))} {'is' if len(unhealthy) == 1 else 'are'}"
        unjudged.append(Unjudged(what=f"why {who} unhealthy", why=why))
    if silent:
        why = "no answer to the health check"
        unjudged.append(Unjudged(what=f"the health of {name_ranks(sorted(silent))}", why=why))
    return Findings(notes=notes, unjudged=unjudged)
