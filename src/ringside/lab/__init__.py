"""The network lab: hosts as network namespaces on one machine, for tests, benchmarks and `ringside lab`."""

from ringside.lab.lab import Lab
from ringside.lab.namespaces import remove_leftovers
from ringside.lab.processes import RankPlacement, RankResult, RunResult
from ringside.lab.wiring import parse_delay, parse_rate, payload_bytes_per_second

__all__ = [
    "Lab",
    "RankPlacement",
    "RankResult",
    "RunResult",
    "parse_delay",
    "parse_rate",
    "payload_bytes_per_second",
    "remove_leftovers",
]
