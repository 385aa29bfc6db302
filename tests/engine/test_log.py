"""What collectives between hosts took, summed up."""

from __future__ import annotations

import math

from ringside.engine.shm.log import PATHS, AcrossLog


def test_sums_begin_anew_when_they_were_read() -> None:
    log = AcrossLog()
    for name, sync_ns, size_bytes in (("hosts/ring", 5, 100), ("native", 7, 20), ("hosts/ring", 1, 3)):
        log.note(name, sync_ns, size_bytes)
    totals = log.totals()
    assert (totals.collectives, totals.sync_ns, totals.wire_ns, totals.payload_bytes) == (3, 13, 0, 123)
    assert totals.by_name == {"hosts/ring": 2, "native": 1}
    assert totals.by_path == [0] * len(PATHS)
    assert math.isnan(totals.last_wait_ns), "when ranks of other hosts arrived is not known"
    assert (log.totals().collectives, log.totals().sync_ns, log.totals().payload_bytes) == (0, 0, 0)
