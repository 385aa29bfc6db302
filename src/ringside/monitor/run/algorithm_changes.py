"""What a run notes when gradients go another way between hosts: read from its events, and put in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ringside.decoding import UNDECODABLE

NOTES_KEPT = 32


class ChangedLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link that was slow when the way was decided anew.

    Args:
        ranks: The first rank of its sender's host and of its receiver's; one alone: every link of that host is slow.
        hosts: The names of these hosts.
        bytes_per_s: Its rate.
        usual_bytes_per_s: The rate of the others.
    """

    ranks: list[int]
    hosts: list[str] = []
    bytes_per_s: float = 0.0
    usual_bytes_per_s: float = 0.0


class Revised(msgspec.Struct, frozen=True, kw_only=True):
    """An event of kind `revised`.

    Args:
        step: The training step in which it was decided.
        size_bytes: Of the all-reduces that took longer than they should.
        before, after: How they went before and go from now on.
        others_changed: Whether only other sizes go another way.
        reason: Why links and choices were timed again.
        links: The slow ones, slowest first.
    """

    step: int
    size_bytes: int
    before: str
    after: str
    others_changed: bool = False
    reason: str = ""
    links: list[ChangedLink] = []

    @property
    def telling(self) -> bool:
        """Whether it says anything: another way, or a slow link."""
        return self.before != self.after or self.others_changed or bool(self.links)

    @property
    def words(self) -> str:
        """What happened in one or two sentences."""
        what = f"{self.size_bytes / 1e6:.2g} MB"
        if self.before != self.after:
            way = f"all-reduces of {what} go by {self.after} instead of {self.before}"
        else:
            way = f"all-reduces of {what} still go by {self.after}"
        why = _of(self.links[0]) if self.links else self.reason
        return f"From step {self.step} on {way}{': ' if why else ''}{why}."


def read_revised(event: Mapping[str, Any]) -> Revised | None:
    """Return what an event of that kind says; None where it is another, damaged, or says nothing."""
    if event.get("kind") != "revised":
        return None
    try:
        revised = msgspec.convert(event, Revised)
    except UNDECODABLE:
        return None
    whole = revised.step >= 0 and revised.size_bytes >= 0 and all(0 < len(link.ranks) <= 2 for link in revised.links)
    return revised if whole and revised.telling else None


def revisions(events: Iterable[Mapping[str, Any]]) -> list[Revised]:
    """Return the newest revisions among events, oldest first."""
    found = [revised for event in events if (revised := read_revised(event)) is not None]
    return found[-NOTES_KEPT:]


def notes(summary: Mapping[str, Any]) -> list[str]:
    """Return the words of a summary's revisions."""
    told = summary.get("revisions") or []
    return [str(one["words"]) for one in told if isinstance(one, dict) and "words" in one]


def _of(link: ChangedLink) -> str:
    ends = [f"rank {rank}" for rank in link.ranks]
    if len(link.hosts) == len(ends):
        ends = [f"{end} ({host})" for end, host in zip(ends, link.hosts, strict=True)]
    who = f"the link from {ends[0]} to {ends[1]}" if len(ends) > 1 else f"every link of the host of {ends[0]}"
    return f"{who} carries {_rate(link.bytes_per_s)}, the others {_rate(link.usual_bytes_per_s)}"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.3g} MB/s"


__all__ = ["NOTES_KEPT", "ChangedLink", "Revised", "notes", "read_revised", "revisions"]
