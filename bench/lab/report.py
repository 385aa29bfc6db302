"""Tables and verdicts of the laboratory's laws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.common import Floor, markdown_table

Row = dict[str, Any]
# (heading, key of the row, format such as `.3f`).
Column = tuple[str, str, str]


@dataclass
class Section:
    """One law: its table, what it promises, what is to be said about it.

    Args:
        name: Of the sub-command.
        title: What the law says.
        columns: Of the table.
        rows: Of the table.
        floors: What is promised.
        notes: What else must be known.
        pivot: How a document shows the table, shorter: (key of lines, key of columns, key of cells, format).
    """

    name: str
    title: str
    columns: Sequence[Column] = ()
    rows: list[Row] = field(default_factory=list)
    floors: list[Floor] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pivot: tuple[str, str, str, str] | None = None

    def markdown(self) -> str:
        """Return title, table, the floors that were missed and the notes, for a document."""
        head, *rows = _cells(self.columns, self.rows)
        if self.pivot:  # a line per algorithm, a column per number of ranks
            line, column, cell, form = self.pivot
            columns = list(dict.fromkeys(row[column] for row in self.rows))
            found = {(row[line], row[column]): row.get(cell) for row in self.rows}
            head = [line, *(f"{column} = {value}" for value in columns)]
            rows = [
                [str(name), *(_cell(found.get((name, value)), form) for value in columns)]
                for name in dict.fromkeys(row[line] for row in self.rows)
            ]
        missed = [floor.describe() for floor in self.floors if not floor.met]
        said = f"{len(self.floors) - len(missed)} of {len(self.floors)} floors met."
        table = markdown_table(head, rows)
        notes = "\n".join(f"- {note}" for note in (*missed, *self.notes))
        return f"{self.title}.\n\n{table}\n\n{said}\n\n{notes}"

    def text(self) -> str:
        """Return title, table and notes."""
        lines = [self.title, *_table(self.columns, self.rows), *(f"  {note}" for note in self.notes)]
        return "\n".join(lines)

    def json(self) -> dict[str, Any]:
        """Return everything."""
        floors = [{**vars(floor), "met": floor.met} for floor in self.floors]
        return {"name": self.name, "title": self.title, "rows": self.rows, "floors": floors, "notes": self.notes}


def verdict(sections: Sequence[Section]) -> str:
    """Say how many floors were met, and then each of those that were missed; if none was, each that was met."""
    floors = [floor for section in sections for floor in section.floors]
    missed = [floor for floor in floors if not floor.met]
    head = f"{len(floors) - len(missed)} of {len(floors)} floors met"
    return "\n".join([head, *(floor.describe() for floor in missed or floors)])


def filled(page: str, sections: Sequence[Section]) -> str:
    """Return a page with what stands between `<!-- lab: NAME -->` and `<!-- end -->` replaced by what was measured."""
    for section in sections:
        mark, end = f"<!-- lab: {section.name} -->", "<!-- end -->"
        before, found, rest = page.partition(mark)
        if found:
            _, _, after = rest.partition(end)
            page = f"{before}{mark}\n\n{section.markdown()}\n\n{end}{after}"
    return page


def _cells(columns: Sequence[Column], rows: Sequence[Row]) -> list[list[str]]:
    cells = [[heading for heading, _, _ in columns]]
    return cells + [[_cell(row.get(key), form) for _, key, form in columns] for row in rows]


def _table(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    cells = _cells(columns, rows)
    widths = [max(len(line[column]) for line in cells) for column in range(len(columns))]
    lines = []
    for line in cells:
        first, *others = (text.rjust(width) for text, width in zip(line, widths, strict=True))
        first = line[0].ljust(widths[0])  # names to the left, figures to the right
        lines.append("  " + "  ".join([first, *others]).rstrip())
    return lines


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def size_words(size_bytes: int) -> str:
    """Say a size as people do: 4 B, 64 KB, 16 MB."""
    for unit, factor in (("MB", 1 << 20), ("KB", 1 << 10)):
        if size_bytes >= factor and size_bytes % factor == 0:
            return f"{size_bytes // factor} {unit}"
    return f"{size_bytes} B"
