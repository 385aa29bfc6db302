"""How an all-reduce is carried out, written as text."""

from __future__ import annotations

import pytest

from ringside.engine.algorithm import NATIVE, AlgorithmSpec
from ringside.errors import UsageError
from ringside.schedule import ALGORITHMS, by_name, pipelined, relabel, verify


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("ring", AlgorithmSpec("ring")),
        ("native", AlgorithmSpec(NATIVE)),
        ("hosts/ring", AlgorithmSpec("ring", "hosts")),
        ("leaders/tree*4", AlgorithmSpec("tree", "leaders", 4)),
        ("hosts/native", AlgorithmSpec(NATIVE, "hosts")),
        ("ring@0,2,1", AlgorithmSpec("ring", order=(0, 2, 1))),
        ("hosts/two_tree*8@1,0", AlgorithmSpec("two_tree", "hosts", 8, (1, 0))),
    ],
)
def test_reads_what_it_writes(text: str, choice: AlgorithmSpec) -> None:
    assert AlgorithmSpec.parse(text) == choice
    assert str(choice) == text


def test_what_can_be_left_out() -> None:
    assert (
        AlgorithmSpec.parse("ranks/ring")
        == AlgorithmSpec.parse("ring*1")
        == AlgorithmSpec.parse("ring*0")
        == AlgorithmSpec("ring")
    )


@pytest.mark.parametrize("name", [*ALGORITHMS, NATIVE])
def test_every_algorithm_has_three_forms(name: str) -> None:
    for over in ("ranks", "hosts", "leaders"):
        assert AlgorithmSpec.parse(f"{over}/{name}") == AlgorithmSpec(name, over)


@pytest.mark.parametrize(
    "text", ["", "rign", "hosts/", "host/ring", "ring*x", "ring*-1", "ring@a", "ring@0,,1", "a/b/ring"]
)
def test_what_is_none_is_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        AlgorithmSpec.parse(text)
    assert repr(text) in str(raised.value)
    for name in (*ALGORITHMS, NATIVE):
        assert name in str(raised.value)


def test_schedules() -> None:
    assert AlgorithmSpec("ring").schedule(5) == by_name("ring", 5)
    assert AlgorithmSpec("tree", "leaders", 4).schedule(5) == pipelined(by_name("tree", 5), 4)
    assert AlgorithmSpec("ring", order=(0, 2, 1)).schedule(3) == relabel(by_name("ring", 3), (0, 2, 1))
    both = AlgorithmSpec("tree", "hosts", 3, (3, 1, 0, 2)).schedule(4)
    assert both == pipelined(relabel(by_name("tree", 4), (3, 1, 0, 2)), 3)
    assert verify(both).ok


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 3), (0, 0, 1), (0, 1, 2, 3)])
def test_an_order_is_one_of_all(order: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="is not an order of 3 vertices"):
        AlgorithmSpec("ring", order=order).schedule(3)
