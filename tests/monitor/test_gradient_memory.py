"""What a run says of its gradient buckets: the newest word on every model, added up."""

from __future__ import annotations

from typing import Any

import pytest
from tests.recorded_runs import own_times

from ringside.monitor.run.records import Carried, carried, gradient_memory
from ringside.monitor.run.table import tabulate
from ringside.monitor.summary import summarise
from ringside.view.html.run_report import render_report

from .jobs import records_of, run_info


def told(model: int, shared: int, copied: int) -> dict[str, Any]:
    sizes = {"shared_bytes": shared << 20, "copied_bytes": copied << 20}
    return {"kind": "gradient_memory", "model": model, "shared_buckets": shared, "copied_buckets": copied, **sizes}


def page(events: list[dict[str, Any]]) -> str:
    """The report of a run with these events."""
    info = run_info(2)
    table = tabulate(records_of(own_times(20, 2)), 2)
    return render_report(summarise(info, table, [], memory=gradient_memory(events)), info, table)


def test_the_newest_word_on_every_model_counts() -> None:
    events = [told(0, 0, 3), {"kind": "started"}, told(0, 3, 0), told(1, 1, 2)]
    assert gradient_memory(events) == {
        "shared_buckets": 4,
        "shared_bytes": 4 << 20,
        "copied_buckets": 2,
        "copied_bytes": 2 << 20,
    }
    assert "4 shared (4.19 MB), 2 copied (2.10 MB)" in page(events)
    assert "3 shared (3.15 MB)<" in page(events[:3])
    assert "gradient buckets" not in page(events[1:2])


@pytest.mark.parametrize("damage", [{"model": "x"}, {"shared_bytes": None}, {"copied_buckets": 1.5}])
def test_damaged_events_are_passed_over(damage: dict[str, Any]) -> None:
    assert gradient_memory([{**told(0, 3, 0), **damage}]) == {}
    assert gradient_memory([]) == {}


def test_what_gradients_went_by_is_the_newest_word_that_can_be_read() -> None:
    ring = {"kind": "carried", "algorithm": "hosts/ring", "wire_dtype": "float32"}
    half = {"kind": "carried", "algorithm": "hosts/tree", "wire_dtype": "bfloat16"}
    assert carried([]) is carried([{"kind": "ended"}, {"kind": "carried", "algorithm": 3}]) is None
    assert carried([ring, half, {"kind": "carried"}]) == Carried(algorithm="hosts/tree", wire_dtype="bfloat16")
    assert carried([{"kind": "carried", "algorithm": "ring"}]) == Carried(algorithm="ring")
