"""Own times of real jobs, as recorded: `data/*.json.gz` hold seconds, [steps, ranks]."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np

from ringside.monitor import detect

DATA = Path(__file__).parent / "data"


def recorded(name: str) -> np.ndarray:
    return np.array(json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes())))


def test_a_rank_that_is_twice_as_slow_from_step_40_on_is_named_after_a_noisy_start() -> None:
    verdicts = detect(recorded("noisy_start"))
    assert [(verdict.kind, verdict.ranks) for verdict in verdicts] == [("slow_rank", [1])]
    assert verdicts[0].since_step == 40
    assert verdicts[0].detected_step < 60


def test_a_rank_that_is_throttled_for_good_is_named_though_noise_before_it_came_in_bursts() -> None:
    verdicts = detect(recorded("throttled"))
    assert [(verdict.kind, verdict.ranks) for verdict in verdicts] == [("slow_rank", [1])]
    assert verdicts[0].since_step == 48
    assert verdicts[0].excess_ratio > 5
