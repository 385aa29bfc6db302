"""Why an all-reduce goes the way it goes, as a value and as text of 80 columns."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from ringside.engine.selection_table import Rank, Row

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
    rows: tuple[Row, ...] = ()
    table_bytes: int = 0
    history: tuple[str, ...] = ()

    @staticmethod
    def of(size_bytes: int, rank: Rank, history: tuple[str, ...] = ()) -> Explanation:
        """Return the explanation that a rank of the table gives."""
        return Explanation(size_bytes, rank.winner, rank.why, rank.rows, rank.size_bytes, history)

    def __str__(self) -> str:
        """Say it: the verdict, then the ranking."""
        lines = textwrap.wrap(f"{_size(self.size_bytes)}: {self.choice}. {self.why}.", _WIDTH)
        if self.rows:
            lines += [
                "",
                f"{'':2}{f'at {_size(self.table_bytes)}':<30}{'predicted':>14}{'measured':>14}{'expected':>14}",
            ]
            lines += [self._line(row) for row in self._shown()]
            if len(self.rows) > _SHOWN:
                lines.append(f"  and {len(self.rows) - len(self._shown())} more")
        for entry in self.history:
            lines += textwrap.wrap(entry, _WIDTH, initial_indent="changed: ", subsequent_indent="  ")
        return "\n".join(lines)

    def _shown(self) -> list[Row]:
        """Return the best, and native and the winner wherever they are."""
        return [row for at, row in enumerate(self.rows) if at < _SHOWN or row.choice in (self.choice, "native")]

    def _line(self, row: Row) -> str:
        mark = ">" if row.choice == self.choice else " "
        measured = "" if row.measured_s is None else _time(row.measured_s)
        return f"{mark} {row.choice[:29]:<30}{_time(row.predicted_s):>14}{measured:>14}{_time(row.expected_s):>14}"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"


def _size(size_bytes: int) -> str:
    for unit, name in ((1 << 20, "MB"), (1 << 10, "KB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:g} {name}" if size_bytes % unit == 0 else f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} B"
