"""Recorded noise: times survive being kept as integers, and a job of two ranks becomes arrays."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from bench.common import ROOT
from bench.detection.record import LOG_STEP, PHASES, VITALS, Job, decode, encode, jobs, run
from bench.detection.recorded import healthy_jobs, score, with_faults
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
    found = score(*with_faults(times, 0.3, 10, 1))
    assert found["found"] == 1.0
    assert found["median"] <= 8
    assert found["wrong"] == 0


def test_beside_a_busy_loop_a_rank_is_found_by_what_it_needs_without_its_waits_for_a_cpu() -> None:
    jobs = healthy_jobs([ROOT / "tests/data/noise/b0.npz"])
    name, job, times = next(each for each in jobs if each[1].load == "busy 1")
    assert (name, job.ranks, job.model) == ("b0.1", 4, "mlp")
    unknown = times.copy()
    unknown[-1] = 0.0
    known, without = (score(*with_faults(each, 0.3, 10, 1)) for each in (times, unknown))
    assert known["found"] == 1.0
    assert known["wrong"] == 0
    assert known["median"] <= 12
    assert known["median"] < without["median"]


@pytest.mark.native
def test_a_job_becomes_arrays(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    job = Job(2, "mlp", "ringside", "quiet", 0.5, "slow:rank=1,factor=1.5,from_step=8")
    (found,) = run(job, cores, tmp_path, free_port())
    times = decode(found["times"])
    assert times.shape[0] == len(PHASES)
    assert times.shape[1] >= 64
    assert times.shape[2] == 2
    assert (times[PHASES.index("own"), 1:] > 0).all()
    assert found["vitals"].shape[1] == 2 + len(VITALS)
