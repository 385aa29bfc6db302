"""`ringside top` on the screen: verdicts first, a line per rank, and keys; needs textual (the extra `tui`)."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import ClassVar, TypeVar

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Input, Static

from ringside.view.mesh_text import blocked_line
from ringside.view.tui.console import fit, printable
from ringside.view.tui.rank_table import SORTS, SortOrder, Sparks, arrange_ranks, fit_columns, heading_line
from ringside.view.tui.rank_widget import RankTable
from ringside.view.tui.source import RunSource, Snapshot, take_snapshot
from ringside.view.tui.text import STALE_S, all_verdicts, first_line, rank_detail, verdict_block
from ringside.view.verdict_text import OWN_TIME

REFRESH_S = 0.5
ROOMY = 20
"""Lines from which own time is defined above the ranks; `?` defines it on any terminal."""
THEMES = ("ansi-dark", "textual-dark", "textual-light")
"""The first one takes the terminal's own colours, light or dark."""

KEYS = "s sort  r reverse  / filter  p pause  ⏎ rank  v verdicts  ? help  q quit"

HELP = """\
s / S      sort by the next / previous column: own, wait, wire, excess, rank
r          reverse the order
/          filter: 3, 8-15, a part of a host's name or of a verdict's kind;
           several of them between spaces; Esc takes it back
p          pause: the screen stands still; p again goes on
↑ ↓        move (also j k PgUp PgDn Home End); Esc leaves the line
Enter      one rank: its verdicts with numbers, phases over steps, vitals
v          all verdicts in full
t          colours: the terminal's own, dark, light
q          quit; the job goes on

own        the rank's own work per step; who is slow has more of it
wait       until the last rank arrived; the straggler waits least
wire       bytes in flight, after the last rank had arrived
excess     own time over the median of the others'
own time   the last steps as blocks, all ranks on one scale
▌          a verdict is open on this rank

Figures are medians over the last 16 steps; once the run has ended, over all of it."""
HELP_MESH = """\


place      the rank's coordinates in the job's mesh; a filter may be one: pp1
           Sorted by rank, ranks that do the same work stand together.
excess     here: over the median of those that do the same work
blocked    time in groups along a dimension: waits and transfers"""

_T = TypeVar("_T")


class Page(Screen[None]):
    """Text over the whole screen, with a way back.

    Args:
        write: Makes the text, for a width in cells.
        title: Its first line.
        rank: The rank that it is about; None for none.
        utf8: Whether the terminal takes more than ASCII.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,q,v,question_mark", "back"),
        Binding("down,j", "scroll(1)"),
        Binding("up,k", "scroll(-1)"),
        Binding("pagedown,space", "scroll(10)"),
        Binding("pageup", "scroll(-10)"),
    ]

    def __init__(self, write: Callable[[int], Text], title: str, *, rank: int | None = None, utf8: bool = True) -> None:
        super().__init__()
        self.rank = rank
        self._write, self._heading, self._utf8 = write, title, utf8
        self._shown: Text | None = None

    def compose(self) -> ComposeResult:
        """Make the page's parts."""
        yield Static(fit(Text(self._heading, style="bold cyan"), self._utf8), classes="line")
        with VerticalScroll():
            yield Static(id="text")
        yield Static(fit(Text("Esc back  ↑ ↓ scroll", style="dim"), self._utf8), classes="line")

    def on_mount(self) -> None:
        """Fill it."""
        self.write()

    def on_resize(self) -> None:
        """Wrap it anew."""
        self.write()

    def write(self) -> None:
        """Write the text as it is now; nothing while the page is made (it writes itself when it is there)."""
        part = next(iter(self.query("#text").results(Static)), None)
        if part is None:
            return
        text = fit(self._write(max(self.app.size.width, 1)), self._utf8)
        if text != self._shown or (self._shown and text.spans != self._shown.spans):
            self._shown = text
            part.update(text)

    def action_back(self) -> None:
        """Go back to the ranks."""
        self.dismiss()

    def action_scroll(self, lines: int) -> None:
        """Scroll."""
        self.query_one(VerticalScroll).scroll_relative(y=lines, animate=False)


class TopApp(App[None]):
    """The screen of `ringside top`.

    It has many methods because textual finds what a key or an event does by a method's name: most of them are its
    bindings, of a line each.

    Args:
        source: The run.
        order: Which ranks at first, in which order.
        remark: One sentence on what was chosen to be shown; shown until the first key.
        utf8: Whether the terminal takes more than ASCII.
        refresh_s: Time between two looks at the run, seconds; None: only when `refresh_now` is called.
        clock: Monotonic time in seconds.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layers: base; overflow: hidden; }
    .line { height: 1; }
    #verdicts, #heading { height: auto; }
    #filter { height: 1; border: none; padding: 0; display: none; }
    #filter:focus { border: none; }
    VerticalScroll { scrollbar-size: 0 0; height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort(1)"),
        Binding("S", "sort(-1)"),
        Binding("r", "reverse"),
        Binding("p", "pause"),
        Binding("slash", "filter", priority=True),  # before keys typed ahead find their widget
        Binding("enter", "detail"),
        Binding("v", "verdicts"),
        Binding("question_mark", "help"),
        Binding("t", "colours"),
        Binding("q", "quit"),
        Binding("ctrl+c", "quit", priority=True),
        Binding("escape", "leave"),
        Binding("down,j", "move(1)"),
        Binding("up,k", "move(-1)"),
        Binding("pagedown,space", "page(1)"),
        Binding("pageup", "page(-1)"),
        Binding("home", "move(-1000000)"),
        Binding("end", "move(1000000)"),
    ]

    def __init__(
        self,
        source: RunSource,
        *,
        order: SortOrder | None = None,
        remark: str = "",
        utf8: bool = True,
        refresh_s: float | None = REFRESH_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # NO_COLOR: textual would make the terminal's own colours black on black, unless told that they are meant.
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        self.animation_level = "none"
        self.order = order or SortOrder()
        self.paused = False
        self.snapshot: Snapshot | None = None
        self._source, self._remark, self._utf8 = source, remark, utf8
        self._refresh_s, self._clock = refresh_s, clock
        self._polling = False
        self._changed_s = clock()
        self._shown: dict[str, Text] = {}

    def compose(self) -> ComposeResult:
        """Make the screen's parts."""
        yield Static(id="title", classes="line")
        yield Static(id="verdicts")
        yield Static(id="heading")
        yield RankTable(utf8=self._utf8)
        yield Input(placeholder="rank, 8-15, host or verdict", id="filter", value=self.order.filter)
        yield Static(id="keys", classes="line")

    def on_mount(self) -> None:
        """Begin to look at the run."""
        self.theme = THEMES[0]
        self.query_one(RankTable).focus()
        self.show_snapshot()
        self._begin_poll()
        if self._refresh_s is not None:
            self.set_interval(self._refresh_s, self._begin_poll)

    def on_resize(self, event: events.Resize) -> None:
        """Lay out anew."""
        self.call_after_refresh(self.show_snapshot)

    def _begin_poll(self) -> None:
        if not self.paused and not self._polling:
            self.run_worker(self.refresh_now(), exit_on_error=True)

    async def refresh_now(self) -> None:
        """Look at the run once and show it; a long one again and again until it has been read."""
        if self._polling:
            return
        self._polling = True
        try:
            while True:
                page = self.screen
                rank = page.rank if isinstance(page, Page) else None
                snapshot = await _in_thread(partial(take_snapshot, self._source, rank))
                if self.snapshot is None or snapshot.version != self.snapshot.version:
                    self._changed_s = self._clock()
                if self.paused:
                    return
                self.snapshot = snapshot
                self.show_snapshot()
                if not snapshot.reading or snapshot.trouble:
                    return
        finally:
            self._polling = False

    def show_snapshot(self) -> None:
        """Show the newest snapshot; what did not change is not sent again."""
        snapshot, width, height = self.snapshot, self.size.width, self.size.height
        if not self.is_running or width < 1:
            return
        if snapshot is None:
            self._update("title", Text(f"ringside top · reading {printable(self._source.where)}"[:width]))
            return
        if isinstance(self.screen, Page):
            self.screen.write()
        columns = fit_columns(snapshot, width)
        shown = arrange_ranks(snapshot.ranks, self.order)
        stale_s = self._clock() - self._changed_s
        remarks = []
        if self.paused:
            remarks.append("paused")
        if self.order.filter:
            remarks.append(f"{len(shown)} of {len(snapshot.ranks)} ranks")
        if stale_s >= STALE_S and snapshot.stage != "ended" and not self.paused:
            remarks.append(f"nothing new for {stale_s:.0f} s")
        self._update("title", first_line(snapshot, width, remarks=remarks))
        self._update("verdicts", verdict_block(snapshot, width, max(min(height - 10, 9), min(height - 4, 2), 0)))
        heading = heading_line(columns, self.order, snapshot.window)[:width]
        if height >= ROOMY:
            waits = [printable(blocked_line(snapshot.blocked))[:width]] if snapshot.blocked else []
            heading = "\n".join([*waits, OWN_TIME[:width], heading])
        self._update("heading", Text(heading, style="dim"))
        keys = Text(printable(self._remark) or KEYS, style="dim")
        keys.truncate(width, overflow="ellipsis")
        self._update("keys", keys)
        self._table.show(shown, columns, Sparks(snapshot.steps, snapshot.own_seconds, columns.spark))

    @property
    def _table(self) -> RankTable:
        return self._base.query_one(RankTable)

    @property
    def _base(self) -> Screen[object]:
        return self.screen_stack[0]

    def _update(self, name: str, text: Text) -> None:
        text = fit(text, self._utf8)
        before = self._shown.get(name)
        if before is None or before.plain != text.plain or before.spans != text.spans or before.style != text.style:
            self._shown[name] = text
            self._base.query_one(f"#{name}", Static).update(text)

    def on_key(self) -> None:
        """The first key has been pressed: from now on the last line shows the keys."""
        if self._remark:
            self._remark = ""
            self.show_snapshot()

    def action_sort(self, by: int) -> None:
        """Sort by another column."""
        self._arrange(replace(self.order, sort=SORTS[(SORTS.index(self.order.sort) + by) % len(SORTS)], reverse=False))

    def action_reverse(self) -> None:
        """Turn the order round."""
        self._arrange(replace(self.order, reverse=not self.order.reverse))

    def _arrange(self, order: SortOrder) -> None:
        self.order = order
        self.show_snapshot()

    def action_pause(self) -> None:
        """Let the screen stand still, or go on."""
        self.paused = not self.paused
        self._changed_s = self._clock()
        self.show_snapshot()
        self._begin_poll()

    def action_filter(self) -> None:
        """Ask for a filter."""
        if isinstance(self.screen, Page):
            return
        box = self.query_one("#filter", Input)
        box.display = True
        self._base.set_focus(box)  # at once; box.focus() comes later
        self.call_after_refresh(self.show_snapshot)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while it is typed."""
        self._arrange(replace(self.order, filter=event.value))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter, and go back to the ranks."""
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter", Input).display = False
        self._base.set_focus(self._table)
        self.call_after_refresh(self.show_snapshot)

    def action_leave(self) -> None:
        """Take back the filter, else the cursor."""
        box = self.query_one("#filter", Input)
        if box.display or self.order.filter:
            box.value = ""
            self._close_filter()
        else:
            self._table.leave()

    def action_move(self, lines: int) -> None:
        """Move the cursor."""
        self._table.move(lines)

    def action_page(self, pages: int) -> None:
        """Move the cursor by a screen."""
        self._table.move(pages * self._table.page)

    def on_rank_table_chosen(self, message: RankTable.Chosen) -> None:
        """A rank was clicked."""
        self._open(message.rank)

    def action_detail(self) -> None:
        """Show everything of the rank under the cursor."""
        if self._table.chosen is not None:
            self._open(self._table.chosen)

    def _open(self, rank: int) -> None:
        self._open_page("one rank", lambda snapshot, width: rank_detail(snapshot, rank, width), rank)
        self.run_worker(self._read_detail(rank), exit_on_error=True)

    def _open_page(self, title: str, write: Callable[[Snapshot, int], Text], rank: int | None = None) -> None:
        def write_newest(width: int) -> Text:
            return write(self.snapshot, width) if self.snapshot else Text()

        self.push_screen(Page(write_newest, f"ringside top · {title}", rank=rank, utf8=self._utf8))

    async def _read_detail(self, rank: int) -> None:
        """Read the records of a rank, also while the screen stands still."""
        records = await _in_thread(partial(self._source.records, rank))
        if self.snapshot is not None:
            self.snapshot = replace(self.snapshot, detail=tuple(records))
            self.show_snapshot()

    def action_verdicts(self) -> None:
        """Show all verdicts in full."""
        self._open_page("verdicts", all_verdicts)

    def action_help(self) -> None:
        """Show the keys and what the columns mean."""
        ranks = self.snapshot.ranks if self.snapshot is not None else ()
        words = HELP + HELP_MESH if any(rank.coordinates for rank in ranks) else HELP
        self.push_screen(Page(lambda width: Text(words), "ringside top · keys and words", utf8=self._utf8))

    def action_colours(self) -> None:
        """Take other colours."""
        self.theme = THEMES[(THEMES.index(self.theme) + 1) % len(THEMES)] if self.theme in THEMES else THEMES[0]


async def _in_thread(work: Callable[[], _T]) -> _T:
    """Run work on a thread that nobody waits for when the program ends: a first look may take minutes."""
    future: Future[_T] = Future()
    future.set_running_or_notify_cancel()  # whoever waits may be cancelled, the work is not

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="ringside-top").start()
    return await asyncio.wrap_future(future)
