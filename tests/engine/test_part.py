"""One rank's part between hosts: what it multiplies and divides by, when, and what its peers are told."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from ringside.engine.algorithm import AlgorithmSpec
from ringside.engine.dtypes import DTYPES, OP_CODES
from ringside.engine.net.context import EngineContext
from ringside.engine.net.exchange.compression import WireCompression
from ringside.engine.net.exchange.exchange import ExchangeRequest
from ringside.engine.net.exchange.signature import OWN_SCALE, WHOLE_FOLD, WIRE_FLAGS
from ringside.engine.net.rank_map import RankMap
from ringside.engine.net.reduction import Reduction, ReductionPlan, plan_reduction, safe_mean, signature_of
from ringside.errors import UsageError

SUM, AVG = OP_CODES["sum"], OP_CODES["avg"]
FLOAT32, FLOAT16, BFLOAT16 = (DTYPES.index(name) for name in ("float32", "float16", "bfloat16"))
WEIGHTS = (1.0, 2.0, 3.0, 2.0)
# Rank 1 of four ranks on two hosts. "in pieces": partial sums travel; "at once": one fold adds up all contributions.
WAYS = {"the group's own": "native", "in pieces": "ring", "at once": "one_shot", "a switch": "in_network"}
RANK_MAP = RankMap(1, ((0, 1), (2, 3)), ("left", "right"), ("", ""))

SUM_OF_3 = Reduction(FLOAT32, SUM, scale=3.0)
MEAN = Reduction(FLOAT32, AVG)
WEIGHTED = Reduction(FLOAT32, AVG, scale=2.0, scales=WEIGHTS, divisor=8.0)
HALVES = Reduction(FLOAT16, AVG)
NARROW = Reduction(FLOAT32, AVG, wire=WireCompression("float16"))
BRAIN = Reduction(FLOAT32, AVG, wire=WireCompression("bfloat16"))


def request_of(way: str, what: Reduction) -> ExchangeRequest:
    found = part(way, what).request
    assert found is not None
    return found


def part(way: str, what: Reduction) -> ReductionPlan:
    return plan_reduction(AlgorithmSpec.parse(WAYS[way]), None, what, signature_of(what, 10), RANK_MAP)


@pytest.mark.parametrize(
    ("what", "way", "first", "last_divides", "divisor"),
    [
        (SUM_OF_3, "the group's own", 3.0, False, 0.0),
        (SUM_OF_3, "in pieces", 3.0, False, 0.0),
        (SUM_OF_3, "at once", 1.0, False, 0.0),
        (MEAN, "the group's own", 1.0, False, 4.0),
        (MEAN, "in pieces", 1.0, True, 0.0),
        (MEAN, "at once", 1.0, False, 0.0),
        (MEAN, "a switch", 1.0, False, 0.0),
        (WEIGHTED, "the group's own", 2.0, False, 8.0),
        (WEIGHTED, "in pieces", 2.0, True, 0.0),
        (WEIGHTED, "at once", 1.0, False, 0.0),
        (WEIGHTED, "a switch", 2.0, False, 8.0),
        (HALVES, "the group's own", 0.25, False, 0.0),
        (HALVES, "in pieces", 0.25, False, 0.0),
        (HALVES, "at once", 1.0, False, 0.0),
        (NARROW, "in pieces", 0.25, False, 0.0),
        (NARROW, "at once", 0.25, False, 0.0),
        (NARROW, "a switch", 0.25, False, 0.0),
        (BRAIN, "in pieces", 1.0, True, 0.0),
        (BRAIN, "at once", 1.0, True, 0.0),
        (BRAIN, "a switch", 1.0, False, 4.0),
    ],
)
def test_elements_are_scaled_and_divided_once(
    what: Reduction, way: str, first: float, last_divides: bool, divisor: float
) -> None:
    found = part(way, what)
    request = found.request
    divides_last = request is not None and request.last_fold not in (None, request.fold)
    assert (found.pre_scale, divides_last, found.divisor) == (first, last_divides, divisor)


@pytest.mark.parametrize("what", [SUM_OF_3, MEAN, WEIGHTED, HALVES])
def test_one_fold_of_all_contributions_is_the_whole_reduction(what: Reduction) -> None:
    x = np.array([1, 2, 4, 8], "f2" if what is HALVES else "f4")
    addresses = [x[at:].ctypes.data for at in range(4)]
    request_of("at once", what).fold(addresses, addresses[0], 1)
    want = {SUM_OF_3: 3 * 15, MEAN: 15 / 4, HALVES: 15 / 4, WEIGHTED: (1 + 2 * 2 + 3 * 4 + 2 * 8) / 8}[what]
    assert x[0] == want


def test_a_weighted_mean_of_halves_becomes_a_sum_of_shares() -> None:
    for dtype in (FLOAT16, BFLOAT16):
        shares = safe_mean(replace(WEIGHTED, dtype=dtype), 4)
        assert (shares.op, shares.scale, shares.scales) == (SUM, 0.25, (0.125, 0.25, 0.375, 0.25))
    assert safe_mean(WEIGHTED, 4) is WEIGHTED


def test_the_last_fold_of_partial_sums_divides() -> None:
    x = np.array([1, 2], "f4")
    addresses = [x[at:].ctypes.data for at in range(2)]
    found = request_of("in pieces", WEIGHTED)
    assert found.last_fold is not None
    found.fold(addresses, addresses[0], 1)
    assert x[0] == 3
    found.last_fold(addresses, addresses[0], 1)
    assert x[0] == 5 / 8


def test_peers_are_told_what_was_called_and_a_switch_what_it_has_to_do() -> None:
    ways = ("in pieces", "at once", "a switch")
    assert [request_of(way, MEAN).call.flags for way in ways] == [0, WHOLE_FOLD, WHOLE_FOLD]
    assert [request_of(way, WEIGHTED).call.flags for way in ways] == [OWN_SCALE, OWN_SCALE | WHOLE_FOLD, OWN_SCALE]
    assert [request_of(way, NARROW).call.flags for way in ways] == [WIRE_FLAGS["float16"]] * 3
    assert [request_of(way, BRAIN).call.flags for way in ways] == [WIRE_FLAGS["bfloat16"]] * 3
    assert [request_of(way, NARROW).call.op for way in ways] == [AVG, AVG, SUM], "the shares are summed"
    assert [request_of(way, SUM_OF_3).call.extra for way in ways] == [3.0] * 3
    wide = Reduction(FLOAT32, SUM, scale=3.0, wire=WireCompression("float16"))
    assert [request_of(way, wide).call.extra for way in ways] == [3.0, 3.0, 1.0], "the ranks have multiplied"
    assert [part(way, what).reduction.fold_op for way in WAYS for what in (MEAN, HALVES, SUM_OF_3)] == [SUM] * 12
    assert part("in pieces", Reduction(FLOAT32, OP_CODES["max"])).reduction.fold_op == OP_CODES["max"]


def test_between_hosts_the_vertices_are_the_hosts() -> None:
    found = plan_reduction(AlgorithmSpec.parse("hosts/tree"), (1, 3), MEAN, signature_of(MEAN, 10), RANK_MAP)
    assert found.request is not None
    assert set(found.request.plan.links) <= {0, 1}
    assert part("the group's own", MEAN).request is None


# ------------------------------------------------------------------------------------------------ what a spec means


def context(rank: int = 0, *, reducers: int = 0, segment_bytes: int = 1024) -> EngineContext:
    """Seven ranks on three hosts, the smallest of which has two."""
    rank_map = RankMap(rank, ((0, 1, 2), (3, 4), (5, 6)), ("a", "b", "c"), ("", "", ""))
    transport = SimpleNamespace(size=7 + reducers)
    sizes = SimpleNamespace(
        transport=transport,
        window=4,
        segment_of=lambda item, wire: segment_bytes // item * item,
        size_of=lambda schedule, size_bytes, item, wire: (schedule.name, size_bytes, item, wire),
    )
    checks = SimpleNamespace(check=lambda dtype, op: checked.append((dtype, op)))
    checked.clear()
    return EngineContext(rank_map, sizes, None, checks, None, 1 << 20)  # type: ignore[arg-type]


checked: list[tuple[int, int]] = []


def test_vertices_and_lanes_are_those_that_a_spec_runs_over() -> None:
    for over, vertices, lanes in (("ranks", (7, 4), 2), ("hosts", (3, 1), 2), ("leaders", (3, 1), 1)):
        spec = AlgorithmSpec("ring", over)
        assert (context(4).vertex(spec), context(4).lanes(spec)) == (vertices, lanes)
        assert [context(rank).has_lane(spec) for rank in range(3)] == [True, lanes == 2, False]
    found = context()
    assert [found.block_elements(DTYPES.index(name)) for name in ("float32", "int8")] == [1 << 18, 1 << 20]
    assert replace(found, block_bytes=2).block_elements(FLOAT32) == 1


def test_a_reduction_is_checked_as_it_travels() -> None:
    found = context()
    assert found.checked(NARROW, AlgorithmSpec("ring")) is NARROW
    for spec in (AlgorithmSpec("native"), AlgorithmSpec("native", "hosts")):
        assert found.checked(NARROW, spec).wire is None
    assert checked == [(FLOAT32, AVG)] * 2
    wide = Reduction(FLOAT16, SUM, wire=WireCompression("float16"))
    assert found.checked(wide, AlgorithmSpec("ring")).wire is None, "only float32 is made narrow"
    for spec, reducers, words in (
        (AlgorithmSpec("in_network"), 0, "in_network needs a reducer at the switch"),
        (AlgorithmSpec("in_network", "hosts"), 0, "hosts/in_network needs a reducer at the switch"),
        (AlgorithmSpec("in_network", "hosts"), 1, "takes one slice at a time: leaders/in_network"),
    ):
        with pytest.raises(UsageError, match=words):
            context(reducers=reducers).checked(MEAN, spec)
    for over in ("ranks", "leaders"):
        assert context(reducers=1).checked(MEAN, AlgorithmSpec("in_network", over)) is MEAN


def test_what_is_smaller_than_two_messages_for_each_lane_goes_whole() -> None:
    ring = AlgorithmSpec("ring", "hosts")
    for spec, elements in ((ring, 1024), (AlgorithmSpec("ring", "leaders"), 512)):
        assert context().layout(spec, elements - 1, MEAN) is None
        layout = context().layout(spec, elements, MEAN)
        assert layout is not None
        assert sum(piece.bounds[-1] for piece in layout.pieces) == elements
        assert {len(piece.bounds) for piece in layout.pieces} == {4}
        assert all((piece.bounds[2] > piece.bounds[1]) == (spec is ring) for piece in layout.pieces)
    for other in ("ring", "hosts/native", "leaders/in_network", "hosts/direct"):
        found = context(reducers=1).layout(AlgorithmSpec.parse(other), 1 << 20, MEAN)
        assert (found is None) == (other != "hosts/direct"), other
    largest = context().layout(ring, 1 << 24, MEAN)
    assert largest is not None
    assert max(piece.bounds[-1] for piece in largest.pieces) <= 1 << 18
    assert context().message_size(ring, 1001, HALVES)[1:] == (500 * 2, 2, None)  # type: ignore[comparison-overlap]
    assert context().message_size(AlgorithmSpec("ring", "leaders"), 1001, NARROW)[1:3] == (1001 * 4, 4)
