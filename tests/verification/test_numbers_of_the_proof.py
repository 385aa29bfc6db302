"""The proof in numbers: what was looked at the last time, to the last state, message and microsecond.

A run of the simulation is a function of its case, and a small job has so many states, no more and no fewer. Whatever
changes in the state machine, in what happens to it or in the order of that, shows here; whether that was wanted, the
invariants of `test_proof.py` do not say. Where it was, the new numbers are printed by the test that fails.
"""

from collections import defaultdict

import pytest

from verification.survive.__main__ import SMALL_JOBS
from verification.survive.kill_matrix import matrix_cases, run_case
from verification.survive.model_checker import Bounds, explore

MATRIX = {
    "ALL_ASLEEP": (11, 57, 17.43428),
    "ALL_GONE": (14, 61, 10.978132),
    "CORRUPT": (8, 40, 6.327474),
    "DEATH": (8, 40, 6.046979),
    "DELAYED": (12, 60, 10.376699),
    "DRAINED": (7, 35, 5.256397),
    "HALF_OPEN": (11, 50, 8.223069),
    "KILL": (6, 30, 4.927872),
    "LATE_STORE": (13, 65, 8.979019),
    "LOST": (8, 35, 6.43808),
    "REPLACED": (13, 60, 11.374899),
    "STALL": (8, 40, 11.120221),
    "SUSPECTED": (4, 20, 3.233719),
    "ZOMBIE": (13, 60, 10.713595),
}

STATES = {
    Bounds(ranks=2, steps=1, crashes=1, returns=1, most_states=5000): (5000, 13160),
    Bounds(ranks=2, steps=1, crashes=0, returns=1, drains=1): (454, 1523),
    Bounds(ranks=2, steps=2, crashes=0, quits=1, most_states=1500): (1500, 4197),
    Bounds(ranks=3, steps=1, crashes=0, cuts=1, most_states=1500): (1500, 3849),
    Bounds(ranks=2, steps=1, crashes=1, returns=1, cuts=1, most_states=1500): (1501, 3150),
    Bounds(ranks=2, steps=1, crashes=1, mistakes=1, most_states=1500): (1500, 3841),
    Bounds(ranks=2, steps=1, crashes=0, retries=2, most_states=1500): (1500, 3749),
    Bounds(ranks=2, steps=1, crashes=0, differences=1): (851, 3111),
    Bounds(ranks=2, steps=1, crashes=1, returns=1, foreign=True, gives_up=True, most_states=3000): (3001, 9470),
}

OF_SMALL_JOBS = (2474, 13016, 64229, 105825, 187824, 32646, 44294, 20289, 13262, 29688, 2407)


def test_every_kind_of_fault_takes_as_many_steps_and_as_long_as_the_last_time():
    """By kind: faults that found their moment, COMMITs, simulated seconds."""
    found = defaultdict(lambda: [0, 0, 0.0])
    for case in matrix_cases(seed=1, count=130):
        result, row = run_case(case), found[case.faults[-1].kind.name]
        row[0] += result.struck
        row[1] += result.commits
        row[2] += result.simulated_s
    assert {name: (*counts, round(seconds, 6)) for name, (*counts, seconds) in found.items()} == MATRIX


@pytest.mark.parametrize("bounds", STATES)
def test_a_small_job_has_as_many_states_and_ways_between_them_as_the_last_time(bounds):
    found = explore(bounds)
    assert (found.broken, found.states, found.transitions) == ((), *STATES[bounds])


@pytest.mark.parametrize(
    ("bounds", "states"),
    [  # 5,000 states a second
        pytest.param(bounds, states, marks=pytest.mark.long if states > 15_000 else pytest.mark.thorough)
        for bounds, states in zip(SMALL_JOBS, OF_SMALL_JOBS, strict=True)
    ],
)
def test_every_state_of_the_small_jobs_of_make_prove_is_looked_at(bounds, states):
    found = explore(bounds)
    assert (found.broken, found.complete, found.states) == ((), True, states)
