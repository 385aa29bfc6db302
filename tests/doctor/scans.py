"""Events that are hard to take apart, and what a scan finds of a trace."""

from __future__ import annotations

import io

from ringside.doctor.files.chrome_trace import Scan
from ringside.doctor.kineto.collector import TraceEvent

EVENTS = [
    {"ph": "X", "cat": "cpu_op", "name": f'odd "}}, {{ ] name {number}', "ts": number + 0.5, "dur": 1, "pid": 1,
     "tid": "a", "args": {"list": [{"a": 1}, {"b": [1, 2]}], "text": "}, {"}}
    for number in range(50)
]  # fmt: skip


def scanned(text: bytes) -> tuple[list[TraceEvent], Scan[TraceEvent]]:
    scan = Scan(io.BytesIO(text), TraceEvent)
    return [event for batch in scan.batches() for event in batch], scan
