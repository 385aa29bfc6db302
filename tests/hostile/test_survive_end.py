"""The end of a job that survives: whoever dies at it or was drained, what a last line saves is the final state."""

import json
from pathlib import Path

import pytest
from tests.hostile.ending import CASES, RANKS, STEPS
from tests.survive.counting import BATCH, SAMPLES
from tests.survive.herd import run_isolated

pytest.importorskip("torch")

SCRIPT = str(Path(__file__).with_name("ending.py"))


def trained(steps):
    """Return what the counting model is after some steps, by number of times a sample may have been seen."""
    low, more = divmod(steps * BATCH, SAMPLES)
    return {float(low): SAMPLES - more, float(low + 1): more}


def counts(saved):
    return {times: saved.count(times) for times in sorted(set(saved))}


QUICK = ("late", "last lines", "drained")


def run(names):
    """Return what became of some cases, by name; they run in one process, because imports take longer than a job."""
    lines = run_isolated(SCRIPT, *names, limit_s=170).splitlines()
    return dict(zip(names, map(json.loads, lines), strict=True))


def saves_the_final_state(name, job):
    steps = CASES[name].get("steps", STEPS)
    assert (job["errors"], job["timed_out"], job["unattended"]) == ([], False, False)
    assert counts(job["saved"]) == {times: many for times, many in trained(steps).items() if many}
    assert {end["step"] for end in job["ended"].values()} == {steps}
    assert len({end["digest"] for end in job["ended"].values()}) == 1
    assert {end["left"] for end in job["ended"].values()} == {""}
    assert len(job["ended"]) == RANKS
    assert job["kept"] == []  # nothing is left behind


@pytest.mark.core
def test_what_the_last_line_saves_is_the_final_state_whoever_died_or_was_drained():
    jobs = run(QUICK)
    for name, job in jobs.items():
        saves_the_final_state(name, job)
    assert [rank for rank, _ in jobs["late"]["deaths"]] == [0]
    assert jobs["late"]["ended"]["0"]["seen"] == 0
    assert sorted(rank for rank, _ in jobs["last lines"]["deaths"]) == [0, 1]
    assert jobs["drained"]["ended"]["0"]["seen"] < 30


@pytest.fixture(scope="module")
def jobs():
    return run([name for name in CASES if name not in QUICK])


@pytest.mark.long
@pytest.mark.parametrize("name", ["early", "all after the last commit", "over", "hosts"])
def test_more_deaths_around_the_end(jobs, name):
    saves_the_final_state(name, jobs[name])
    died = sorted(rank for rank, _ in jobs[name]["deaths"])
    assert died == {"early": [0, 0], "hosts": [0]}.get(name, [0, 1, 2])
    if name == "all after the last commit":
        assert max(end["seen"] for end in jobs[name]["ended"].values()) == 0  # no step is done again


@pytest.mark.long
def test_a_rank_that_wants_no_further_step_ends_the_job_with_one_state_for_all(jobs):
    left = jobs["left"]
    assert (left["errors"], left["timed_out"]) == ([], False)
    assert {end["step"] for end in left["ended"].values()} == {7}
    assert len({end["digest"] for end in left["ended"].values()}) == 1
    assert counts(left["saved"]) == {times: many for times, many in trained(7).items() if many}
    assert left["ended"]["1"]["left"] == ""
    assert left["ended"]["0"]["left"] == left["ended"]["2"]["left"] == "another rank ended the job after 7 steps"


@pytest.mark.long
def test_where_rank_0_cannot_come_the_keepers_say_so_and_the_final_state_is_in_a_file(jobs):
    stranger = jobs["stranger"]
    assert stranger["errors"] == ["SystemExit: 77"]
    assert (stranger["saved"], stranger["unattended"], stranger["timed_out"]) == (None, True, False)
    ((step, weights),) = stranger["kept"]
    assert step == STEPS
    assert counts(weights) == {times: many for times, many in trained(STEPS).items() if many}
    assert stranger["named"] == [True]
