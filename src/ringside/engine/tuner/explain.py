"""Why an all-reduce goes the way it goes, as a value and as text of 80 columns."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ringside.engine.probe.links import MeasuredSlowLink
from ringside.engine.probe.prober import Probe
from ringside.engine.tuner.table import Rank, TimingRow
from ringside.text import duration, rate, size

_WIDTH = 80
_SHOWN = 12


@dataclass(frozen=True)
class Explanation:
    """The choices for a size, ranked.

    Args:
        size_bytes: What was asked for.
        choice: What is chosen.
        why: In a sentence.
        rows: All that was considered, the fastest expected first; empty if nothing was measured.
        table_bytes: The size of the table's rank that holds for it.
        history: What was changed during the run, in words.
    """

    size_bytes: int
    choice: str
    why: str
    rows: tuple[TimingRow, ...] = ()
    table_bytes: int = 0
    history: tuple[str, ...] = ()

    @staticmethod
    def of(size_bytes: int, rank: Rank, history: tuple[str, ...] = ()) -> Explanation:
        """Return the explanation that a rank of the table gives."""
        return Explanation(size_bytes, rank.winner, rank.why, rank.rows, rank.size_bytes, history)

    def __str__(self) -> str:
        """Return the verdict, then the ranking."""
        lines = textwrap.wrap(f"{size(self.size_bytes, binary=True)}: {self.choice}. {self.why}.", _WIDTH)
        if self.rows:
            lines += [
                "",
                f"  {'at ' + size(self.table_bytes, binary=True):<30}{'predicted':>14}{'measured':>14}{'expected':>14}",
            ]
            # The best, and native and the winner wherever they are.
            shown = [row for n, row in enumerate(self.rows) if n < _SHOWN or row.choice in (self.choice, "native")]
            for row in shown:
                mark = ">" if row.choice == self.choice else " "
                measured = "" if row.measured_s is None else duration(row.measured_s)
                figures = f"{duration(row.predicted_s):>14}{measured:>14}{duration(row.expected_s):>14}"
                lines.append(f"{mark} {row.choice[:29]:<30}{figures}")
            if len(self.rows) > _SHOWN:
                lines.append(f"  and {len(self.rows) - len(shown)} more")
        for entry in self.history:
            lines += textwrap.wrap(entry, _WIDTH, initial_indent="changed: ", subsequent_indent="  ")
        return "\n".join(lines)


# -------------------------------------------------------------------------------------------------
# What was decided anew during a run, and why: a value, and its line for the log.


@dataclass(frozen=True)
class AlgorithmChange:
    """What the tuner decided when all-reduces took longer than they should.

    Args:
        size_bytes: Of the all-reduces that asked for it.
        before, after: How they were executed before and are from now on; equal if that stays.
        others_changed: Whether other sizes go another way.
        reason: Why links and choices were timed again.
        slow: The links that are slow now, slowest first, by numbers of hosts.
        found: What became of the links.
        seconds: What timing and deciding took.
    """

    size_bytes: int
    before: str
    after: str
    others_changed: bool
    reason: str
    slow: tuple[MeasuredSlowLink, ...]
    found: str
    seconds: float

    def describe(self) -> str:
        """Return all of it in one line."""
        stays = f"{self.before} stays" + (", other sizes change" if self.others_changed else "")
        turn = stays if self.before == self.after else f"{self.before} -> {self.after}"
        return f"{self.reason}; {self.found}; {turn}"


def difference(before: Probe | None, now: Probe, names: Sequence[str]) -> str:
    """Return what became of the links, in a phrase.

    Args:
        before: What was known of them.
        now: What is.
        names: Of the hosts.
    """
    slow = now.slow
    if slow:
        link = slow[0]
        where = names[link.src] if link.dst < 0 else f"{names[link.src]} > {names[link.dst]}"
        return f"{where} carries {rate(link.bytes_per_s)}, others {rate(link.usual)}"
    if before is None:
        return "no link is slow"
    off = ~np.eye(now.network.size, dtype=np.bool_)
    share = math.exp(float(np.mean(np.log(now.rates[off] / before.rates[off]))))
    return f"links carry {share:.2f} times what they did"
