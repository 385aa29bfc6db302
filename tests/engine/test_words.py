"""What errors and explanations say: who, what, and what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ringside.engine.cost.network import CostNetwork
from ringside.engine.dtypes import DTYPES, OP_CODES
from ringside.engine.failures import error_of
from ringside.engine.net.attribution import cause_of, explain
from ringside.engine.net.exchange.signature import (
    OWN_SCALE,
    WIRE_FLAGS,
    CollectiveSignature,
    MessageHeader,
    Operation,
    SignatureMismatch,
)
from ringside.engine.net.rank_map import RankMap
from ringside.engine.probe.links import MeasuredSlowLink
from ringside.engine.probe.prober import Probe
from ringside.engine.request import KINDS
from ringside.engine.transports.base import NOBODY, LinkError, LinkFailure
from ringside.engine.tuner.explain import AlgorithmChange, Explanation, difference
from ringside.engine.tuner.table import TimingRow
from ringside.errors import ClosedError, DeadlineError, MismatchError, PeerLostError, SyncError, UsageError

MISMATCH, PEER_LOST, DEADLINE, INTERRUPTED, CLOSED, NO_WEIGHT = 1, 2, 3, 4, 5, 7


def error(status: int, ranks: tuple[int, ...] = (), missing: tuple[int, ...] = (), group: str = "") -> Any:
    failure = {"status": status, "ranks": list(ranks), "missing": list(missing), "seq": 5, "calls": []}
    return error_of(failure, "barrier", 3, 7.5, group)


def test_each_failure_of_the_core_has_its_error() -> None:
    lost = error(PEER_LOST, (1,), (1,))
    assert (type(lost), lost.ranks) == (PeerLostError, (1,))
    closed = "Connection closed by peer: rank 1 died or left, restart from the last checkpoint"
    assert str(lost) == f"barrier (collective 5) on rank 3: {closed}"
    assert "ranks 1 and 2 died or left, so rank 4 gave up too; restart" in str(error(PEER_LOST, (1, 2), (1, 4)))
    late = error(DEADLINE, (0, 2), (), " of a sub-group (of ranks 0, 2 and 3)")
    assert (type(late), late.ranks) == (DeadlineError, (0, 2))
    assert "(of ranks 0, 2 and 3): Timed out waiting 7500ms: ranks 0 and 2 did not arrive, though" in str(late)
    kinds = {status: type(error(status)) for status in (INTERRUPTED, CLOSED, NO_WEIGHT)}
    assert kinds == {INTERRUPTED: ClosedError, CLOSED: ClosedError, NO_WEIGHT: UsageError}
    assert "interrupted" in str(error(INTERRUPTED))
    assert "is closed on this rank" in str(error(CLOSED))
    assert "sum to 0" in str(error(NO_WEIGHT))


def call(
    kind: str, dims: tuple[int, ...] = (2, 3), *, way: int = 0, scale: float = 1.0, own: bool = False, root: int = 255,
    bounds: tuple[int, ...] = (), count: int = 6,
) -> tuple[Any, ...]:  # fmt: skip
    dtype, op = DTYPES.index("float32"), OP_CODES["max"]
    return (KINDS.index(kind), dtype, op, way, count, scale, dims, root, own, list(bounds))


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (call("barrier"), "barrier()"),
        (call("split"), "split()"),
        (call("empty"), "empty(shape (2, 3), float32)"),
        (call("all_reduce", way=1), "all_reduce(max, float32, shape (2, 3), algorithm=one_shot)"),
        (call("all_reduce", way=2, scale=0.5), "all_reduce(max, float32, shape (2, 3), scale=0.5, algorithm=direct)"),
        (
            call("all_reduce", way=3, scale=0.5, own=True),
            "all_reduce(max, float32, shape (2, 3), each rank with its own weight, algorithm=a schedule)",
        ),
        (call("broadcast", root=1), "broadcast(float32, shape (2, 3), root=1)"),
        (call("reduce", root=0), "reduce(max, float32, shape (2, 3), root=0)"),
        (call("all_gather"), "all_gather(float32, shape (2, 3))"),
        (call("all_gather", (), count=6), "all_gather(float32, 6 elements)"),
        (call("all_gather", (), count=1), "all_gather(float32, shape ())"),
        (
            call("reduce_scatter_", bounds=(0, 2, 6)),
            "reduce_scatter_(max, float32, shape (2, 3), bounds=[0, 2, 6])",
        ),
        (
            call("all_gather_", bounds=tuple(range(17))),
            f"all_gather_(float32, shape (2, 3), bounds={list(range(17))})",
        ),
        (
            call("all_gather_", bounds=tuple(range(18))),
            "all_gather_(float32, shape (2, 3), bounds=[0, 1, 2, 3, 4, 5, 6, 7, ..., 10, 11, 12, 13, 14, 15, 16, 17])",
        ),
    ],
)
def test_a_mismatch_says_what_each_side_called(told: tuple[Any, ...], words: str) -> None:
    failure = {"status": MISMATCH, "ranks": [1], "seq": 9, "calls": [told, call("barrier"), told]}
    found: Any = error_of(failure, "all_reduce", 0, 1.0)
    assert (type(found), found.ranks) == (MismatchError, (1,))
    if words != "barrier()":
        words = f"ranks 0 and 2 called {words}; rank 1 called barrier()"
        assert str(found) == f"collective 9: Detected mismatch between collectives on ranks: {words}"
    else:
        assert str(found).endswith("ranks 0-2 called barrier()")


# ------------------------------------------------------------------------------------------------ between hosts

RANK_MAP = RankMap(1, ((0, 1), (2, 3)), ("left", "right"), ("", ""))


@pytest.mark.parametrize(
    ("raised", "cause"),
    [
        (LinkError(LinkFailure("late", 3)), LinkFailure("late", 3)),
        (PeerLostError("", [0]), LinkFailure("lost", 0)),
        (DeadlineError("", [1]), LinkFailure("late", 1)),
        (DeadlineError("", []), LinkFailure("late", 1)),
        (MismatchError("", [0]), LinkFailure("disagreed", 1)),
        (KeyboardInterrupt(), LinkFailure("left", 1)),
        (ClosedError(""), LinkFailure("left", 1)),
    ],
)
def test_what_goes_wrong_here_is_told_as(raised: BaseException, cause: LinkFailure) -> None:
    assert cause_of(raised, RANK_MAP) == cause


def test_ranks_of_a_host_are_those_of_the_group() -> None:
    """Errors of shared memory count ranks within the host."""
    rank_map = RankMap(3, RANK_MAP.hosts, RANK_MAP.names, RANK_MAP.keys)
    assert cause_of(PeerLostError("", [0]), rank_map) == LinkFailure("lost", 2)
    assert cause_of(DeadlineError("", []), rank_map) == LinkFailure("late", 3)


def explained(cause: LinkFailure, raised: BaseException | None = None) -> SyncError:
    return explain("all_reduce", cause, raised or LinkError(cause), RANK_MAP, 2.5)


def test_causes_become_errors_that_name_the_culprit_and_its_host() -> None:
    late = explained(LinkFailure("late", 2))
    assert (type(late), late.ranks) == (DeadlineError, (2,))
    where = "all_reduce on rank 1 on host left"
    assert str(late).startswith(f"{where}: Timed out waiting 2500ms: rank 2 on host right did not send, though it")
    left = explained(LinkFailure("left", 3))
    assert (type(left), left.ranks) == (PeerLostError, (3,))
    assert f"{where}: Connection closed by peer: rank 3 on host right gave up; restart" in str(left)
    lost = explained(LinkFailure("lost", NOBODY))
    assert (type(lost), lost.ranks) == (PeerLostError, ())
    assert "Connection closed by peer: another rank died or cannot be reached; restart" in str(lost)
    assert "the reducer at the switch died" in str(explained(LinkFailure("lost", 4)))
    assert "rank 3 on host right died" in str(explained(LinkFailure("lost", 3)))
    odd = explained(LinkFailure("disagreed", 2, "this and that"))
    assert (type(odd), odd.ranks) == (MismatchError, (2,))
    assert "collectives on ranks: this and that (rank 2 on host right differs)" in str(odd)
    own = ClosedError("mine")
    assert explained(LinkFailure("left", 1), own) is own
    other = explained(LinkFailure("left", 1), OSError("no memory"))
    assert (type(other), other.ranks) == (ClosedError, ())
    assert "OSError: no memory" in str(other)


def test_what_differs_is_said_most_telling_first() -> None:
    ours = MessageHeader(4, 0xAB, 64, CollectiveSignature(1, 0, 0, 10))
    for theirs, words in (
        (ours._replace(seq=3, plan=1), "rank 2 on host right is at collective 3 on this link, this rank at 4"),
        (
            ours._replace(call=CollectiveSignature(1, 0, 0, 11), plan=1),
            "rank 2 on host right called all_reduce(sum, float32, 11 elements), this rank all_reduce(sum, float32, 10 "
            "elements)",
        ),
        (ours._replace(segment=65, plan=1), "rank 2 on host right cuts messages of 65 bytes, this rank of 64"),
        (ours._replace(plan=0xCD), "rank 2 on host right runs another schedule (000000cd) than this rank (000000ab)"),
    ):
        cause = cause_of(SignatureMismatch(2, theirs, ours), RANK_MAP)
        assert (cause.kind, cause.vertex, cause.detail) == ("disagreed", 2, words)


def test_a_call_is_said_with_what_is_not_usual_in_it() -> None:
    base = CollectiveSignature(KINDS.index("all_reduce"), 0, OP_CODES["sum"], 10)
    said = {
        base: "",
        base._replace(extra=1.0): "",
        base._replace(extra=float("nan")): "",
        base._replace(extra=0.25): ", 0.25",
        base._replace(tag=0xAB): ", of hash 000000ab",
        base._replace(flags=OWN_SCALE): ", weighted",
        base._replace(flags=WIRE_FLAGS["bfloat16"] | OWN_SCALE): ", weighted, as bfloat16",
        base._replace(flags=WIRE_FLAGS["float16"]): ", as float16",
    }
    for one, words in said.items():
        assert str(one) == f"all_reduce(sum, float32, 10 elements{words})"
    assert str(base._replace(kind=KINDS.index("broadcast"))) == "broadcast(float32, 10 elements)"
    assert str(base._replace(kind=len(KINDS) - 1)) == "split(float32, 10 elements)"
    assert str(base._replace(kind=len(KINDS))) == f"collective {len(KINDS)}(float32, 10 elements)"
    assert str(Operation(base, "a ring")) == "all_reduce(sum, float32, 10 elements) by a ring"


# ------------------------------------------------------------------------------------------------ explanations


@pytest.mark.parametrize(
    ("size_bytes", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1 << 10, "1 KiB"),
        (5 << 19, "2.50 MiB"),
    ],
)
def test_sizes_are_said_in_the_unit_of_their_size(size_bytes: int, words: str) -> None:
    assert str(Explanation(size_bytes, "ring", "so it is")) == f"{words}: ring. so it is."


def test_rows_have_the_times_in_units_and_the_best_twelve_are_shown() -> None:
    rows = [TimingRow(f"tree*{at}", 0.5e-3, 1.25e-3, 1.0 + at, True) for at in range(13)]
    rows += [TimingRow("ring", 1.0, None, 999e-6, True), TimingRow("native", 1e-3, 2.0, 3.0, True)]
    text = str(Explanation(4, "ring", "so it is", tuple(rows), 8)).splitlines()
    assert text[2].split() == ["at", "8", "B", "predicted", "measured", "expected"]
    assert len({len(line) for line in text[2:-1]}) == 1, "a table"
    shown = [line.replace(">", "").split()[0] for line in text[3:-1]]
    assert shown == [*(f"tree*{at}" for at in range(12)), "ring", "native"]
    assert text[3].split() == ["tree*0", "500", "µs", "1.25", "ms", "1.00", "s"]
    assert text[-3].split() == [">", "ring", "1.00", "s", "999", "µs"]
    assert text[-1] == "  and 1 more"
    few = str(Explanation(4, "ring", "so it is", tuple(rows[:12]), 8)).splitlines()
    assert not few[-1].startswith("  and")


def test_a_change_is_said_with_what_stays_and_what_does_not() -> None:
    for before, after, others, turn in (
        ("ring", "tree", False, "ring -> tree"),
        ("ring", "tree", True, "ring -> tree"),
        ("ring", "ring", False, "ring stays"),
        ("ring", "ring", True, "ring stays, other sizes change"),
    ):
        change = AlgorithmChange(4, before, after, others, "they take long", (), "no link is slow", 0.5)
        assert change.describe() == f"they take long; no link is slow; {turn}"


def test_what_became_of_links_is_said_by_the_slowest_or_by_all_of_them() -> None:
    def probe(rates: np.ndarray) -> Probe:
        with np.errstate(divide="ignore"):
            return Probe(CostNetwork(np.zeros((4, 4)), np.where(rates > 0, 1 / rates, 0.0)), rates, np.zeros((4, 4)))

    even = np.full((4, 4), 100e6)
    np.fill_diagonal(even, 0.0)
    cut, alone = even.copy(), even.copy()
    cut[2, 0] = 10e6
    alone[1, :] = alone[:, 1] = 20e6
    alone[1, 1] = 0.0
    names = ("a", "b", "c", "d")
    assert difference(None, probe(even), names) == "no link is slow"
    assert difference(probe(2 * even), probe(even), names) == "links carry 0.50 times what they did"
    assert difference(probe(even), probe(cut), names) == "c > a carries 10 MB/s, others 100 MB/s"
    assert difference(None, probe(alone), names) == "b carries 20 MB/s, others 100 MB/s"
    assert MeasuredSlowLink(2, 0, 10e6, 100e6).share == 0.1
