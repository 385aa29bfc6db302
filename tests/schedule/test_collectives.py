from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from ringside.errors import UsageError
from ringside.schedule import (
    COLLECTIVES,
    Collective,
    Round,
    binomial_broadcast,
    binomial_reduce,
    by_name,
    chain_broadcast,
    chain_reduce,
    direct_all_to_all,
    direct_gather,
    direct_scatter,
    dissemination_barrier,
    from_rounds,
    ring,
    ring_all_gather,
    ring_reduce_scatter,
    verify,
)

from .conformance import check_schedule

ROOTED = [binomial_broadcast, binomial_reduce, chain_broadcast, chain_reduce, direct_gather, direct_scatter]
everywhere = pytest.mark.parametrize("name", sorted(COLLECTIVES))


@everywhere
@pytest.mark.parametrize("ranks", [*range(1, 14), 16, 21])
def test_conforms(name: str, ranks: int):
    check_schedule(by_name(name, ranks))


@everywhere
def test_is_proved_right_for_any_number_of_ranks(name: str):
    for ranks in [*range(1, 65), *((127, 128) if name != "direct_all_to_all" else (100,))]:
        audit = verify(by_name(name, ranks), by_symmetry=False)
        assert audit.ok, (ranks, audit.problems[:3])


@everywhere
def test_one_rank_does_nothing(name: str):
    assert (by_name(name, 1).rounds, by_name(name, 1).chunks) == (0, 1)


def test_only_a_collective_whose_result_holds_all_contributions_reduces():
    reducing = {name for name in COLLECTIVES if by_name(name, 2).collective.reduces}
    # A barrier is over when everybody's arrival has reached everybody.
    assert reducing == {name for name in COLLECTIVES if "reduce" in name} | {"dissemination_barrier"}


@pytest.mark.parametrize("make", ROOTED)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8])
def test_any_rank_can_be_the_root(make: type, ranks: int):
    for root in range(ranks):
        check_schedule(make(ranks, root))


@pytest.mark.parametrize("make", ROOTED)
@pytest.mark.parametrize("root", [-1, 4])
def test_other_roots_are_refused(make: type, root: int):
    with pytest.raises(UsageError, match=f"cannot have root {root}: ranks are 0 to 3"):
        make(4, root)


@pytest.mark.parametrize("ranks", range(2, 40))
def test_costs(ranks: int):
    n = ranks
    for name in ("ring_reduce_scatter", "ring_all_gather"):
        audit = verify(by_name(name, n))
        assert audit.rounds == n - 1
        assert audit.max_bytes_sent == audit.max_bytes_received == audit.lower_bound_bytes == Fraction(n - 1, n)
    for name in ("binomial_broadcast", "binomial_reduce", "dissemination_barrier"):
        audit = verify(by_name(name, n))
        assert audit.rounds == audit.lower_bound_rounds
        assert audit.max_ports == 1
    for name in ("chain_broadcast", "chain_reduce"):
        audit = verify(by_name(name, n))
        assert (audit.rounds, audit.max_bytes_sent, audit.max_bytes_received, audit.max_ports) == (n - 1, 1, 1, 1)
    assert verify(binomial_broadcast(n)).max_bytes_received == 1
    all_to_all = verify(direct_all_to_all(n))
    assert all_to_all.max_bytes_sent == all_to_all.max_bytes_received == all_to_all.lower_bound_bytes


def test_all_to_all_begins_with_the_right_neighbour():
    step = direct_all_to_all(5).round(0)
    for rank in range(5):
        assert step.dst[step.src == rank].tolist() == [(rank + 1 + i) % 5 for i in range(4)]


def test_conditions_as_tables():
    def tables(collective: Collective, chunks: int) -> list[list[list[int]]]:
        return [t.astype(int).tolist() for t in (collective.holds(2, chunks), collective.wants(2, chunks))]

    everybody, own = [[1, 1], [1, 1]], [[1, 0], [0, 1]]
    assert tables(Collective("all_reduce"), 2) == [everybody, everybody]
    assert tables(Collective("reduce_scatter"), 2) == [everybody, own]
    assert tables(Collective("all_gather"), 2) == [own, everybody]
    assert tables(Collective("broadcast", 1), 2) == [[[0, 0], [1, 1]], everybody]
    assert tables(Collective("reduce", 0), 2) == [everybody, [[1, 1], [0, 0]]]
    assert tables(Collective("gather", 1), 2) == [own, [[0, 0], [1, 1]]]
    assert tables(Collective("scatter", 1), 2) == [[[0, 0], [1, 1]], own]
    assert tables(Collective("all_to_all"), 4) == [[[1, 1, 0, 0], [0, 0, 1, 1]], [[1, 0, 1, 0], [0, 1, 0, 1]]]
    assert tables(Collective("reduce_scatter"), 4)[1] == [[1, 1, 0, 0], [0, 0, 1, 1]]


def test_a_group_leaves_the_others_out():
    table = Collective("broadcast", 1, group=(3, 0)).holds(4, 1)
    assert np.flatnonzero(table).tolist() == [0]
    assert np.flatnonzero(Collective("all_reduce", group=(3, 0)).wants(4, 1)).tolist() == [0, 3]
    assert str(Collective("broadcast", 1, group=(3, 0))) == "broadcast from rank 0 among ranks 3, 0"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("sum_up",), r"no collective 'sum_up'; there are all_reduce, .* barrier"),
        (("broadcast",), "broadcast needs a root"),
        (("all_gather", 0), "all_gather has no root"),
    ],
)
def test_collectives_that_cannot_be(arguments: tuple[str], words: str):
    with pytest.raises(UsageError, match=words):
        Collective(*arguments)


def retold(schedule, collective):
    rounds = [schedule.round(k) for k in range(schedule.rounds)]
    return from_rounds("handmade", schedule.ranks, schedule.chunks, rounds, collective=collective)


def test_a_schedule_that_claims_to_be_another_collective_is_named():
    half = verify(retold(ring_reduce_scatter(3), Collective("all_reduce")))
    assert {p.kind for p in half.problems} == {"missing"}
    wrong_root = verify(retold(binomial_broadcast(4, 2), Collective("broadcast", 1))).problems
    assert {(p.kind, p.chunk) for p in wrong_root} == {("missing", 0)}
    assert "chunk 0 of ranks 0-3 ends as ?2" in wrong_root[0].message
    assert wrong_root[0].message.endswith("without the contribution of rank 1, which a broadcast from rank 1 needs")
    whole = verify(retold(ring(3), Collective("reduce_scatter")))
    assert whole.ok, "an all-reduce does more than a reduce-scatter asks for"
    unasked = verify(retold(ring(3), Collective("all_gather"))).problems
    assert {p.kind for p in unasked} == {"undefined"}


def test_what_is_undefined_must_not_be_added():
    adding = from_rounds("adding", 2, 1, [Round.of([(0, 1, 0, True)])], collective=Collective("broadcast", 0))
    (problem,) = verify(adding).problems
    assert (problem.kind, problem.rank, problem.chunk, problem.round) == ("undefined", 1, 0, 0)
    assert "ends as (x0+?1)" in problem.message
    assert "with what rank 1 held there at the start, which a broadcast from rank 0 leaves undefined" in problem.message


def test_a_barrier_may_count_twice_but_not_miss():
    assert verify(dissemination_barrier(6)).ok
    early = retold(dissemination_barrier(6), Collective("barrier"))
    rounds = [early.round(k) for k in range(2)]
    problems = verify(from_rounds("early", 6, 1, rounds, collective=Collective("barrier"))).problems
    assert {p.kind for p in problems} == {"missing"}


def test_a_switch_that_is_not_there_or_knows_nothing_is_named():
    up, down = [(r, 4, 0, True) for r in range(4)], [(4, r, 0, False) for r in range(4)]
    absent = verify(from_rounds("absent", 4, 1, [Round.of(up), Round.of(down)])).problems
    assert {p.kind for p in absent} == {"malformed"}
    assert "there is no rank 4, only ranks 0-3" in absent[0].message
    further = [Round.of([(0, 5, 0, True)])]
    assert "there is no rank 5, only ranks 0-3 and switch 4" in (
        verify(from_rounds("further", 4, 1, further, switches=1)).problems[0].message
    )
    early = verify(from_rounds("early", 4, 1, [Round.of(down)], switches=1)).problems
    assert early[0].kind == "missing"
    assert "chunk 0 of ranks 0-3 ends as ?4 (written in round 1)" in early[0].message
    mixed = [Round.of(up), Round.of([(4, 0, 0, False)]), Round.of([(0, r, 0, False) for r in (1, 2, 3)])]
    assert verify(from_rounds("mixed", 4, 1, mixed, switches=1)).ok


def test_a_switch_remembers_nothing():
    """What came up earlier is gone when more comes up: only the last round's messages are in the sum."""
    rounds = [[(0, 3, 0, 1), (1, 3, 0, 1)], [(2, 3, 0, 1)], [(3, r, 0, 0) for r in range(3)]]
    problems = verify(from_rounds("forgetful", 3, 1, map(Round.of, rounds), switches=1)).problems
    assert [p.kind for p in problems] == ["missing"]
    assert "ends as x2" in problems[0].message
    assert "without the contributions of ranks 0 and 1" in problems[0].message


def test_a_switch_has_no_messages_to_itself():
    (problem,) = verify(from_rounds("loop", 2, 1, [Round.of([(2, 2, 0, True)])], switches=1)).problems
    assert "in round 1 switch 2 sends chunk 0 to switch 2, but a switch cannot send to itself" in problem.message


def test_all_gather_owners():
    assert verify(ring_all_gather(3)).expression(chunk=2, rank=0) == "x2"
