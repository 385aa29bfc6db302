from __future__ import annotations

from fractions import Fraction
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringside.errors import UsageError
from ringside.schedule import (
    ALGORITHMS,
    Schedule,
    by_name,
    chain,
    direct,
    halving_doubling,
    hierarchical,
    host_sizes,
    in_network,
    one_shot,
    parameter_server,
    recursive_doubling,
    ring,
    run,
    traffic,
    tree,
    two_tree,
    verify,
)

from .conformance import check_schedule

names = st.sampled_from(sorted(ALGORITHMS))
everywhere = pytest.mark.parametrize("name", sorted(ALGORITHMS))


@everywhere
@pytest.mark.parametrize("ranks", [*range(1, 18), 31, 32, 33])
def test_conforms(name: str, ranks: int):
    check_schedule(by_name(name, ranks))


@everywhere
def test_is_proved_right_for_any_number_of_ranks(name: str):
    for ranks in [*range(1, 65), 127, 128]:
        audit = verify(by_name(name, ranks), by_symmetry=False)
        assert audit.ok, (ranks, audit.problems[:3])


@pytest.mark.parametrize("ranks", [1000, 1024])
@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"hierarchical", "halving_doubling", "one_shot"}))
def test_is_proved_right_for_many_ranks(name: str, ranks: int):
    audit = verify(by_name(name, ranks))
    assert audit.ok, audit.problems[:3]


@pytest.mark.parametrize("ranks", [1000, 1024])
@pytest.mark.parametrize("name", ["hierarchical", "halving_doubling", "one_shot"])
def test_sums_numbers_of_many_ranks(name: str, ranks: int):
    """A proof of a million chunks or messages takes seconds; a sum that cannot come out right by chance does not."""
    schedule = by_name(name, ranks)
    # Sums modulo 2**64 of random words: a contribution missing or twice shows with probability 1 - 2**-64.
    held = np.random.default_rng(0).integers(0, 2**63, (ranks, schedule.chunks), dtype=np.uint64)
    expected = held.sum(axis=0)
    for k in range(schedule.rounds):
        step = schedule.round(k)
        moved = held[step.src, step.chunk]
        held[step.dst[~step.reduce], step.chunk[~step.reduce]] = moved[~step.reduce]
        np.add.at(held, (step.dst[step.reduce], step.chunk[step.reduce]), moved[step.reduce])
    assert (held == expected).all()


@settings(deadline=None, max_examples=60)
@given(names, st.integers(1, 64), st.integers(0, 200), st.integers(0, 2**32 - 1))
def test_sums_any_number_of_elements(name: str, ranks: int, elements: int, seed: int):
    inputs = np.random.default_rng(seed).integers(-(2**31), 2**31, (ranks, elements))
    result = run(by_name(name, ranks), inputs)
    np.testing.assert_array_equal(result, np.tile(inputs.sum(axis=0), (ranks, 1)))


@settings(deadline=None, max_examples=20)
@given(names, st.integers(1, 16), st.sampled_from([np.maximum, np.minimum, np.multiply, np.bitwise_xor]))
def test_other_operations(name: str, ranks: int, op: np.ufunc):
    inputs = np.random.default_rng(ranks).integers(-9, 9, (ranks, 23))
    result = run(by_name(name, ranks), inputs, op)
    np.testing.assert_array_equal(result, np.tile(op.reduce(inputs, axis=0), (ranks, 1)))


@pytest.mark.parametrize("ranks", range(2, 20))
def test_ring_costs_what_the_paper_says(ranks: int):
    audit = verify(ring(ranks))
    assert audit.rounds == 2 * (ranks - 1)
    assert (
        audit.max_bytes_sent == audit.max_bytes_received == audit.lower_bound_bytes == Fraction(2 * (ranks - 1), ranks)
    )
    assert audit.max_ports == 1


@pytest.mark.parametrize("ranks", range(2, 20))
def test_direct_costs_two_rounds_and_all_ports(ranks: int):
    audit = verify(direct(ranks))
    assert (audit.rounds, audit.max_ports) == (2, ranks - 1)
    assert audit.max_bytes_sent == audit.max_bytes_received == audit.lower_bound_bytes


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32, 64])
def test_powers_of_two_meet_the_bounds(ranks: int):
    doubling, halving = verify(recursive_doubling(ranks)), verify(halving_doubling(ranks))
    assert doubling.rounds == doubling.lower_bound_rounds == log2(ranks)
    assert halving.rounds == 2 * log2(ranks)
    assert halving.max_bytes_sent == halving.max_bytes_received == halving.lower_bound_bytes
    assert doubling.max_ports == halving.max_ports == 1


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 12, 33, 63])
def test_off_powers_of_two_the_extra_ranks_cost_two_rounds_and_one_tensor(ranks: int):
    p = 1 << (ranks.bit_length() - 1)
    for make in (recursive_doubling, halving_doubling):
        whole, odd = verify(make(p)), verify(make(ranks))
        assert odd.rounds == whole.rounds + 2
        assert odd.max_bytes_sent == whole.max_bytes_sent + 1
        assert odd.max_ports == 1


@pytest.mark.parametrize("ranks", range(4, 40))
def test_trees_are_logarithmic_and_two_of_them_relieve_the_inner_ranks(ranks: int):
    one, two = verify(tree(ranks)), verify(two_tree(ranks))
    assert one.rounds == two.rounds == 2 * ceil(log2(ranks))
    assert one.max_bytes_sent == one.max_bytes_received == 3
    assert two.max_bytes_sent <= 2
    assert two.max_bytes_received <= 2
    assert one.max_ports <= 2
    assert two.max_ports <= 3


@pytest.mark.parametrize("ranks", range(2, 65))
def test_who_is_inner_in_both_trees(ranks: int):
    trees = two_tree(ranks)
    inner = np.zeros((2, ranks), np.bool_)  # who adds up what others send
    for step in map(trees.round, range(trees.rounds)):
        inner[step.chunk[step.reduce], step.dst[step.reduce]] = True
    assert np.flatnonzero(inner.all(axis=0)).tolist() == ([0] if ranks % 2 else [])
    assert inner.any(axis=0).all()


def test_a_tree_is_bracketed_as_it_is_and_in_rank_order():
    assert verify(tree(4)).expression(0) == "(x0+((x1+x2)+x3))"


@pytest.mark.parametrize("ranks", range(2, 20))
def test_one_server_grows_linearly(ranks: int):
    sent = traffic(parameter_server(ranks)).sent.tolist()
    assert sent == [ranks - 1] + [1] * (ranks - 1)
    assert verify(parameter_server(ranks)).busiest_link == (0, 1)


@pytest.mark.parametrize("make", [parameter_server, direct, one_shot, chain, in_network])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 13])
def test_these_give_the_canonical_sum(make: type, ranks: int):
    schedule: Schedule = make(ranks)
    audit = verify(schedule)
    assert audit.canonical
    canonical = "(" * (ranks - 1) + "x0" + "".join(f"+x{r})" for r in range(1, ranks))
    assert {audit.expression(c, r) for c in range(schedule.chunks) for r in range(ranks)} == {canonical}


@pytest.mark.parametrize("make", [ring, recursive_doubling, halving_doubling, tree, two_tree])
def test_these_do_not(make: type):
    assert not verify(make(8)).canonical


def test_one_shot_takes_one_round_and_one_buffer():
    audit = verify(one_shot(9), buffers=1)
    assert audit.ok
    assert (audit.rounds, audit.max_bytes_sent, audit.max_ports) == (1, 8, 8)
    assert audit.beats_bounds == "8 ports"


def test_the_switch_is_a_vertex_that_adds():
    schedule = in_network(6)
    assert (schedule.switches, schedule.vertices) == (1, 7)
    audit = verify(schedule)
    assert (audit.rounds, audit.max_bytes_sent, audit.max_bytes_received, audit.max_ports) == (2, 1, 1, 1)
    assert audit.max_bytes_sent < audit.lower_bound_bytes
    assert audit.beats_bounds == "a switch that reduces"
    assert audit.traffic.sent.tolist() == audit.traffic.received.tolist() == [1] * 6 + [6]
    assert audit.traffic.reduced.tolist() == [0] * 6 + [5]


@pytest.mark.parametrize("sizes", [[3, 2, 4], [1], [5], [1, 1, 1], [1, 6], [2, 2, 2], [4, 3, 3, 3], [1, 2, 3, 4, 5]])
def test_hosts_of_any_sizes(sizes: list[int]):
    check_schedule(hierarchical(sizes))


@pytest.mark.parametrize("outer", sorted(set(ALGORITHMS)))
@pytest.mark.parametrize("sizes", [[2, 2, 2, 2], [3, 2, 4]])
def test_any_algorithm_between_hosts(outer: str, sizes: list[int]):
    from ringside.schedule import ring_reduce_scatter

    check_schedule(hierarchical(sizes, outer=ALGORITHMS[outer]))
    check_schedule(hierarchical(sizes, inner=ring_reduce_scatter, outer=ALGORITHMS[outer]))


def test_equal_hosts_meet_the_bound_and_send_their_share_between_hosts():
    schedule = hierarchical(4, 3)
    audit = verify(schedule)
    assert audit.max_bytes_sent == audit.max_bytes_received == audit.lower_bound_bytes
    assert audit.rounds == 1 + 4 + 1
    host = np.arange(12) // 4
    between = audit.traffic.matrix() * (host[:, None] != host)
    # A ring of 3 hosts per slice, a slice being a quarter of the tensor.
    assert set((between.sum(axis=1) / schedule.chunks).tolist()) == {4 / 3 / 4}


def test_sizes_without_a_small_common_multiple_still_share_the_work():
    audit = verify(hierarchical([5, 7, 9, 11, 13]))
    assert audit.ok
    assert audit.chunks == 1024 * 5


@pytest.mark.parametrize(
    ("n", "sizes"),
    [(1, [1]), (2, [2]), (3, [3]), (5, [3, 2]), (7, [4, 3]), (8, [4, 4]), (12, [4, 4, 4]), (13, [5, 4, 4])],
)
def test_the_catalogue_cuts_hosts_as_square_as_can_be(n: int, sizes: list[int]):
    assert host_sizes(n) == sizes


def test_hosts_that_cannot_be_are_refused():
    with pytest.raises(UsageError, match="number of hosts, or a list"):
        hierarchical(4)
    with pytest.raises(UsageError, match="leave hosts out"):
        hierarchical([3, 2], 3)
    with pytest.raises(UsageError, match="at least 1 host"):
        hierarchical([3, 0])
    with pytest.raises(UsageError, match="inner must make a reduce_scatter, and ring is a all_reduce"):
        hierarchical(2, 2, inner=ring)


def test_direct_adds_in_rank_order_in_every_chunk():
    audit = verify(direct(4))
    assert {audit.expression(chunk, rank) for chunk in range(4) for rank in range(4)} == {"(((x0+x1)+x2)+x3)"}


def test_ring_adds_once_around_the_ring():
    assert verify(ring(4)).expression(2) == "(((x0+x3)+x1)+x2)"


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_ring_only_sends_to_the_right_and_ends_the_first_half_with_ones_own_chunk(ranks: int):
    schedule = ring(ranks)
    for k in range(schedule.rounds):
        step = schedule.round(k)
        assert (step.dst == (step.src + 1) % ranks).all()
    last_reduction = schedule.round(ranks - 2)
    assert (last_reduction.chunk == last_reduction.dst).all()
    assert last_reduction.reduce.all()


@everywhere
def test_one_rank_does_nothing(name: str):
    schedule = by_name(name, 1)
    assert (schedule.rounds, schedule.chunks, schedule.switches) == (0, 1, 0)
    assert verify(schedule).max_bytes_sent == 0


def test_an_unknown_name_lists_what_exists():
    with pytest.raises(UsageError, match=r"no algorithm 'butterfly'; there are chain, direct, .* two_tree, and for"):
        by_name("butterfly", 4)


@pytest.mark.parametrize("ranks", [0, -3])
@everywhere
def test_no_ranks_are_refused(name: str, ranks: int):
    with pytest.raises(UsageError, match=f"{name} needs at least 1 rank, not {ranks}"):
        by_name(name, ranks)
    with pytest.raises(UsageError, match=f"{name} needs at least 1 rank, not {ranks}"):
        ALGORITHMS[name](ranks)


@pytest.mark.parametrize("k", [-1, 6])
def test_rounds_that_do_not_exist_are_refused(k: int):
    with pytest.raises(UsageError, match=f"rounds 0 to 5, not {k}"):
        ring(4).round(k)


def test_schedules_are_values():
    assert ring(4) == ring(4)
    assert ring(4) != ring(5)
    assert len({ring(4), ring(4), direct(4)}) == 2
    with pytest.raises(AttributeError):
        ring(4).ranks = 5  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        ring(4).round(0).src[0] = 3


def test_the_public_names():
    import ringside.schedule

    assert isinstance(ringside.schedule.ring(2), Schedule)
    assert set(ringside.schedule.__all__) == {
        "ALGORITHMS", "Audit", "COLLECTIVES", "Collective", "Problem", "Round", "Schedule", "Traffic", "by_name",
        "chunk_bounds", "contributions", "from_rounds", "host_sizes", "on_group", "pipelined", "relabel", "reverse",
        "run", "striped", "traffic", "verify",
        # every maker; the catalogue's `hierarchical` is made by the one that takes hosts
        *ringside.schedule.ALGORITHMS, *ringside.schedule.COLLECTIVES,
    }  # fmt: skip
