"""What a run says of its gradient buckets: the newest word on every model, added up."""

from __future__ import annotations

from typing import Any

import pytest

from ringside.monitor.gradient_memory import gradient_memory
from ringside.view.report import _memory


def told(model: int, shared: int, copied: int) -> dict[str, Any]:
    sizes = {"shared_bytes": shared << 20, "copied_bytes": copied << 20}
    return {"kind": "gradient_memory", "model": model, "shared_buckets": shared, "copied_buckets": copied, **sizes}


def test_the_newest_word_on_every_model_counts() -> None:
    events = [told(0, 0, 3), {"kind": "started"}, told(0, 3, 0), told(1, 1, 2)]
    assert gradient_memory(events) == {
        "shared_buckets": 4,
        "shared_bytes": 4 << 20,
        "copied_buckets": 2,
        "copied_bytes": 2 << 20,
    }
    assert _memory(gradient_memory(events)) == "4 shared (4.19 MB), 2 copied (2.10 MB)"
    assert _memory(gradient_memory(events[:3])) == "3 shared (3.15 MB)"


@pytest.mark.parametrize("damage", [{"model": "x"}, {"shared_bytes": None}, {"copied_buckets": 1.5}])
def test_damaged_events_are_passed_over(damage: dict[str, Any]) -> None:
    assert gradient_memory([{**told(0, 3, 0), **damage}]) == {}
    assert gradient_memory([]) == {}
    assert _memory({}) == ""
