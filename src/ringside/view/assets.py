"""The styles, scripts and templates that lie beside the views, in `static/`."""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def read_asset(name: str) -> str:
    """Return a text file of `static/`, such as `report.css` or `schedule/drawing.js`."""
    return resources.files("ringside.view").joinpath("static", *name.split("/")).read_text(encoding="utf-8")
