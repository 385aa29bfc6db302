"""Silent links in the model checker: explored to the end, and it notices when nobody goes around them."""

from dataclasses import replace

import pytest

from ringside.survive.all_reduce.between_hosts import RingOrder, blamed
from ringside.survive.protocol.decision import MemberId
from ringside.survive.protocol.generation import Generation, MembershipChange
from verification.survive import checker_state, checker_transitions
from verification.survive.broken_rules import Rules
from verification.survive.checker_state import Links, link_of, used_by
from verification.survive.model_checker import Bounds, explore

ONE_LINK = Bounds(ranks=2, steps=1, crashes=0, cuts=1)
SEATS = tuple(MemberId(rank, 1) for rank in range(4))


def of(ranks, broken=()):
    """Return a generation of some ranks."""
    return Generation(1, 1, 0, 0, SEATS[:ranks], tuple(range(ranks)), broken=broken)


@pytest.fixture
def nobody_goes_around(monkeypatch):
    """Lay every way around the members in ascending order, whatever is broken."""
    plain = {
        "way_around": lambda record: RingOrder(tuple(range(len(record.members))), True),
        "cut_off": lambda record: (),
        "blamed": lambda record, own, peer: ((), link_of(own, peer)),
    }
    for module in (checker_state, checker_transitions):
        for name in plain.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, plain[name])
    used_by.cache_clear()
    yield
    used_by.cache_clear()


def test_every_state_of_a_job_whose_link_falls_silent():
    found = explore(ONE_LINK)
    assert found.broken == ()
    assert found.complete
    assert found.states > 5 * explore(replace(ONE_LINK, cuts=0)).states


@pytest.mark.parametrize("rule", ["take_commit", "keep_copy"])
def test_rules_that_matter_only_when_something_goes_wrong_are_noticed_by_a_silent_link_alone(rule):
    found = explore(ONE_LINK, Rules(**{rule: False}))
    assert found.broken
    assert any("falls silent" in move for move in found.broken)


@pytest.mark.usefixtures("nobody_goes_around")
def test_it_is_noticed_when_nobody_goes_around_a_link():
    found = explore(ONE_LINK)
    assert found.broken[0].startswith("no way leads to the end any more: ")
    assert "link (0, 1) falls silent" in found.broken


def test_it_is_noticed_when_somebody_goes_around_a_link_to_one_who_has_gone(monkeypatch):
    kept = MembershipChange.left_after
    monkeypatch.setattr(
        MembershipChange, "left_after", lambda self, base: replace(kept(self, base), broken=self.broken)
    )
    monkeypatch.setattr(checker_transitions, "MOST_ATTEMPTS", 4)  # or it takes longer
    assert explore(ONE_LINK).broken[0].startswith("rank 0 (epoch 1) halts: step 0 was begun 4 times in vain")


def test_what_was_lost_on_a_link_leaves_an_end_of_it_without_a_result():
    record = of(3)
    tag = record.tag(0)
    waiting = [(tag, seat, record, True) for seat in record.members]
    found = list(Links().fates((1, 2), waiting))
    starved = [{seat.rank for _, seat in links.starved} for links in found]
    assert sorted(map(sorted, starved)) == [[], [0, 1], [0, 1, 2], [0, 2], [1], [1, 2], [2]]
    for links, without in zip(found, starved, strict=True):
        assert {seat.rank for seat in record.members if not links.give(tag, seat, record)} == without
        assert not any(links.give(record.tag(1), seat, record) for seat in record.members)


def test_an_exchange_that_somebody_has_not_come_to_ends_for_nobody_over_a_silent_link():
    record = of(3)
    (links,) = Links().fates((0, 1), [(record.tag(0), SEATS[0], record, False)])
    assert not any(links.give(record.tag(0), seat, record) for seat in record.members)
    around = of(3, broken=((0, 1),))
    assert all(links.give(around.tag(0), seat, around) for seat in around.members)


def test_two_ranks_without_a_link_have_no_way():
    assert not Links().give(of(2).tag(0), SEATS[0], of(2, broken=((0, 1),)))
    assert Links().give(of(2).tag(0), SEATS[0], of(2))


@pytest.mark.parametrize(
    ("ranks", "broken", "own", "peer", "gone", "link"),
    [
        (3, (), 2, 1, (), (1, 2)),
        (2, (), 0, 1, (1,), (0, 1)),
        (2, (), 1, 0, (), (0, 1)),
        (3, ((0, 2),), 1, 2, (2,), (1, 2)),
        (3, ((0, 2),), 2, 1, (), (1, 2)),
    ],
)
def test_an_end_of_a_silent_link_names_who_has_to_go_unless_it_is_itself(ranks, broken, own, peer, gone, link):
    assert blamed(of(ranks, broken), SEATS[own], SEATS[peer]) == (tuple(SEATS[rank] for rank in gone), link)
