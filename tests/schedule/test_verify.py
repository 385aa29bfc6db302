from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringside.errors import UsageError
from ringside.schedule import (
    ALGORITHMS,
    Audit,
    Problem,
    Round,
    Schedule,
    by_name,
    contributions,
    from_rounds,
    ring,
    run,
    verify,
)
from ringside.schedule.proof.expressions import Expressions

Rows = list[tuple[int, int, int, bool]]


def edited(schedule: Schedule, k: int, edit: Callable[[Rows], Rows]) -> Schedule:
    """Return the schedule with the transfers of round k edited."""
    rounds = [schedule.round(j) for j in range(schedule.rounds)]
    rounds[k] = Round.of(edit(list(rounds[k])))
    switches, collective = schedule.switches, schedule.collective
    return from_rounds(schedule.name, schedule.ranks, schedule.chunks, rounds, switches=switches, collective=collective)


def without(schedule: Schedule, k: int, i: int) -> Schedule:
    return edited(schedule, k, lambda rows: rows[:i] + rows[i + 1 :])


def written_out(ranks: int, chunks: int, *rounds: Sequence[Sequence[int]]) -> Schedule:
    return from_rounds("handmade", ranks, chunks, [Round.of(rows) for rows in rounds])


def recursive_doubling(n: int) -> Schedule:
    """For a power of two: everybody adds what the rank that differs in bit k has."""
    return written_out(n, 1, *([(r, r ^ bit, 0, 1) for r in range(n)] for bit in (1, 2, 4, 8, 16) if bit < n))


def only(audit: Audit) -> Problem:
    assert not audit.ok
    assert len(audit.problems) == 1, audit.problems
    return audit.problems[0]


def place(problem: Problem) -> tuple[str, int, int, int | None]:
    return problem.kind, problem.rank, problem.chunk, problem.round


def test_a_dropped_reduction_is_missing():
    problem = only(verify(without(ring(4), 1, 2)))
    # Chunk 0 should have reached rank 3 in round 1; rank 0 finishes it without ranks 1 and 2.
    assert place(problem) == ("missing", 0, 0, 2)
    assert "chunk 0 of ranks 0-3 ends as (x0+x3) (written in round 3)" in problem.message
    assert "without the contributions of ranks 1 and 2" in problem.message


def test_a_dropped_copy_is_missing_where_it_should_have_arrived():
    problem = only(verify(without(by_name("direct", 3), 1, 0)))
    assert place(problem) == ("missing", 1, 0, None)
    assert "chunk 0 of rank 1 ends as x1 (no round writes it)" in problem.message


def test_a_result_overwritten_by_something_older_is_missing():
    schedule = written_out(2, 1, [(0, 1, 0, 1)], [(1, 0, 0, 0), (0, 1, 0, 0)])
    assert place(only(verify(schedule))) == ("missing", 1, 0, 1)


def test_a_repeated_reduction_is_double():
    problem = only(verify(edited(ring(4), 1, lambda rows: [*rows, rows[2]])))
    assert place(problem) == ("double", 3, 0, 1)
    assert "with the contributions of ranks 1 and 2 more than once, first so on rank 3 in round 2" in problem.message


def test_adding_in_an_all_gather_is_double():
    problem = only(verify(edited(ring(3), 3, lambda rows: [(s, d, c, r or d == 2) for s, d, c, r in rows])))
    assert place(problem) == ("double", 2, 0, 3)


def test_a_sum_that_doubles_in_every_round_does_not_blow_up():
    schedule = written_out(2, 1, *[[(0, 1, 0, 1), (1, 0, 0, 1)]] * 100)
    audit = verify(schedule)
    assert {problem.kind for problem in audit.problems} == {"double"}
    assert (audit.problems[0].rank, audit.problems[0].round) == (0, 1)


def test_complete_sums_in_different_orders_are_named():
    # Rank 0 reads everybody in one fold; the others get the sum of two pairs.
    first = [(1, 0, 0, 1), (2, 0, 0, 1), (3, 0, 0, 1), (0, 1, 0, 1), (3, 2, 0, 1)]
    schedule = written_out(4, 1, first, [(2, 1, 0, 1)], [(1, 2, 0, 0), (1, 3, 0, 0)])
    audit = verify(schedule)
    assert place(only(audit)) == ("order", 0, 0, 0)
    assert "rank 0 ends as (((x0+x1)+x2)+x3) (written in round 1)" in audit.problems[0].message
    assert "but of ranks 1-3 as ((x0+x1)+(x2+x3))" in audit.problems[0].message
    assert (audit.expression(0, rank=0), audit.expression(0, rank=3)) == ("(((x0+x1)+x2)+x3)", "((x0+x1)+(x2+x3))")


def test_swapped_operands_are_the_same_sum():
    # In an exchange rank 0 computes x0+x1 and rank 1 as well, though each adds what it got to its own.
    assert verify(written_out(2, 1, [(0, 1, 0, 1), (1, 0, 0, 1)])).ok
    # ((x1+x2)+x0) on rank 0, (x0+(x1+x2)) by the fold on rank 1: one tree.
    assert verify(written_out(3, 1, [(2, 1, 0, 1)], [(0, 1, 0, 1), (1, 0, 0, 1)], [(1, 2, 0, 0)])).ok


def test_an_overwrite_beside_another_write_is_unordered():
    problem = verify(edited(ring(4), 3, lambda rows: [*rows, (3, 1, 0, True)])).problems[0]
    assert place(problem) == ("order", 1, 0, 3)
    assert "in round 4 ranks 0 and 3 write into chunk 0 of rank 1 at once" in problem.message


def test_recursive_doubling_needs_one_buffer():
    assert verify(recursive_doubling(8)).ok
    assert verify(recursive_doubling(32)).rounds == verify(recursive_doubling(32)).lower_bound_rounds == 5


def test_opposite_orders_deadlock_with_one_buffer():
    exchange = [(0, 1, 0, 1), (0, 1, 1, 1), (1, 0, 1, 1), (1, 0, 0, 1)]
    schedule = written_out(2, 2, exchange)
    problem = only(verify(schedule))
    assert place(problem) == ("deadlock", 0, 1, 0)
    assert "rank 0 holds a message for chunk 1 and waits for rank 1 to read that chunk" in problem.message
    assert "rank 1 holds a message for chunk 0 and waits for rank 0 to read that chunk" in problem.message
    assert "with 2 buffers instead of 1" in problem.message
    assert verify(schedule, buffers=2).ok
    assert verify(written_out(2, 2, sorted(exchange, key=lambda row: row[2]))).ok


def test_a_schedule_that_deadlocks_has_no_sum_to_call_canonical():
    """Its expressions would be in ascending rank order, if ever it came to an end."""
    schedule = written_out(2, 2, [(0, 1, 0, 1), (0, 1, 1, 1), (1, 0, 1, 1), (1, 0, 0, 1)])
    assert not verify(schedule).canonical
    assert verify(schedule, buffers=2).canonical


def test_a_cycle_of_three_deadlocks():
    # Every rank is first given the chunk that its right neighbour reads last.
    rows = [(r, (r + 1) % 3, c, 1) for r in range(3) for c in ((r + 2) % 3, (r + 1) % 3, r)]
    kinds = [p for p in verify(written_out(3, 3, rows)).problems if p.kind == "deadlock"]
    assert len(kinds) == 1
    assert kinds[0].round == 0
    assert not [p for p in verify(written_out(3, 3, rows), buffers=3).problems if p.kind == "deadlock"]


def test_messages_out_of_rank_order_need_room():
    rows = [(2, 0, 0, 1), (1, 0, 0, 1)]
    schedule = written_out(3, 1, rows, [(0, 1, 0, 0), (0, 2, 0, 0)])
    problem = only(verify(schedule))
    assert place(problem) == ("deadlock", 0, 0, 0)
    assert "list them in rank order" in problem.message
    assert verify(schedule, buffers=2).ok


@pytest.mark.parametrize(
    ("row", "rank", "chunk", "words"),
    [
        ((0, 4, 1, 1), 4, 1, "in round 3 rank 0 sends chunk 1 to rank 4, but there is no rank 4, only ranks 0-3"),
        ((-1, 2, 1, 1), -1, 1, "there is no rank -1"),
        ((0, 1, 9, 0), 0, 9, "there is no chunk 9, only chunks 0 to 3"),
        ((3, 3, 1, 1), 3, 1, "in round 3 rank 3 sends chunk 1 to rank 3, but a rank cannot send to itself"),
    ],
)
def test_malformed_transfers(row: tuple[int, int, int, bool], rank: int, chunk: int, words: str):
    problem = only(verify(edited(ring(4), 2, lambda rows: [*rows, row])))
    assert place(problem) == ("malformed", rank, chunk, 2)
    assert words in problem.message


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(sorted(ALGORITHMS)), st.integers(2, 24), st.data())
def test_no_transfer_is_superfluous(name: str, ranks: int, data: st.DataObject):
    schedule = by_name(name, ranks)
    k = data.draw(st.integers(0, schedule.rounds - 1))
    i = data.draw(st.integers(0, len(schedule.round(k)) - 1))
    assert not verify(without(schedule, k, i)).ok


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_change_of_one_transfer_is_judged_as_its_numbers_are(name: str, ranks: int):
    schedule = by_name(name, ranks)
    inputs = np.random.default_rng(0).standard_normal((ranks, schedule.chunks)).astype(np.float32)
    vertices = range(schedule.vertices)
    everything = list(itertools.product(vertices, vertices, range(schedule.chunks), (False, True)))
    for k in range(schedule.rounds):
        for i, row in itertools.product(range(len(schedule.round(k))), everything):
            if row[0] != row[1]:
                mutant = edited(schedule, k, lambda rows, i=i, row=row: [*rows[:i], row, *rows[i + 1 :]])
                kinds = {problem.kind for problem in verify(mutant).problems}
                exactly_once = (list(contributions(mutant))[-1][:ranks] == 1).all()
                assert exactly_once == (not kinds & {"missing", "double"}), (k, i, row)
                assert kinds or (np.ptp(run(mutant, inputs), axis=0) == 0).all()


def test_costs_of_an_uneven_schedule():
    # A parameter server: rank 0 takes everything and gives it back.
    n = 5
    audit = verify(written_out(n, 1, [(r, 0, 0, 1) for r in range(1, n)], [(0, r, 0, 0) for r in range(1, n)]))
    assert audit.ok
    assert (audit.max_bytes_sent, audit.max_bytes_received, audit.max_ports) == (4, 4, 4)
    assert (audit.lower_bound_rounds, audit.lower_bound_bytes.numerator) == (3, 8)


@pytest.mark.parametrize(("ranks", "bound"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (64, 6), (65, 7)])
def test_the_bound_on_rounds(ranks: int, bound: int):
    assert verify(ring(ranks)).lower_bound_rounds == bound


@pytest.mark.parametrize("by_symmetry", [False, True])
def test_an_audit_can_be_sent_to_another_process(by_symmetry: bool):
    audit = verify(ring(5), by_symmetry=by_symmetry)
    again = pickle.loads(pickle.dumps(audit))
    assert again == audit
    assert again.expression(2) == audit.expression(2)


def test_room_for_no_message_is_refused():
    with pytest.raises(UsageError, match="at least 1 buffer"):
        verify(ring(4), buffers=0)


def test_a_pool_of_sums_knows_how_many_each_adds_up_however_they_were_made():
    pool = Expressions(3, 1, np.ones((3, 1), dtype=np.bool_))
    pair = pool.add(np.array([0, 1]), np.array([1, 2]), np.array([0, 1]), 0)  # x0 + x1, x1 + x2
    whole = pool.add_one(int(pair[0]), 2, 0, 1)
    again = pool.add_one(whole, whole, 2, 2)
    sizes, sets = pool.sizes_and_sets()
    assert sizes.tolist() == [1, 1, 1, 2, 2, 3, 6]
    assert sets[:, 0].tolist() == [0b001, 0b010, 0b100, 0b011, 0b110, 0b111, 0b111]
    assert pool.operands(again) == (whole, whole)
    assert pool.origin(again) == (2, 2)
