"""Own times and records to test on, made from seeds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ringside.monitor import RunInfo, StepRecord


def own_times(steps: int, ranks: int, *, jitter: float = 0.02, seed: int = 0) -> np.ndarray:
    """Healthy own times around 0.1 s, [steps, ranks]."""
    return 0.1 * np.exp(np.random.default_rng(seed).normal(0, jitter, (steps, ranks)))


def records_of(own: np.ndarray, **fields: float) -> list[StepRecord]:
    """Records as an ideal job of these own times writes them: everybody is blocked until the slowest is there."""
    return [
        StepRecord(
            step=step,
            rank=rank,
            ended_unix=1.7e9 + step,
            step_seconds=float(row.max()) + 0.004,
            own_seconds=float(value),
            wait_seconds=float("nan"),
            exposed_seconds=float(row.max() - value) + 0.004,
            **fields,
        )
        for step, row in enumerate(own)
        for rank, value in enumerate(row)
    ]


def run_info(ranks: int, name: str = "test") -> RunInfo:
    return RunInfo(
        schema=1,
        name=name,
        started_unix=1.7e9,
        command=["train.py"],
        world_size=ranks,
        hosts=[f"host-{rank // 4}" for rank in range(ranks)],
        pids=[100 + rank for rank in range(ranks)],
        engine="ringside",
        algorithm="push",
    )


@pytest.fixture
def make_own() -> Callable[..., np.ndarray]:
    return own_times


@pytest.fixture
def make_records() -> Callable[..., list[StepRecord]]:
    return records_of


@pytest.fixture
def make_info() -> Callable[..., RunInfo]:
    return run_info
