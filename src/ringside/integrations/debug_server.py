"""PyTorch's debug server: `start_debug_server(handlers=handlers())` adds a page with the verdicts and every rank.

The server (`torch.distributed.debug`, torch 2.13) is PyTorch's and experimental; whoever reaches its port can read it.
"""

from __future__ import annotations

import importlib
import os
import threading
from pathlib import Path
from typing import Any

from ringside.errors import UsageError
from ringside.monitor.run.registry import running_runs
from ringside.view.tui.rank_table import SortOrder
from ringside.view.tui.source import Local, take_snapshot
from ringside.view.tui.text import once_lines

WIDTH = 140
NOT_YET = "Nothing is recorded yet: the first step of an attached model begins a run."
TEMPLATE = """
{% extends "base.html" %}
{% block header %}<meta http-equiv="refresh" content="2"><h1>{% block title %}Ringside{% endblock %}</h1>{% endblock %}
{% block content %}<pre>{{ text | e }}</pre>{% endblock %}
"""

_reading = threading.Lock()
"""The server answers each request on a thread of its own."""


def _debug(name: str) -> Any:
    """Return a module of PyTorch's debug server."""
    try:
        return importlib.import_module(f"torch.distributed.debug.{name}")
    except ImportError as error:
        missing = (error.name or "").split(".")[0]
        package = "torch 2.13 or newer" if missing == "torch" else f"{missing}, which is not installed"
        raise UsageError(f"PyTorch's debug server needs {package}: pip install {missing}") from None


_frontend: Any = _debug("_frontend")
DebugHandler: Any = _frontend.DebugHandler


class RingsidePage(DebugHandler):  # type: ignore[misc]
    """The run of the process that makes this, as `ringside top --once` prints it; at `/ringside` and in dumps."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._source: Local | None = None

    def routes(self) -> list[Any]:
        """Return where the page is."""
        return [_frontend.Route("/ringside", self._page)]

    def nav_links(self) -> list[Any]:
        """Return its name in the bar above all pages."""
        return [_frontend.NavLink("/ringside", "Ringside")]

    def templates(self) -> dict[str, str]:
        """Return its HTML."""
        return {"ringside.html": TEMPLATE}

    def dump(self) -> str:
        """Return the page's text, for the server's periodic dumps."""
        with _reading:
            # What is new of the newest run of this process.
            found = next((entry.directory for entry in running_runs() if entry.pid == self._pid), None)
            if found is not None and (self._source is None or Path(self._source.where) != found):
                self._source = Local(found)
            if self._source is None:
                return NOT_YET
            return "\n".join(once_lines(take_snapshot(self._source), SortOrder(), WIDTH))

    def dump_filename(self) -> str:
        """Return what `enabled_dumps` calls it."""
        return "ringside"

    def _page(self, request: Any) -> bytes:
        page: bytes = request.frontend.render_template("ringside.html", text=self.dump())
        return page


def handlers() -> list[Any]:
    """Return the debug server's own pages and Ringside's, for `torch.distributed.debug.start_debug_server(handlers=)`.

    Call it on every rank, as `start_debug_server`; the server runs beside rank 0, which writes the run.

    Raises:
        UsageError: Something that PyTorch's pages need is not installed; the message has the pip command.
    """
    return [*_debug("_debug_handlers").default_handlers(), RingsidePage()]
