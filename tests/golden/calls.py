"""The type of the fixture `command`."""

from __future__ import annotations

from collections.abc import Callable

Call = Callable[[str], tuple[int, str, str]]
