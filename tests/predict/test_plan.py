"""A plan's parts: bound, ranking, scaling, buckets, batch, memory, sharding."""

import math

import pytest

from ringside.errors import UsageError
from ringside.predict import LinkClass, LinkOverride, Topology, preset
from ringside.predict.plan.buckets import best_buckets, exposed_s
from ringside.predict.plan.memory import batch, fit, sharded, state
from ringside.predict.plan.options import option, options
from ringside.predict.plan.plan import PlanQuestion, bounds, contenders, crossovers, plan
from ringside.view.predict_text import full_plan, short_plan

BOX = Topology(
    "box", (4, 4), inside=LinkClass("shared_memory", 1e-6, 10e9), between=LinkClass("ethernet", 20e-6, 1e9), nics=1
)


# ------------------------------------------------------------------------------------------------ bound


def test_large_tensors_are_bound_by_the_narrowest_links_bandwidth_small_ones_by_latency():
    large, small = (bounds(BOX, "hierarchical", size)[0] for size in (1e9, 8.0))
    assert (large.kind, large.where, large.link) == ("bandwidth", "between", "ethernet")
    assert (small.kind, small.where, small.link) == ("latency", "between", "ethernet")
    assert large.share > 0.8


def test_the_bound_is_found_on_measured_links_of_their_own():
    links = tuple(LinkOverride(a, b, 30e-6, 1e8, "hosts") for a, b in ((0, 1), (1, 0)))
    measured = Topology("probe", (1, 1), between=LinkClass("ethernet", 1e-6, 1e9), overrides=links)
    found = bounds(measured, "ring", 1e8)
    assert (found[0].kind, found[0].link) == ("bandwidth", "ethernet")
    assert found[0].share > 0.95


def test_shares_add_up_where_one_path_decides():
    shares = bounds(preset("dgx-h100", 2), "auto", 1e7)
    assert sum(one.share for one in shares) == pytest.approx(1.0, abs=0.05)


# ------------------------------------------------------------------------------------------------ ranking


def test_at_a_crossover_both_take_as_long():
    every = contenders(options(BOX))
    by_name = {one.name: one for one in every}
    found = crossovers(every)
    assert found
    for one in found:
        before, after = (float(by_name[name].predict([one.size_bytes]).times_s[0]) for name in (one.before, one.after))
        assert before == pytest.approx(after, rel=0.02)
    assert [one.size_bytes for one in found] == sorted(one.size_bytes for one in found)


def test_the_fastest_of_a_schedules_ranking_is_what_auto_takes():
    found = plan(PlanQuestion(BOX, 1e7))
    assert found.priced.algorithm == found.here[0].algorithm
    times = [one.seconds.value for one in found.here]
    assert times == sorted(times)


def test_what_tables_support_comes_before_schedules_alone():
    lines = full_plan(plan(PlanQuestion(preset("dgx-h100", 2), 65536)))
    alone = next(i for i, line in enumerate(lines) if line.startswith("  Rows priced by schedule"))
    assert any(line.startswith("  ring") for line in lines[:alone])
    assert any(line.startswith("  direct") for line in lines[alone:])


# ------------------------------------------------------------------------------------------------ scaling


def test_efficiency_falls_with_hosts_and_lies_in_its_band():
    found = plan(PlanQuestion(preset("ethernet-10g", 6), 1e8, compute_s=0.2))
    assert [one.hosts for one in found.scaling] == [1, 2, 4, 6]
    middle = [one.efficiency.value for one in found.scaling]
    assert middle[0] == 1.0
    assert middle == sorted(middle, reverse=True)
    assert all(one.efficiency.low <= one.efficiency.value <= one.efficiency.high for one in found.scaling)
    assert found.scaling[0].seconds is None


def test_an_nvls_tree_scales_from_nvls_on_one_host():
    found = plan(PlanQuestion(preset("dgx-h100", 4), 1e9, algorithm="nvls_tree"))
    assert found.scaling[0].seconds.value == pytest.approx(
        float(option(preset("dgx-h100", 1), "nvls").predict([1e9]).times_s[0])
    )


def test_a_plan_of_more_ranks_than_it_can_be_of_is_refused():
    with pytest.raises(UsageError, match=r"x: \d+ ranks; a plan is of at most \d+: fewer --hosts"):
        plan(PlanQuestion(Topology("x", (1 << 20, 1 << 20), BOX.inside, BOX.between), 1e6))


@pytest.mark.parametrize(
    ("stage", "dtype", "bytes_each"),
    [  # 7e9 parameters on 8 ranks: weights, gradients, and the optimizer's 12 (of fp32: 8) bytes a parameter
        (0, "bf16", (14e9, 14e9, 84e9)), (1, "bf16", (14e9, 14e9, 10.5e9)), (2, "fp16", (14e9, 1.75e9, 10.5e9)),
        (3, "bf16", (1.75e9, 1.75e9, 10.5e9)), (0, "fp32", (28e9, 28e9, 56e9)), (3, "fp32", (3.5e9, 3.5e9, 7e9)),
    ],
)  # fmt: skip
def test_what_a_rank_holds_at_each_stage(stage, dtype, bytes_each):
    held = state(7e9, 8, stage, dtype)
    assert (held.weights_bytes, held.gradients_bytes, held.optimizer_bytes) == bytes_each
    assert held.total_bytes == sum(bytes_each)
    with pytest.raises(UsageError, match="--dtype int8: there are bf16, fp16, fp32"):
        state(7e9, 8, stage, "int8")


def test_a_model_fits_from_the_first_stage_on_that_its_memory_holds():
    for memory, stage in ((112e9, 0), (111.9e9, 1), (38.5e9, 1), (38.4e9, 2), (26.25e9, 2), (14e9, 3), (13.9e9, None)):
        found = fit(7e9, 8, memory)
        assert found.stage == stage, memory
    assert fit(7e9, 8, None).stage is None


def test_hosts_of_different_sizes_are_priced_but_not_taken_apart():
    uneven = Topology("uneven", (4, 2), inside=BOX.inside, between=BOX.between)
    found = plan(PlanQuestion(uneven, 1e6))
    assert found.scaling == ()
    assert found.priced.seconds.value > 0


# ------------------------------------------------------------------------------------------------ buckets


def brute(count, bucket_s, backward_s):
    """Play the buckets one after the other, each when backward has filled it and the one before is done."""
    free = 0.0
    for i in range(1, count + 1):
        free = max(free, backward_s * i / count) + bucket_s
    return free - backward_s


@pytest.mark.parametrize("count", [1, 2, 7, 64])
@pytest.mark.parametrize("bucket_s", [1e-4, 0.01, 0.3])
def test_the_formula_is_what_buckets_one_after_the_other_take(count, bucket_s):
    assert exposed_s(count, bucket_s, 0.5) == pytest.approx(brute(count, bucket_s, 0.5))


def test_buckets_hide_what_backward_is_long_enough_for():
    ring = option(preset("ethernet-10g", 4), "ring")
    best = best_buckets(ring, 1e8, compute_s=1.0)[0]
    assert best.count > 1
    assert best.exposed.value < 0.1 * best.whole.value
    assert best.exposed.low <= best.exposed.value <= best.exposed.high


def test_where_latency_is_dear_there_are_few_buckets():
    counts = []
    for alpha in (1e-6, 1e-3, 0.1):
        slow = Topology("slow", (1,) * 4, between=LinkClass("ethernet", alpha, 1e9))
        counts.append(best_buckets(option(slow, "ring"), 1e8, compute_s=0.3)[0].count)
    assert counts[0] > counts[1] > counts[2] == 1


def test_computation_takes_time():
    with pytest.raises(UsageError, match="--compute-seconds 0"):
        plan(PlanQuestion(BOX, 1e6, compute_s=0.0))


# ------------------------------------------------------------------------------------------------ batch, memory


def test_the_effective_batch_and_both_rules():
    one = batch(16, per_rank=8, accumulated=2, base=64)
    assert (one.effective, one.times, one.linear, one.square_root) == (256, 4.0, 4.0, 2.0)
    assert batch(9).square_root == 3.0
    with pytest.raises(UsageError, match="at least 1"):
        batch(4, per_rank=0)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_parameter_takes_16_bytes_whatever_the_precision(dtype):
    assert state(1e9, 8, dtype=dtype).total_bytes == 16e9
    assert state(1e9, 8, 3, dtype).total_bytes == 2e9


def test_stages_are_zeros():
    by_stage = [state(7.5e9, 64, stage).total_bytes / 1e9 for stage in range(4)]
    assert by_stage == pytest.approx([120, 31.4, 16.6, 1.88], abs=0.05)  # figure 1 of the paper


def test_70b_in_plain_data_parallel_on_80_gb_is_refused_and_sharded_is_priced():
    found = plan(PlanQuestion(preset("dgx-h100", 16), 140e9, parameters=70e9, memory_bytes=80e9))
    assert found.fit.refused
    assert found.fit.states[0].total_bytes == 1120e9
    assert (found.fit.stage, found.fit.least_ranks) == (3, 14)
    assert found.sharded.stage == 3
    assert found.sharded.total.value == pytest.approx(2 * found.sharded.gather.value + found.sharded.scatter.value)
    assert found.sharded.total.low < found.sharded.total.value < found.sharded.total.high
    # Half as much more than an all-reduce around the same ring moves.
    ring = float(option(preset("dgx-h100", 16), "ring").predict([140e9]).times_s[0])
    assert found.sharded.total.value == pytest.approx(1.5 * ring, rel=0.1)
    assert found.buckets == ()


def test_stage_1_moves_what_an_all_reduce_moves():
    cluster = preset("ethernet-10g", 8)
    memory = fit(1e9, 8, 6e9)
    assert memory.stage == 1
    found = sharded(cluster, memory, compute_s=1e6)
    ring = float(option(cluster, "ring").predict([2e9]).times_s[0])
    assert found.total.value == pytest.approx(ring, rel=0.01)
    assert found.exposed.value == 0.0


def test_what_fits_no_way_says_how_many_ranks_it_takes():
    memory = fit(70e9, 8, 80e9)
    assert (memory.stage, memory.refused) == (None, True)
    assert state(70e9, memory.least_ranks, 3).total_bytes <= 80e9 < state(70e9, memory.least_ranks - 1, 3).total_bytes
    assert sharded(preset("dgx-h100", 1), memory) is None
    assert not fit(70e9, 8, None).refused
    with pytest.raises(UsageError, match="memory"):
        fit(1e9, 8, 0.0)


# ------------------------------------------------------------------------------------------------ sizes and words


@pytest.mark.parametrize("size", [0.0, -1.0, math.nan, math.inf, 1e19])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(UsageError, match="more than 0"):
        plan(PlanQuestion(BOX, size))


def test_a_byte_and_a_petabyte_are_priced():
    for cluster in (preset("ethernet-10g", 3), preset("dgx-h100", 2)):
        small, large = (plan(PlanQuestion(cluster, size)).priced for size in (1.0, 1e15))
        assert 0 < small.seconds.value < 1e-3
        assert 1e3 < large.seconds.value < 1e7
        assert large.extrapolated


@pytest.mark.parametrize("name", ["dgx-h100", "gb200-nvl72", "pcie-box", "ethernet-10g", "loopback"])
@pytest.mark.parametrize("parameters", [1e7, 70e9, 1e13])
def test_the_short_form_fits_a_terminal(name, parameters):
    asked = PlanQuestion(preset(name), 2 * parameters, parameters=parameters, memory_bytes=80e9, compute_s=1.0)
    found = plan(asked)
    lines = short_plan(found)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert any("does not fit" in line for line in lines) == found.fit.refused
    assert len(full_plan(found)) > len(lines)
