"""Own times and records to test on, made from seeds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.recorded_runs import own_times

from ringside.monitor import RunInfo, StepRecord

from .jobs import records_of, run_info


@pytest.fixture
def make_own() -> Callable[..., np.ndarray]:
    return own_times


@pytest.fixture
def make_records() -> Callable[..., list[StepRecord]]:
    return records_of


@pytest.fixture
def make_info() -> Callable[..., RunInfo]:
    return run_info
