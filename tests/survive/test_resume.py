"""Real workers whose job ends too early: it goes on from its checkpoint, with other ranks, and counts nothing twice."""

import json
from pathlib import Path

import pytest
from tests.survive.herd import run_isolated

pytest.importorskip("torch")

SCRIPT = str(Path(__file__).with_name("resuming.py"))
STEPS = 30


@pytest.fixture(scope="module")
def jobs():
    """What became of each, by name; they run in one process, because a worker's imports take longer than a job."""
    names = ("fewer", "storeless", "too_few")
    lines = run_isolated(SCRIPT, *names, limit_s=150).splitlines()
    return dict(zip(names, map(json.loads, lines), strict=True))


def test_another_number_of_ranks_goes_on_with_the_samples_that_remain(jobs):
    four, two, five = jobs["fewer"]
    assert [len(job["deaths"]) for job in (four, two)] == [4, 2]
    assert four["saved"] in (5, 10)  # all died in step 12, perhaps while that of step 10 was being written
    assert two["saved"] in (15, 20)
    assert (five["wrong"], five["errors"], five["deaths"]) == ([], [], [])  # the multiset of all 30 steps, exactly
    assert set(five["steps"].values()) == {STEPS}
    assert len(five["steps"]) == 5


def test_when_the_store_dies_all_ranks_stop_and_leave_a_checkpoint_that_is_gone_on_from(jobs):
    first, again = jobs["storeless"]
    assert first["errors"] == ["SystemExit: 75"] * 3
    assert first["wrong"] == ["nobody finished"]
    assert all(any("rank" in line and "ends: " in line for line in log) for log in first["logs"].values())
    assert any("the state is saved in" in line for log in first["logs"].values() for line in log)
    assert first["saved"] in (10, 11)  # committed before the store died
    assert (again["wrong"], again["errors"]) == ([], [])
    assert again["steps"] == {"0": STEPS, "1": STEPS}


def test_with_fewer_ranks_than_are_needed_the_job_ends_with_a_checkpoint_and_a_reason(jobs):
    few = jobs["too_few"]
    assert len(few["errors"]) == 2
    assert all("2 ranks are left and 3 are needed: start the job again, it resumes" in error for error in few["errors"])
    assert few["saved"] == 8
