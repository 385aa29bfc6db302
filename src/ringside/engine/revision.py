"""What was decided anew during a run, and why: a value, and its words for the log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ringside.engine.links import SlowLink
from ringside.engine.probing import Probe


@dataclass(frozen=True)
class Revision:
    """What a selector decided when all-reduces took longer than they should.

    Args:
        size_bytes: Of the all-reduces that asked for it.
        before, after: How they were carried out before and are from now on; equal if that stays.
        others_changed: Whether other sizes go another way.
        reason: Why links and choices were timed again, in words.
        slow: The links that are slow now, slowest first, by numbers of hosts.
        found: What became of the links, in words.
        seconds: What timing and deciding took.
    """

    size_bytes: int
    before: str
    after: str
    others_changed: bool
    reason: str
    slow: tuple[SlowLink, ...]
    found: str
    seconds: float

    @property
    def words(self) -> str:
        """All of it in one line."""
        stays = f"{self.before} stays" + (", other sizes change" if self.others_changed else "")
        turn = stays if self.before == self.after else f"{self.before} -> {self.after}"
        return f"{self.reason}; {self.found}; {turn}"


def difference(before: Probe | None, now: Probe, names: Sequence[str]) -> str:
    """Say what became of the links, in a few words.

    Args:
        before: What was known of them.
        now: What is.
        names: Of the hosts.
    """
    slow = now.slow
    if slow:
        link = slow[0]
        where = names[link.src] if link.dst < 0 else f"{names[link.src]} > {names[link.dst]}"
        return f"{where} carries {link.bytes_per_s / 1e6:.0f} MB/s, others {link.usual / 1e6:.0f} MB/s"
    if before is None:
        return "no link is slow"
    off = ~np.eye(now.network.size, dtype=np.bool_)
    share = math.exp(float(np.mean(np.log(now.rates[off] / before.rates[off]))))
    return f"links carry {share:.2f} times what they did"


__all__ = ["Revision", "difference"]
