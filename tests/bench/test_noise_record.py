"""Recorded noise: times survive being kept as integers, and a job of two ranks becomes arrays."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from bench.common import ROOT, module_command
from bench.detection import record
from bench.detection.record import LOG_STEP, PHASES, VITALS, Job, decode, encode, jobs, run
from bench.detection.recorded import DAY, conditions, healthy_jobs, oracle, poisson_ends, score, with_faults
from tests.support import zygote
from tests.support.waiting import free_port


def test_times_are_kept_within_half_a_step_of_the_scale() -> None:
    seconds = np.array([1e-5, 0.0123, 0.5, 60.0])
    assert np.allclose(decode(encode(seconds)), seconds, rtol=0.51 * LOG_STEP)
    assert decode(encode(np.array([0.0, np.nan, -1.0]))).tolist() == [0.0, 0.0, 0.0]


def test_a_seed_draws_the_same_jobs_and_each_load_in_turn() -> None:
    first, again = ([next(drawn) for _ in range(40)] for drawn in (jobs(np.random.default_rng(5), 1.0) for _ in (0, 1)))
    assert first == again
    assert [job.load for job in first[:5]] == ["quiet", "busy 1", "busy 2", "quota", "pair"]
    assert sum(bool(job.fault) for job in first) == 10


def test_a_rank_that_takes_a_third_longer_is_found_in_recorded_noise_of_ranks_that_wait() -> None:
    name, job, times = next(healthy_jobs([ROOT / "tests/data/noise/a0.npz"]))
    assert (name, job.ranks, job.model, job.load) == ("a0.0", 4, "waiting", "quiet")
    found = score(with_faults(times, 0.3, 10, 1))
    assert found["found"] == 1.0
    assert found["median"] <= 8
    assert found["wrong"] == 0
    assert found["price"] == pytest.approx(1.0, abs=0.1)


def test_beside_a_busy_loop_a_rank_is_found_by_what_it_needs_without_its_waits_for_a_cpu() -> None:
    jobs = healthy_jobs([ROOT / "tests/data/noise/b0.npz"])
    name, job, times = next(each for each in jobs if each[1].load == "busy 1")
    assert (name, job.ranks, job.model) == ("b0.1", 4, "mlp")
    unknown = times.copy()
    unknown[-1] = 0.0
    known, without = (score(with_faults(each, 0.3, 10, 1)) for each in (times, unknown))
    assert known["found"] == 1.0
    assert known["wrong"] == 0
    assert known["median"] <= 12
    assert known["median"] < without["median"]


@pytest.mark.thorough
def test_who_knows_noise_and_size_needs_no_longer_where_ranks_wait_and_longer_for_less() -> None:
    _, _, times = next(healthy_jobs([ROOT / "tests/data/noise/a0.npz"]))
    delays = []
    for size in (0.3, 0.02):
        faulty = with_faults(times, size, 10, 1)
        delays.append(oracle(times, faulty, size, is_input=False))
    assert np.median(delays[0]) <= score(with_faults(times, 0.3, 10, 1))["median"]
    assert np.median(delays[0]) < np.median(delays[1])


def test_conditions_have_intervals_that_hold_what_was_counted() -> None:
    job = {"ranks": 2, "model": "gpt", "load": "busy 1", "wrong": 1, "alarms": 2, "steps": 86_400, "prices": np.ones(1)}
    slow, fast = np.array([40.0, 50.0, np.inf, 60.0]), np.array([5.0, 6.0, 7.0, 8.0])
    rows = [
        {**job, "name": name, "delays": delays, "oracle_delays": delays - 1}
        for name, delays in (("a0.1", slow), ("a0.2", slow), ("b0.0", fast))
    ]
    (found,) = conditions(rows)
    assert (found["condition"], found["sessions"], found["runs"]) == ("2 ranks that compute, busy 1", 2, 12)
    share, low, high = found["found"]
    assert share == pytest.approx(10 / 12)
    assert low <= share <= high == 1.0
    middle, low, high = found["median"]
    assert low < middle < high, "whole sessions are drawn"
    assert (found["wrong"], found["alarms_per_day"][0]) == (3, pytest.approx(2.0))


def test_poissons_interval() -> None:
    assert poisson_ends(0) == (0.0, pytest.approx(3.689, abs=1e-3))
    assert poisson_ends(5) == (pytest.approx(1.623, abs=1e-3), pytest.approx(11.668, abs=1e-3))
    assert DAY == 86_400


@pytest.mark.native
def test_a_job_becomes_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "module_command", partial(module_command, python=zygote.python()))
    cores = sorted(os.sched_getaffinity(0))[:2]
    job = Job(2, "mlp", "ringside", "quiet", 0.5, "slow:rank=1,factor=1.5,from_step=8")
    (found,) = run(job, cores, tmp_path, free_port())
    times = decode(found["times"])
    assert times.shape[0] == len(PHASES)
    assert times.shape[1] >= 64
    assert times.shape[2] == 2
    assert (times[PHASES.index("own"), 1:] > 0).all()
    assert found["vitals"].shape[1] == 2 + len(VITALS)
