"""Events of a run whose writers are elsewhere: where gradient buckets lie, and when an algorithm changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ringside.decoding import UNDECODABLE
from ringside.text import rate, size


class GradientMemory(msgspec.Struct, frozen=True, kw_only=True):
    """An event of kind `gradient_memory`: the buckets of one model on rank 0, recorded whenever they change.

    Args:
        model: Which model of this process, counted from 0.
        shared_buckets: Buckets that the host's ranks map and reduce where they lie.
        shared_bytes: Their size.
        copied_buckets: Buckets in private memory, which are copied through Ringside's.
        copied_bytes: Their size.
    """

    model: int = 0
    shared_buckets: int = 0
    shared_bytes: int = 0
    copied_buckets: int = 0
    copied_bytes: int = 0


def gradient_memory(events: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return what was shared and what was copied in the end, of all models together; {} where no event says."""
    newest: dict[int, GradientMemory] = {}
    for event in events:
        if event.get("kind") == "gradient_memory":
            try:
                memory = msgspec.convert(event, GradientMemory)
            except (msgspec.ValidationError, ValueError):
                continue
            newest[memory.model] = memory
    names = [name for name in GradientMemory.__struct_fields__ if name != "model"]
    return {name: sum(getattr(memory, name) for memory in newest.values()) for name in names} if newest else {}


# -------------------------------------------------------------------------------------------------
# What a run notes when all-reduces between hosts change their algorithm: read from its events, and described.

NOTES_KEPT = 32


class ChangedLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link that was slow when the algorithm was chosen anew.

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
        before, after: Their algorithm until now and from now on.
        others_changed: Whether only other sizes change their algorithm.
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
    def is_news(self) -> bool:
        """Whether it reports anything: another algorithm, or a slow link."""
        return self.before != self.after or self.others_changed or bool(self.links)

    def describe(self) -> str:
        """Return what happened in one or two sentences."""
        if self.before != self.after:
            change = f"all-reduces of {size(self.size_bytes)} go by {self.after} instead of {self.before}"
        else:
            change = f"all-reduces of {size(self.size_bytes)} still go by {self.after}"
        why = self.reason
        if self.links:
            link = self.links[0]
            ends = [f"rank {rank}" for rank in link.ranks]
            if len(link.hosts) == len(ends):
                ends = [f"{end} ({host})" for end, host in zip(ends, link.hosts, strict=True)]
            # One rank alone stands for its whole host, as `ChangedLink` says.
            which = f"the link from {ends[0]} to {ends[1]}" if len(ends) > 1 else f"every link of the host of {ends[0]}"
            why = f"{which} carries {rate(link.bytes_per_s)}, the others {rate(link.usual_bytes_per_s)}"
        return f"From step {self.step} on {change}{': ' if why else ''}{why}."


def read_revised(event: Mapping[str, Any]) -> Revised | None:
    """Return an event of that kind; None where it is another, damaged, or reports nothing."""
    if event.get("kind") != "revised":
        return None
    try:
        revised = msgspec.convert(event, Revised)
    except UNDECODABLE:
        return None
    whole = revised.step >= 0 and revised.size_bytes >= 0 and all(0 < len(link.ranks) <= 2 for link in revised.links)
    return revised if whole and revised.is_news else None


def revisions(events: Iterable[Mapping[str, Any]]) -> list[Revised]:
    """Return the newest revisions among events, oldest first."""
    found = [revised for event in events if (revised := read_revised(event)) is not None]
    return found[-NOTES_KEPT:]


def revision_notes(summary: Mapping[str, Any]) -> list[str]:
    """Return the sentences of a summary's revisions."""
    changes = summary.get("revisions") or []
    return [str(change["words"]) for change in changes if isinstance(change, dict) and "words" in change]
