"""Workers on hosts of the network lab, links that go silent: nobody is told, and every sample counts exactly once."""

import json
from pathlib import Path

import pytest
from tests.survive.herd import run_isolated

from ringside.lab import Lab

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(bool(Lab.unavailable()), reason=Lab.unavailable() or "there is a lab"),
    pytest.mark.long,  # `test_real.py` has the quicker cases
    pytest.mark.timeout(300),  # the first of them runs all cases
]

SCRIPT = str(Path(__file__).with_name("silence.py"))


@pytest.fixture(scope="module")
def told():
    """What became of each case, by name; they run in one process, because a worker's imports take longer than a job."""
    out = run_isolated(SCRIPT, "around", "parted", "behind", "orphaned", limit_s=270)
    return json.loads(out)


def lines(case, rank, word):
    """Return what a rank logged that has a word in it."""
    return [line for line in case["logs"][str(rank)] if word in line]


def test_a_silent_link_is_gone_around_with_all_ranks(told):
    for case in told["around"]:
        assert (case["wrong"], case["errors"], case["last"]) == ([], [], [0, 1, 2])
        assert case["left"] == {"0": "", "1": "", "2": ""}


def test_of_two_ranks_without_a_way_one_goes_on_and_the_other_comes_back_with_the_link(told):
    parted = told["parted"]
    assert (parted["wrong"], parted["errors"]) == ([], [])
    assert parted["left"] == {"0": "", "1": ""}
    (left,) = lines(parted, 1, "leaves: generation")
    asked = lines(parted, 1, "gets no connection to rank 0: it asks to join again in 5 s")
    assert "goes on without rank 1" in left
    assert len(asked) == 1
    assert parted["alone"]
    assert parted["last"] == [0, 1]


def test_a_rank_that_cannot_reach_the_store_ends_and_the_others_go_on(told):
    behind = told["behind"]
    assert (behind["wrong"], behind["errors"]) == ([], ["SystemExit: 75"])
    assert behind["left"] == {"0": "", "1": ""}
    assert behind["last"] == [0, 1]
    (why,) = lines(behind, 2, "ERROR")
    assert "rank 2 ends: the store did not answer within 20 s" in why
    assert lines(behind, 0, "the job is over without rank 2")


def test_who_has_the_state_goes_on_where_a_leader_that_comes_back_cannot_fetch_it(told):
    orphaned = told["orphaned"]
    assert (orphaned["wrong"], orphaned["errors"]) == ([], ["SystemExit: 76"])
    assert orphaned["left"]["1"] == ""
    assert not lines(orphaned, 1, "leaves")
    # At the end rank 0 is waited for, and in vain. Nobody runs its last lines, and both say where the state lies.
    assert lines(orphaned, 1, "the job is over without rank 0: the final state lies in ")
    assert lines(orphaned, 0, "rank 0 came too late for the final state: it lies in ")
