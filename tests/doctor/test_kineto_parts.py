"""Names, sizes, intervals and chances: the small pure parts beneath the reader of traces."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringside.decoding import converted, plain_count, plain_ranks
from ringside.doctor.kineto import collector as names
from ringside.doctor.kineto.match import match_collectives
from ringside.doctor.kineto.steps import steps_of
from ringside.doctor.kineto.straggler import (
    RankPace,
    binomial_tail,
    bound_by_communication,
    clumping,
    judge_mismatches,
    judge_stragglers,
    too_many_collectives,
)
from ringside.doctor.kineto.trace import RankTrace, TracedCollective, TracedStep
from ringside.monitor import intervals

PIECES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=12)


def collectives_of(category: str, name: str, **args: Any) -> list[TracedCollective]:
    """What a trace with one event holds."""
    collector = names.TraceCollector()
    raw = msgspec.Raw(msgspec.json.encode(args))
    collector.add_batch([names.TraceEvent(ph="X", cat=category, name=name, dur=1.0, args=raw)])
    return collector.trace("a.json", 0.0).collectives


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "all_reduce"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", "send_recv"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevComm*)", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "reduce_scatter"),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t", "broadcast"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "collective"),
        ("ncclKernel_Generic", "collective"),
        ("mscclKERNEL_AllGather_RING", "all_gather"),
        ("void at::native::vectorized_elementwise_kernel<4>(int)", ""),
        ("ampere_sgemm_128x64_tn", ""),
    ],
)
def test_kernels(name, kind):
    assert [collective.kind for collective in collectives_of("kernel", name)] == ([kind] if kind else [])


@pytest.mark.parametrize(
    ("name", "kind"),
    [("nccl:all_reduce", "all_reduce"), ("gloo:all_reduce", "all_reduce"), ("nccl:_all_gather_base", "all_gather"),
     ("nccl:_reduce_scatter_base", "reduce_scatter"), ("nccl:all_to_all", "all_to_all"),
     ("Optimizer.step#SGD.step", ""), ("nccl:reduce_scatter_tensor_coalesced", "reduce_scatter")],
)  # fmt: skip
def test_annotations(name, kind):
    assert [collective.kind for collective in collectives_of("user_annotation", name)] == ([kind] if kind else [])


def test_shapes_types_and_ranks():
    assert names.count_elements([[530442]]) == 530442
    assert names.count_elements([[[2, 3], [4]], [], []]) == 10
    assert names.count_elements("no shape") == 0
    for dtype, size in (("Float", 4), ("c10::BFloat16", 2), ("Half", 2), ("double", 8), ("?", 4)):
        (collective,) = collectives_of("kernel", "ncclKernel_Generic", **{"In msg nelems": 3, "dtype": dtype})
        assert (collective.elements, collective.nbytes) == (3, 3 * size)
    assert plain_ranks("[0, 1, 12]") == plain_ranks([0, 1, 12]) == (0, 1, 12)
    assert plain_ranks(None) == ()
    assert plain_ranks([0, "1", 2.5, 3]) == (0, 3)
    assert plain_ranks("9" * 30) == (10**18 - 1,)
    counts = [plain_count(value) for value in (0, "7", (1 << 20) - 1, 1 << 20, -1, "1e3", None, "0" * 8)]
    assert counts == [0, 7, (1 << 20) - 1, -1, -1, -1, -1, -1]
    assert (converted("3", int, None), converted("x", int, None), converted([[]], list[int], ())) == (3, None, ())


def covered(pieces: list[tuple[int, int]]) -> set[int]:
    return {second for start, length in pieces for second in range(start, start + length)}


def array(pieces: list[tuple[int, int]]) -> np.ndarray:
    return np.array([[start, start + length] for start, length in pieces], dtype=np.float64).reshape(-1, 2)


@given(PIECES, PIECES)
def test_intervals_are_sets_of_seconds(a, b):
    one, two = intervals.union(array(a)), intervals.union(array(b))
    everything = np.array([[0.0, 50.0], [3.0, 9.0]])
    for found, truth in (
        (one, covered(a)),
        (intervals.intersect(one, two), covered(a) & covered(b)),
        (intervals.subtract(one, two), covered(a) - covered(b)),
    ):
        inside = intervals.within(found, everything)
        assert inside == pytest.approx([len(truth), len(truth & set(range(3, 9)))])
    assert (one[1:, 0] > one[:-1, 1]).all()


def test_chance_is_the_binomial_tail():
    assert binomial_tail(0, 9, 0.3) == pytest.approx(1.0)
    assert binomial_tail(9, 9, 0.5) == pytest.approx(0.5**9)
    assert binomial_tail(2, 3, 0.25) == pytest.approx(3 * 0.25**2 * 0.75 + 0.25**3)
    assert math.isclose(binomial_tail(1, 2, 0.5), 0.75)


# ------------------------------------------------------------------------------------------------ what is read


def test_arguments_that_are_not_what_they_should_be_cost_only_themselves():
    raw = [
        msgspec.Raw(text)
        for text in (b'{"correlation": 5}', b"", b'{"correlation": "x"}', b'{"correlation": 7.0}', b"[")
    ]
    assert names.correlations(raw) == [5, -1, -1, 7, -1]
    assert names.correlations([]) == []
    assert names.collective_arguments(msgspec.Raw(b'{"Seq": 3, "dtype": "Half"}')).seq == 3
    for broken in (b"[1]", b"{", b""):
        assert names.collective_arguments(msgspec.Raw(broken)) == names.CollectiveArguments()


def trace_of(rank: int, *calls: tuple[str, float, float, int, int], steps: Any = ((3, 0.0, 9.0),)) -> RankTrace:
    """A trace of (kind, start, end, elements, number) and of steps (number, start, end)."""
    parts = [TracedCollective(kind, start, end, elements, seq=seq) for kind, start, end, elements, seq in calls]
    return RankTrace(f"rank{rank}", rank, steps=[TracedStep(*step) for step in steps], collectives=parts)


def test_collectives_are_matched_by_number_or_else_by_how_many_of_their_like_came_before_in_the_step():
    unnumbered = [
        ("all_reduce", 1.0, 2.0, 8, -1), ("all_reduce", 3.0, 4.0, 8, -1), ("all_reduce", 5.0, 6.0, 9, -1),
        ("send", 6.0, 7.0, 8, -1),
    ]  # fmt: skip
    late = [(kind, start + 0.5, end, *rest) for kind, start, end, *rest in unnumbered]
    found = match_collectives([trace_of(0, *unnumbered), trace_of(1, *late[1:]), trace_of(2, *late[2:])])  # type: ignore[arg-type]
    assert [(part.elements, step) for part, step in zip(found.parts, found.steps, strict=True)] == [(8, 3), (9, 3)]
    assert found.unmatched == 1  # of sends and receives none is counted
    # Rank 1 has one of its like less, so its only one counts as the first.
    np.testing.assert_equal(found.starts, [[1.0, 3.5, np.nan], [5.0, 5.5, 5.5]])
    np.testing.assert_equal(found.waits, [[0.5, 0.0, np.nan], [0.5, 0.0, 0.0]])
    assert found.mean_per_rank(found.waits) == pytest.approx([0.5, 0.0, 0.0])
    none = match_collectives([trace_of(0), trace_of(1)])
    assert np.isnan(none.mean_per_rank(none.waits)).all()
    assert math.isnan(none.end_spread_s())
    before = match_collectives([trace_of(r, ("all_reduce", -1.0, 0.0, 8, 4)) for r in range(2)])
    assert before.steps.tolist() == [-1]


@pytest.mark.parametrize(
    ("work", "tail_s", "after_s"),
    [
        ([[1.0, 4.0]], 2.0, 6.0),
        ([[1.0, 2.0], [3.0, 8.0]], 0.0, 4.0),  # it went on while the collective ran
        ([[1.0, 2.0], [7.0, 8.0]], 4.0, 8.0),  # what began later is not what it needed
        ([[-3.0, 0.0]], None, None),  # of the step before
        ([], None, None),
    ],
)
def test_a_devices_last_gradient_is_the_last_work_before_the_collectives_end(work, tail_s, after_s):
    one = trace_of(0, ("all_reduce", 2.0, 3.0, 8, 1), ("all_reduce", 5.0, 6.0, 8, 2), steps=[(3, 0.0, 10.0)])
    found = steps_of(dataclasses.replace(one, device=True, work=np.array(work).reshape(-1, 2)))
    expected = [np.nan if tail_s is None else tail_s], [np.nan if after_s is None else after_s]
    np.testing.assert_allclose((found.tail_s, found.after_backward_s), expected)
    assert found.collectives.tolist() == [2]


def test_calls_of_one_number_differ_in_kind_and_of_an_all_reduce_in_size():
    def conflicts(*calls: tuple[str, int]) -> list[Any]:
        return match_collectives(
            [trace_of(rank, (kind, 1.0, 2.0, elements, 4)) for rank, (kind, elements) in enumerate(calls)]
        ).conflicts

    assert conflicts(("all_reduce", 8), ("all_reduce", 8)) == []
    assert conflicts(("all_gather", 8), ("all_gather", 9)) == []
    told = [("", 4, {0: "all_reduce of 8", 1: "all_reduce of 9"})]
    assert conflicts(("all_reduce", 8), ("all_reduce", 9)) == told
    assert conflicts(("all_reduce", 8), ("broadcast", 8)) == [("", 4, {0: "all_reduce of 8", 1: "broadcast of 8"})]
    many = [("tp", 9, {0: "a", 1: "b"}), ("dp", 7, dict.fromkeys(range(12), "a") | {3: "b", 9: "c"})]
    (verdict,) = judge_mismatches(many)
    assert (verdict.ranks, verdict.evidence) == ([3, 9], {"seq": 7, "group": "dp", "usual": "a"})
    assert verdict.cause.startswith("ranks called different collectives as number 7 of group dp: rank 0: a; rank 1: a;")
    assert verdict.cause.endswith("rank 7: a")  # eight of them are enough
    (verdict,) = judge_mismatches(told)
    assert (verdict.ranks, "number 4 of group unnamed" in verdict.cause) == ([], True)
    assert judge_mismatches([]) == []


# ------------------------------------------------------------------------------------------------ what it means


def test_steps_that_depend_on_those_before_count_as_fewer():
    assert clumping(np.arange(9.0)) == 1.0  # too few to tell
    assert clumping(np.ones(50)) == 1.0
    assert clumping(np.resize([1.0, -1.0], 50)) == 1.0  # never more than there are
    # blocks of ten: of 40 steps 36 are like the one before and 3 unlike, so r = (36 - 3) / 40 + 1 / 40, a few more
    blocks = np.repeat([1.0, -1.0, 1.0, -1.0], 10)
    r = (33 / 40 + 1 / 40) * (1 + 3 / 40)
    assert clumping(blocks) == pytest.approx((1 + r) / (1 - r))
    assert clumping(np.repeat([1.0, -1.0], 500)) == pytest.approx(1.95 / 0.05)


@pytest.mark.parametrize(
    ("steps", "per_step", "small_ratio", "exposed", "found"),
    [
        (3, 16.0, 1.0, 0.05, True),
        (2, 16.0, 1.0, 0.05, False),
        (3, 32.0, 0.5, 0.05, True),
        (3, 31.9, 0.5, 0.05, False),
        (3, 100.0, 0.49, 0.05, False),
        (3, 16.0, 1.0, 0.049, False),
        (3, 200.0, None, 0.0, True),
        (3, 199.9, None, 1.0, False),
    ],
)
def test_small_collectives_are_too_many_from_these_figures_on(steps, per_step, small_ratio, exposed, found):
    verdicts = too_many_collectives(range(5, 5 + steps), per_step, small_ratio, exposed)
    assert [one.kind for one in verdicts] == ["small_collectives"] * found
    for verdict in verdicts:
        assert (verdict.since_step, verdict.detected_step, verdict.ranks) == (5, 4 + steps, [])
        assert verdict.evidence.keys() - {"small_ratio"} == {"collectives_per_step", "exposed_ratio"}
        assert ("record_shapes=True" in verdict.advice) is (small_ratio is None)
        told = "16 of" if small_ratio is not None else "each of 200 collectives per step costs a launch"
        assert verdict.cause.startswith(told)


def pace(own_s: Any, exposed_s: Any) -> RankPace:
    own, exposed = np.array(own_s, dtype=float), np.array(exposed_s, dtype=float)
    ranks, numbers = list(range(7, 7 + own.shape[1])), list(range(3, 3 + len(own)))
    return RankPace(ranks, numbers, own, own + exposed, exposed)


def test_a_job_is_bound_by_what_even_the_rank_that_waits_least_waits_for():
    (verdict,) = bound_by_communication(pace([[3.0, 2.0]] * 3, [[7.0, 8.0]] * 3))
    assert (verdict.since_step, verdict.detected_step, verdict.ranks) == (3, 5, [])
    assert verdict.evidence == {"exposed_ratio": 0.7, "steps": 3}
    assert verdict.excess_ratio == pytest.approx(0.7 / 0.3)
    assert verdict.cost_rank_seconds == pytest.approx(3 * 7.0 * 2)
    assert bound_by_communication(pace([[3.1, 2.0]] * 3, [[6.9, 8.0]] * 3)) == []
    assert bound_by_communication(pace([[3.0, 2.0]] * 2, [[7.0, 8.0]] * 2)) == []
    assert bound_by_communication(pace([[3.0]] * 3, [[7.0]] * 3)) == []


def test_a_straggler_is_told_with_what_its_collectives_show():
    own = np.full((6, 3), 1.0)
    own[:, 1] = 1.5
    late_s, waits_s = np.array([0.0, 0.5, 0.02]), np.array([0.5, np.nan, 0.4])
    (verdict,) = judge_stragglers(pace(own, 2.0 - own), late_s, waits_s)
    assert (verdict.kind, verdict.ranks, verdict.since_step, verdict.detected_step) == ("slow_rank", [8], 3, 8)
    shown = {name: verdict.evidence[name] for name in verdict.evidence if "lateness" in name or "wait" in name}
    assert shown == {
        "lateness_seconds": 0.5, "others_lateness_seconds": pytest.approx(0.01), "wait_seconds": 0.0,
        "others_wait_seconds": pytest.approx(0.45),
    }  # fmt: skip
    assert verdict.evidence["slowest_in_steps"] == 6
    assert "it arrives last at collectives (500 ms late on average)" in verdict.cause
    assert "the others wait 450 ms per collective" in verdict.cause
    assert judge_stragglers(pace(own[:2], own[:2]), late_s, waits_s) == []
    assert judge_stragglers(pace(own[:, 1:2], own[:, 1:2]), late_s, waits_s) == []
    assert pace(own[:, :1], own[:, :1]).excess.tolist() == [0.0]
    assert pace(own, own).slowest == [0, 6, 0]
    assert pace(own[:0], own[:0]).slowest == []


@pytest.mark.parametrize(("slow_steps", "named"), [(39, []), (40, [(9, 33, 73)])])
def test_a_rank_that_was_slow_for_a_while_is_a_straggler_from_a_third_of_the_steps_on(
    slow_steps: int, named: list[tuple[int, int, int]]
) -> None:
    own = 0.1 * np.exp(np.random.default_rng(7).normal(0, 0.01, (120, 4)))
    own[30 : 30 + slow_steps, 2] *= 1.5
    found = judge_stragglers(pace(own, own), np.zeros(4), np.zeros(4))
    assert [(*one.ranks, one.since_step, one.evidence["until_step"]) for one in found] == named
