"""Labs for tests: skipped with the reason where none can be had."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from ringside.lab import Lab

from .factory import LabFactory


@pytest.fixture
def lab_factory() -> Iterator[LabFactory]:
    """Give a function that takes what `Lab` takes and returns an open lab, which lives until the test ends."""
    with contextlib.ExitStack() as stack:

        def make(**asked: Any) -> Lab:
            reason = Lab.unavailable(delay=bool(asked.get("delay_s")))
            if reason:
                pytest.skip(reason)
            return stack.enter_context(Lab(**asked))

        yield make
