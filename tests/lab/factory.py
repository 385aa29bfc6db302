"""What makes a lab, as tests are given it."""

from __future__ import annotations

from collections.abc import Callable

from ringside.lab import Lab

LabFactory = Callable[..., Lab]
