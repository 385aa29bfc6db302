"""Traces read in pieces: the same events whatever the pieces, and everything that is whole of a broken one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringside.doctor.files import chrome_trace as kineto_stream

from .scans import EVENTS, scanned


@pytest.fixture(params=[64, 700, 4096, 1 << 22])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(kineto_stream, "BLOCK_BYTES", request.param)
    return int(request.param)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("first", [True, False])
def test_every_event_and_both_parts_of_the_header(block, indent, first):
    head: dict[str, Any] = {"distributedInfo": {"rank": 3, "pg_config": [{"pg_name": "0"}, {"pg_name": "1"}]}}
    tail = {"deviceProperties": [{"id": 0}, {"id": 1}], "traceName": "x", "baseTimeNanoseconds": 5}
    content = {**(head if first else {}), "traceEvents": EVENTS, **tail, **({} if first else head)}
    events, scan = scanned(json.dumps(content, indent=indent).encode())
    assert [event.name for event in events] == [event["name"] for event in EVENTS]
    assert [event.ts for event in events] == [event["ts"] for event in EVENTS]
    assert scan.header == {**head, **tail}
    assert scan.losses() == ""


def test_a_bare_list_of_events(block):
    events, scan = scanned(json.dumps(EVENTS).encode())
    assert len(events) == 50
    assert scan.losses() == ""


def test_no_events_at_all(block):
    events, scan = scanned(b'{"traceEvents": [ ], "traceName": "x"}')
    assert events == []
    assert scan.whole
    assert scan.header == {"traceName": "x"}


@settings(max_examples=60, deadline=None)
@given(st.integers(min_value=0, max_value=20_000))
def test_a_broken_one_gives_its_whole_events(cut):
    text = json.dumps({"schemaVersion": 1, "traceEvents": EVENTS}, indent=1).encode()
    cut = min(cut, len(text) - 4)
    events, scan = scanned(text[:cut])
    begun = text[:cut].count(b'"ph"')
    assert begun - 1 <= len(events) <= begun
    assert [event.name for event in events] == [event["name"] for event in EVENTS[: len(events)]]
    assert "breaks off" in scan.losses()


def test_damaged_events_are_counted_and_the_others_kept(block):
    parts = [json.dumps({"ph": "X", "cat": "c", "name": f"n{number}", "ts": number}) for number in range(40)]
    parts[7] = parts[7].replace('"n7"', '"n\x017"')
    parts[30] = parts[30].replace('"ts": 30', '"ts": NaN')
    events, scan = scanned(('{"traceEvents": [' + ",\n".join(parts) + "]}").encode())
    assert [event.name for event in events] == [f"n{number}" for number in range(40) if number not in (7, 30)]
    assert "2 events are damaged" in scan.losses()
    assert scan.whole


def test_an_event_without_an_end_is_not_gathered_for_ever(monkeypatch):
    monkeypatch.setattr(kineto_stream, "BLOCK_BYTES", 64)
    monkeypatch.setattr(kineto_stream, "LARGE_EVENT_BYTES", 1000)
    events, scan = scanned(b'{"traceEvents": [{"name": "' + b"x" * 100_000)
    assert events == []
    assert scan.damaged > 50


def test_what_is_no_trace_at_all():
    events, scan = scanned(b"{" + b" " * 1000 + b'"a": 1}')
    assert events == []
    assert not scan.whole
