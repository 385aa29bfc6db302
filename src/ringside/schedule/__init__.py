"""All-reduce algorithms as data: made, proved right, and run in the plainest way. Pure NumPy.

`ring(8)` is a `Schedule`; `verify(ring(8))` is the proof and the audit. Every other room reads schedules: engines run
them, the predictor prices them, the drawing shows them.
"""

from ringside.schedule.audit import Audit, Problem
from ringside.schedule.catalogue import ALGORITHMS, by_name
from ringside.schedule.direct import direct
from ringside.schedule.reference import chunk_bounds, contributions, run
from ringside.schedule.ring import ring
from ringside.schedule.schedule import Round, Schedule, from_rounds
from ringside.schedule.verify import verify

__all__ = [
    "ALGORITHMS",
    "Audit",
    "Problem",
    "Round",
    "Schedule",
    "by_name",
    "chunk_bounds",
    "contributions",
    "direct",
    "from_rounds",
    "ring",
    "run",
    "verify",
]
