"""The table of ranks as a widget: however many there are, only the lines on the screen are formatted and sent."""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from ringside.view.run.live import RankNow
from ringside.view.tui.console import in_ascii
from ringside.view.tui.rank_table import Columns, Sparks, rank_line


class RankTable(Widget, can_focus=True):
    """One line per rank; a cursor that stays on its rank, however the order changes.

    Args:
        utf8: Whether the terminal takes more than ASCII.
    """

    DEFAULT_CSS = "RankTable { height: 1fr; width: 1fr; }"

    class Chosen(Message):
        """A line was clicked.

        Args:
            rank: Its rank.
        """

        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank = rank

    def __init__(self, *, utf8: bool = True) -> None:
        super().__init__()
        self._utf8 = utf8
        self._ranks: Sequence[RankNow] = ()
        self._columns: Columns | None = None
        self._sparks: Sparks | None = None
        self._top = 0
        self._cursor: int | None = None
        self._drawn: list[tuple[str, Style]] = []

    @property
    def chosen(self) -> int | None:
        """The rank that Enter is about: the cursor's, else the first line's; None in an empty table."""
        if self._cursor is not None:
            return self._cursor
        return self._ranks[0].rank if self._ranks else None

    def show(self, ranks: Sequence[RankNow], columns: Columns, sparks: Sparks) -> None:
        """Show other ranks or other figures; only lines that changed are drawn again."""
        self._ranks, self._columns, self._sparks = ranks, columns, sparks
        if self._cursor is not None and self._place() is None:
            self._cursor = None
        self._follow()
        self._redraw()

    def move(self, lines: int) -> None:
        """Move the cursor down, or up for negative numbers."""
        if self._ranks:
            place = self._place()
            target = min(
                max((place or 0) + (lines if place is not None or lines < 0 else lines - 1), 0), len(self._ranks) - 1
            )
            self._cursor = self._ranks[target].rank
            self._follow()
            self._redraw()

    def leave(self) -> None:
        """Take the cursor away and show the first lines."""
        self._cursor, self._top = None, 0
        self._redraw()

    @property
    def page(self) -> int:
        """Lines on the screen."""
        return max(self.size.height, 1)

    def _place(self) -> int | None:
        return next((index for index, rank in enumerate(self._ranks) if rank.rank == self._cursor), None)

    def _follow(self) -> None:
        """Keep the cursor on the screen, and the screen inside the table."""
        place = self._place()
        if place is not None:
            self._top = min(max(self._top, place - self.page + 1), place)
        self._top = max(min(self._top, len(self._ranks) - self.page), 0)

    def _redraw(self) -> None:
        before, self._drawn = self._drawn, [self._line(y) for y in range(self.size.height)]
        if len(before) != len(self._drawn):
            self.refresh()
            return
        # Over a slow ssh line every line that is not sent counts.
        changed = [y for y, (new, old) in enumerate(zip(self._drawn, before, strict=True)) if new != old]
        if changed:
            self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))

    def _line(self, y: int) -> tuple[str, Style]:
        index = self._top + y
        if self._columns is None or self._sparks is None or not 0 <= index < len(self._ranks):
            return "", Style()
        rank = self._ranks[index]
        sparks = self._sparks.line(rank.rank) if self._columns.spark else ""
        text = rank_line(rank, self._columns, sparks)
        style = Style(bold=True, color="red") if rank.verdicts else Style()
        if rank.rank == self._cursor:
            style += Style(reverse=True)
        return text if self._utf8 else in_ascii(text), style

    def render_line(self, y: int) -> Strip:
        """Return a line of the screen."""
        text, style = self._drawn[y] if y < len(self._drawn) else ("", Style())
        base = self.rich_style
        return Strip([Segment(text, base + style)]).adjust_cell_length(self.size.width, base + style)

    def on_resize(self) -> None:
        """Fill the new size."""
        self._follow()
        self._redraw()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Scroll with the wheel."""
        event.stop()
        self.move(3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Scroll with the wheel."""
        event.stop()
        self.move(-3)

    def on_click(self, event: events.Click) -> None:
        """Open the rank under the pointer."""
        index = self._top + event.y
        if 0 <= index < len(self._ranks):
            self._cursor = self._ranks[index].rank
            self._redraw()
            self.post_message(self.Chosen(self._cursor))
