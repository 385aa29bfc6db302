"""Views: they only read records and schedules, and never change a run."""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def read_asset(name: str) -> str:
    """Return a text file of `static/`, such as `report.css` or `schedule/drawing.js`."""
    return resources.files(__name__).joinpath("static", *name.split("/")).read_text(encoding="utf-8")
