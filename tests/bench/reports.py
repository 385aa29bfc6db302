"""A plan and what its ranks report, for tables of benchmarks."""

from __future__ import annotations

from ringside.bench.messages import Done, Limit, Message, Sample, Skipped
from ringside.bench.plan import BenchPlan

SIZE = 64 << 20
PLAN = BenchPlan(key="test", ranks=2, sizes_bytes=(1024, SIZE), peers=("gloo", "mpi"))


def sample(
    engine: str, tensor: str, size: int, seconds: tuple[float, ...], cache: str = "warm", wrong: int = 0
) -> Sample:
    return Sample(engine, "auto", tensor, cache, size, 1, 10, seconds, wrong)


def report(delay: float, wrong: int = 0) -> list[Message]:
    return [
        Skipped("mpi", "sum of float32: not today"),
        Limit(1000, (1e-6, 2e-6, 4e-6 + delay)),
        sample("ringside", "symmetric", 1024, (2e-6, 1e-6 + delay, 9e-6), wrong=wrong),
        sample("ringside", "private", 1024, (4e-6, 4e-6, 4e-6)),
        sample("gloo", "private", 1024, (200e-6, 100e-6, 300e-6)),
        sample("ringside", "symmetric", SIZE, (0.004, 0.004, 0.004), "any"),
        sample("ringside", "private", SIZE, (0.008, 0.008, 0.008), "any"),
        sample("gloo", "private", SIZE, (0.04, 0.04, 0.04), "any"),
        Done(),
    ]
