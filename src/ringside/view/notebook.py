"""A live view for notebooks: `LiveView("runs/x")` as the last line of a cell shows a run and goes on with it.

What is on the screen asks for news once a second, and this answers: a view that nobody sees costs nothing, and no
thread is left behind. So the run should be another process's, as runs of `ringside run` are: while a cell of the same
notebook trains, nobody answers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ringside.errors import UsageError
from ringside.text import duration, share
from ringside.view.assets import read_asset
from ringside.view.run.live import RankNow
from ringside.view.tui.console import printable
from ringside.view.tui.rank_table import SortOrder, Sparks, arrange_ranks
from ringside.view.tui.remote import Remote
from ringside.view.tui.source import Local, Open, RunSource, Snapshot, take_snapshot
from ringside.view.tui.text import first_line, price_text, verdict_block, verdict_headline

try:
    import anywidget
    import traitlets
except ImportError as error:
    raise UsageError(f"the live view needs {error.name}: pip install 'ringside[notebook]'") from None


SHOWN_RANKS = 64
SPARK_CELLS = 48
WIDE = 10_000


class LiveView(anywidget.AnyWidget):
    """A run as it goes on: its verdicts, then a line per rank, the slowest first.

    Args:
        run: A run directory, which need not be there yet, or the address where `ringside serve` answers.

    Attributes:
        state: What is shown, as `state_of` returns it; the front end has a copy.

    Raises:
        UsageError: It is no such address.
    """

    _esm = read_asset("live/notebook.js")
    _css = read_asset("live/notebook.css")
    state = traitlets.Dict().tag(sync=True)

    def __init__(self, run: str | os.PathLike[str]) -> None:
        super().__init__()
        self._source = _source(os.fspath(run))
        self.on_msg(self._hear)
        self.look()

    def take_snapshot(self) -> None:
        """Read what is new and show it; trouble is shown as well."""
        self.state = state_of(take_snapshot(self._source))

    def _hear(self, view: Any, content: Any, buffers: Any) -> None:
        if content == "look":
            self.look()


def _source(run: str) -> RunSource:
    if run.startswith(("http://", "https://")):
        return Remote(run, os.environ.get("RINGSIDE_SERVE_TOKEN", ""))
    return Local(Path(run))


def state_of(snapshot: Snapshot) -> dict[str, Any]:
    """Return a run in words: `title`, `verdicts` (or `remark` where there is none), and the slowest ranks.

    Each of `ranks` has `rank`, `host`, `own`, `wait`, `wire` and `excess` in words, `spark` (own time over the last
    steps, as blocks) and `verdict`; `more` is how many ranks are left out.
    """
    ranks = arrange_ranks(snapshot.ranks, SortOrder())
    sparks = Sparks(snapshot.steps, snapshot.own_seconds, SPARK_CELLS)
    calm = snapshot.trouble or not snapshot.verdicts
    return {
        "title": first_line(snapshot, WIDE).plain.removeprefix("ringside top ").strip(),
        "remark": verdict_block(snapshot, WIDE, 1).plain.removeprefix("● ") if calm else "",
        "verdicts": [] if snapshot.trouble else [_verdict(one) for one in snapshot.verdicts],
        "ranks": [_rank(one, sparks) for one in ranks[:SHOWN_RANKS]],
        "more": len(ranks[SHOWN_RANKS:]),
    }


def _verdict(one: Open) -> dict[str, Any]:
    return {
        "headline": printable(verdict_headline(one)),
        "over": one.over,
        "told": [
            [name, printable(words)]
            for name, words in (("why", one.verdict.cause), ("price", price_text(one)), ("do", one.verdict.advice))
            if words
        ],
    }


def _rank(one: RankNow, sparks: Sparks) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "host": printable(one.host),
        "own": duration(one.own_seconds),
        "wait": duration(one.wait_seconds),
        "wire": duration(one.wire_seconds),
        "excess": share(one.excess_ratio),
        "spark": sparks.line(one.rank),
        "verdict": ", ".join(kind.replace("_", " ") for kind in one.verdicts),
    }
