from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringside.errors import UsageError
from ringside.schedule import (
    ALGORITHMS,
    COLLECTIVES,
    Collective,
    Round,
    Schedule,
    by_name,
    chain,
    direct,
    direct_all_gather,
    direct_all_to_all,
    direct_reduce_scatter,
    in_network,
    on_group,
    pipelined,
    recursive_doubling,
    relabel,
    reverse,
    ring,
    ring_all_gather,
    ring_reduce_scatter,
    run,
    striped,
    traffic,
    tree,
    two_tree,
    verify,
)

from .conformance import check_schedule

EVERYTHING = sorted({**ALGORITHMS, **COLLECTIVES})
everything = st.sampled_from(EVERYTHING)
all_reduces = st.sampled_from(sorted(ALGORITHMS))
a_few = settings(deadline=None, max_examples=40)


@a_few
@given(everything, st.integers(1, 9), st.integers(1, 5))
def test_pipelined(name: str, ranks: int, segments: int):
    s = by_name(name, ranks)
    p = pipelined(s, segments)
    check_schedule(p)
    assert (p.chunks, p.collective) == (s.chunks * segments, s.collective)
    assert p.rounds == (s.rounds + segments - 1 if s.rounds else 0)
    assert verify(p).canonical == verify(s).canonical
    assert traffic(p).max_bytes_sent == traffic(s).max_bytes_sent


@a_few
@given(all_reduces, st.integers(2, 9), st.integers(2, 5), st.integers(0, 300))
def test_pipelining_changes_no_bit(name: str, ranks: int, segments: int, elements: int):
    inputs = np.random.default_rng(elements).standard_normal((ranks, elements)).astype(np.float32)
    whole, cut = (run(s, inputs) for s in (by_name(name, ranks), pipelined(by_name(name, ranks), segments)))
    np.testing.assert_array_equal(whole, cut)


@pytest.mark.parametrize("segments", [2, 64])
def test_however_many_segments_each_round_is_made_once(segments: int):
    made: list[int] = []

    def hop(k: int) -> Round:
        made.append(k)
        return Round.of([(k, k + 1, 0, True)])

    p = pipelined(Schedule("hops", 101, 1, 100, hop), segments)
    for k in range(p.rounds):
        p.round(k)
    assert made == list(range(100))


def test_segments_follow_each_other_one_round_apart():
    p = pipelined(chain(3), 2)
    assert [list(p.round(k)) for k in range(p.rounds)] == [
        [(0, 1, 0, True)],
        [(1, 2, 0, True), (0, 1, 1, True)],
        [(2, 1, 0, False), (1, 2, 1, True)],
        [(1, 0, 0, False), (2, 1, 1, False)],
        [(1, 0, 1, False)],
    ]


@a_few
@given(st.lists(all_reduces, min_size=1, max_size=4), st.integers(1, 8))
def test_striped(names: list[str], ranks: int):
    parts = [by_name(name, ranks) for name in names]
    s = striped(parts)
    check_schedule(s)
    assert s.rounds == max(part.rounds for part in parts)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 13, 64])
def test_two_trees_are_two_stripes(ranks: int):
    sent, one = traffic(two_tree(ranks)), traffic(tree(ranks))
    assert sent.max_bytes_sent <= 2
    assert sent.sent.sum() / sent.chunks == one.sent.sum() / one.chunks


@a_few
@given(st.sampled_from(sorted(set(EVERYTHING) - {"direct_all_to_all"})), st.integers(1, 9))
def test_reversed_twice_is_itself(name: str, ranks: int):
    s = by_name(name, ranks)
    again = reverse(reverse(s))
    assert again.collective == s.collective
    for k in range(s.rounds):
        assert sorted(again.round(k)) == sorted(s.round(k))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("make", [ring_reduce_scatter, ring_all_gather, direct_reduce_scatter, direct_all_gather])
def test_reduce_scatter_backwards_is_all_gather(make: type, ranks: int):
    s = make(ranks)
    check_schedule(reverse(s))
    assert {s.collective.name, reverse(s).collective.name} == {"reduce_scatter", "all_gather"}
    check_schedule(reverse(pipelined(s, 3)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("make", [ring, direct, tree, two_tree, chain, in_network])
def test_these_all_reduces_run_backwards(make: type, ranks: int):
    check_schedule(reverse(make(ranks)))


@a_few
@given(everything, st.integers(1, 9), st.randoms(use_true_random=False))
def test_relabelled(name: str, ranks: int, random):
    s = by_name(name, ranks)
    order = random.sample(range(ranks), ranks)
    check_schedule(relabel(s, order))
    back = relabel(relabel(s, order), [order.index(rank) for rank in range(ranks)])
    assert back.collective == s.collective
    for k in range(s.rounds):
        assert sorted(back.round(k)) == sorted(s.round(k))


def test_a_ring_in_another_order_uses_other_links():
    order = [0, 2, 4, 1, 3]
    used = {(src, dst) for src, dst, _ in traffic(relabel(ring(5), order)).links()}
    assert used == {(0, 2), (2, 4), (4, 1), (1, 3), (3, 0)}


@a_few
@given(everything, st.integers(1, 6), st.integers(0, 4), st.randoms(use_true_random=False))
def test_on_a_group(name: str, ranks: int, others: int, random):
    s = by_name(name, ranks)
    group = random.sample(range(ranks + others), ranks)
    g = on_group(s, group, of=ranks + others)
    check_schedule(g)
    assert g.collective.group == tuple(group)
    touched = {v for src, dst, _ in traffic(g).links() for v in (src, dst) if v < g.ranks}
    assert touched <= set(group)


def test_others_keep_what_they_have():
    inputs = np.arange(10.0).reshape(5, 2)
    result = run(on_group(ring(2), [3, 1], of=5), inputs)
    np.testing.assert_array_equal(result[[0, 2, 4]], inputs[[0, 2, 4]])
    np.testing.assert_array_equal(result[[1, 3]], np.tile(inputs[1] + inputs[3], (2, 1)))


@a_few
@given(all_reduces, st.integers(2, 6), st.integers(1, 3), st.randoms(use_true_random=False))
def test_combinators_combine(name: str, ranks: int, segments: int, random):
    order = random.sample(range(ranks), ranks)
    s: Schedule = striped([pipelined(by_name(name, ranks), segments), relabel(tree(ranks), order)])
    check_schedule(on_group(pipelined(s, 2), order, of=ranks + 1))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: pipelined(ring(4), 0), "pipelining ring needs at least 1 segment, not 0"),
        (lambda: striped([]), "nothing to stripe"),
        (lambda: striped([ring(4), ring(5)]), r"same ranks and collective, not ring \(all_reduce, 4 ranks\)"),
        (lambda: striped([ring_all_gather(4)] * 2), "all_gather cannot be striped"),
        (lambda: reverse(direct_all_to_all(3)), "direct_all_to_all cannot be reversed"),
        (lambda: relabel(ring(3), [0, 1, 1]), r"each of 0 to 2 once, not \[0, 1, 1\]"),
        (lambda: on_group(ring(3), [0, 1], of=4), r"ring needs 3 different ranks of 0 to 3, not \[0, 1\]"),
        (lambda: on_group(ring(2), [0, 4], of=4), r"2 different ranks of 0 to 3"),
        (lambda: on_group(on_group(ring(2), [0, 1], 3), [0, 1, 2], 3), "is on a group already"),
        (lambda: relabel(on_group(ring(2), [0, 1], 3), [2, 1, 0]), "before putting it on a group"),
    ],
)
def test_what_cannot_be_combined_is_refused(make, words: str):
    with pytest.raises(UsageError, match=words):
        make()


def test_a_reversed_exchange_is_found_wrong_and_named():
    """Partners of recursive doubling hand a chunk on twice: backwards that overwrites instead of adding."""
    audit = verify(reverse(recursive_doubling(4)))
    assert not audit.ok
    assert {problem.kind for problem in audit.problems} <= {"missing", "order", "double"}
    assert audit.collective == Collective("all_reduce")
