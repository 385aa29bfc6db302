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
from ringside.text import duration, signed_percent
from ringside.view import read_asset
from ringside.view.mesh_text import chain_line
from ringside.view.tui.console import printable
from ringside.view.tui.rank_table import SortOrder, Sparks, arrange_ranks
from ringside.view.tui.source import Local, Remote, RunSource, Snapshot, take_snapshot
from ringside.view.tui.text import first_line, price_text, verdict_block, verdict_headline
from ringside.view.verdict_text import OWN_TIME

try:
    import anywidget
    import traitlets
except ImportError as error:
    raise UsageError(f"the live view needs {error.name}: pip install 'torch-ringside[notebook]'") from None


__all__ = ["LiveView"]

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
        where = os.fspath(run)
        is_address = where.startswith(("http://", "https://"))
        token = os.environ.get("RINGSIDE_SERVE_TOKEN", "")
        self._source: RunSource = Remote(where, token) if is_address else Local(Path(where))

        def on_message(view: Any, content: Any, buffers: Any) -> None:
            if content == "look":
                self.refresh()

        self.on_msg(on_message)
        self.refresh()

    def refresh(self) -> None:
        """Read what is new and show it; trouble is shown as well."""
        self.state = state_of(take_snapshot(self._source))


def state_of(snapshot: Snapshot) -> dict[str, Any]:
    """Return a run in words: `title`, `verdicts` (or `remark` where there is none), and the slowest ranks.

    `own_time` says what that is. Each of `ranks` has `rank`, `host`, `own`, `wait`, `wire` and `excess` in words,
    `spark` (own time over the last steps, as blocks) and `verdict`; `more` is how many ranks are left out.
    """
    ranks = arrange_ranks(snapshot.ranks, SortOrder())
    sparks = Sparks(snapshot.steps, snapshot.own_seconds, SPARK_CELLS)
    calm = snapshot.trouble or not snapshot.verdicts
    verdicts = []
    for verdict in () if snapshot.trouble else snapshot.verdicts:
        lines = (
            ("why", verdict.verdict.cause),
            ("cost", price_text(verdict)),
            ("do", verdict.verdict.advice),
            ("chain", chain_line(verdict.verdict)),
        )
        verdicts.append(
            {
                "headline": printable(verdict_headline(verdict)),
                "over": verdict.over,
                "told": [[name, printable(text)] for name, text in lines if text],
            }
        )
    return {
        "title": first_line(snapshot, WIDE).plain.removeprefix("ringside top ").strip(),
        "remark": verdict_block(snapshot, WIDE, 1).plain.removeprefix("● ") if calm else "",
        "own_time": OWN_TIME,
        "verdicts": verdicts,
        "ranks": [
            {
                "rank": rank.rank,
                "host": printable(rank.host),
                "own": duration(rank.own_seconds),
                "wait": duration(rank.wait_seconds),
                "wire": duration(rank.wire_seconds),
                "excess": signed_percent(rank.excess_ratio),
                "spark": sparks.line(rank.rank),
                "verdict": ", ".join(kind.replace("_", " ") for kind in rank.verdicts),
            }
            for rank in ranks[:SHOWN_RANKS]
        ],
        "more": len(ranks[SHOWN_RANKS:]),
    }
