"""Record, detect, explain: who holds the job up, since when, why, and what it costs."""

from ringside.monitor.run.records import SCHEMA, RunInfo, StepRecord
from ringside.monitor.slow_rank.detector import Detector, detect
from ringside.monitor.verdict import KINDS, Verdict, VerdictEvent

__all__ = ["KINDS", "SCHEMA", "Detector", "RunInfo", "StepRecord", "Verdict", "VerdictEvent", "detect"]
