"""Who is at fault, as found from what everybody said last; words travel over a group of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ringside.engine.transports.abort import AbortChannel, AbortNotice, find_disagreement, find_late
from ringside.engine.transports.base import NOBODY, LinkFailure

LATE = LinkFailure("late", NOBODY)


class Group:
    """One end of a group whose messages arrive at once; a peer that is gone cannot be told anything."""

    class Work:
        def wait(self, timeout: Any) -> None:
            """It has left."""

    def __init__(self, ends: list[Group], gone: tuple[int, ...] = ()) -> None:
        self.rank, self.ends, self.gone, self.places = len(ends), ends, gone, {}
        ends.append(self)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        if peer in self.gone:
            raise RuntimeError("it is gone")
        self.places[peer, tag] = tensors[0]
        return self.Work()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        if peer in self.gone:
            raise RuntimeError("it is gone")
        self.ends[peer].places[self.rank, tag].copy_(tensors[0])
        return self.Work()


def ears(size: int, gone: tuple[int, ...] = ()) -> list[AbortChannel]:
    ends: list[Group] = []
    return [AbortChannel(Group(ends, gone), rank, size) for rank in range(size)]


def said(*words: AbortNotice | None) -> list[AbortChannel]:
    """Let every rank say its word; None: it says nothing."""
    made = ears(len(words))
    for ear, word in zip(made, words, strict=True):
        if word is not None:
            ear.send(word)
    return made


@pytest.mark.parametrize("kind", ["lost", "late", "left", "disagreed"])
def test_a_word_arrives_as_it_was_said(kind: Any) -> None:
    detail = "détail " * 100
    word = AbortNotice(LinkFailure(kind, 2, detail), 1, 0.25, "all_reduce by a ring " * 30, kind == "left", 3)
    for reader in said(word, None, None)[1:]:
        heard = reader.of(0)
        assert heard is not None
        assert (heard.cause, heard.waits_for, heard.since_s, heard.goodbye) == (
            LinkFailure(kind, 2),
            1,
            0.25,
            kind == "left",
        )
        assert word.operation.startswith(heard.operation)
        assert detail.startswith(heard.cause.detail.rstrip("\ufffd"))
        assert min(len(heard.operation), len(heard.cause.detail.encode())) > 490
        assert list(reader.all()) == [0]
        assert reader.silent(0.0) in ([1], [2])


def test_who_is_gone_keeps_nobody_from_being_told() -> None:
    first, _, third = ears(3, gone=(1,))
    first.send(AbortNotice(LATE))
    assert third.of(0) == AbortNotice(LATE)


def test_of_several_words_one_that_knows_is_heard_before_a_guess_and_goodbyes_are_no_reason() -> None:
    lost = LinkFailure("lost", 2)
    reader = said(
        AbortNotice(LinkFailure("left", 0), goodbye=True), AbortNotice(LinkFailure("late", 3)), AbortNotice(lost), None
    )[3]
    assert reader.first() == AbortNotice(lost)
    assert said(AbortNotice(LinkFailure("left", 0), goodbye=True), None)[1].first() is None
    assert said(AbortNotice(LinkFailure("late", 1)), None)[1].first() == AbortNotice(LinkFailure("late", 1))


def blamed(me: int, *words: AbortNotice | None) -> LinkFailure:
    own = words[me]
    assert own is not None
    return find_late(said(*words)[me], me, own, 0.0)


def waiting(on: int, since_s: float = 1.0, doing: str = "all_reduce") -> AbortNotice:
    return AbortNotice(LinkFailure("late", on), on, since_s, doing)


def test_the_chain_of_those_who_wait_ends_at_the_late_one() -> None:
    idle = AbortNotice(LATE)
    assert blamed(0, waiting(1), waiting(2), idle) == LinkFailure("late", 2), "it is in no collective"
    assert blamed(0, waiting(1), waiting(2), None) == LinkFailure("late", 2), "it says nothing"
    assert blamed(1, waiting(1), waiting(2), None) == LinkFailure("late", 2)
    assert blamed(0, waiting(1), None, waiting(0)) == LinkFailure("late", 1)
    assert blamed(0, AbortNotice(LinkFailure("late", 1)), waiting(0)) == LinkFailure("late", 0), (
        "it is in no collective itself"
    )
    died = AbortNotice(LinkFailure("lost", 3), 3, 1.0, "all_reduce")
    assert blamed(0, waiting(1), waiting(2), died) == LinkFailure("lost", 3), "it knows better"
    nobody = AbortNotice(LATE, NOBODY, 1.0, "all_reduce")
    assert blamed(0, waiting(1), waiting(2), nobody) == LATE
    by_cause = AbortNotice(LinkFailure("late", 2), NOBODY, 1.0, "all_reduce")
    assert blamed(0, waiting(1), by_cause, idle) == LinkFailure("late", 2), "whom it blames it waited for"
    assert blamed(0, AbortNotice(LinkFailure("late", 2), NOBODY, 1.0, "all_reduce"), idle, idle) == LinkFailure(
        "late", 2
    )


def test_in_a_circle_who_came_much_later_is_late_and_else_whom_one_waits_for() -> None:
    assert blamed(0, waiting(1), waiting(2), waiting(0)) == LinkFailure("late", 1)
    assert blamed(2, waiting(1), waiting(2), waiting(0)) == LinkFailure("late", 0)
    assert blamed(0, waiting(1, 4.0), waiting(2, 4.0), waiting(0, 1.9)) == LinkFailure("late", 2)
    assert blamed(0, waiting(1, 4.0), waiting(2, 4.0), waiting(0, 2.0)) == LinkFailure("late", 1), "half as long is not"
    assert blamed(0, waiting(1), waiting(2, doing="barrier"), waiting(0)) == LinkFailure("disagreed", 1)
    # Rank 0 is not in the circle that it came to.
    assert blamed(0, waiting(1, 0.1), waiting(2), waiting(1)) == LinkFailure("late", 0)


def test_who_waited_for_nobody_names_the_first_that_is_missing() -> None:
    own, there = AbortNotice(LATE, NOBODY, 1.0, "all_reduce"), waiting(0)
    assert blamed(0, own, there, None, None) == LinkFailure("late", 2)
    assert blamed(0, own, AbortNotice(LATE), there, None) == LinkFailure("late", 1)
    assert blamed(2, AbortNotice(LATE), there, own) == LinkFailure("late", 0)
    assert blamed(0, own, there, there) == LATE, "all are there: whom it waits for it does not know"
    assert blamed(0, own, there, waiting(0, 0.3)) == LinkFailure("late", 2)


def told_apart(me: int, *doing: str | None, numbers: Sequence[int] = ()) -> tuple[int, str]:
    words = [
        None if what is None else AbortNotice(LinkFailure("disagreed", 1), NOBODY, 1.0, what, number=number)
        for what, number in zip(doing, numbers or [1] * len(doing), strict=True)
    ]
    own = words[me]
    assert own is not None
    cause = find_disagreement(said(*words)[me], me, own, LinkFailure("disagreed", 7, "as before"), 0.0)
    return cause.vertex, cause.detail


def test_who_did_something_else_than_most_is_named_and_what_each_side_did() -> None:
    assert told_apart(0, "a", "b", "a") == (1, "ranks 0 and 2 called a; rank 1 called b")
    assert told_apart(1, "b", "a", "a") == (0, "rank 0 called b; ranks 1 and 2 called a")
    assert told_apart(1, "b", "a") == (1, "rank 0 called b; rank 1 called a"), "of equals the lowest rank's is right"
    assert told_apart(2, "a", "b", "a", "c") == (1, "ranks 0 and 2 called a; rank 1 called b; rank 3 called c")
    assert told_apart(0, "a", "", None, "a") == (7, "as before")
    assert told_apart(0, "a", "", None, "b") == (3, "rank 0 called a; rank 3 called b")


def test_who_is_still_in_the_collective_before_differs_from_nobody() -> None:
    late = "ranks 0 and 3 called b; rank 2 called c"
    for me in range(4):
        assert told_apart(me, "b", "a", "c", "b", numbers=(2, 1, 2, 2)) == (2, late)
    assert told_apart(0, "b", "a", "b", numbers=(2, 1, 2)) == (7, "as before")
