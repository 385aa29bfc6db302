"""A training step: what its programs take where theory says it, groups of ranks, what is worth it, what helps."""

from dataclasses import replace

import pytest

from ringside.errors import UsageError
from ringside.predict import LinkClass, Topology, preset
from ringside.predict.laws.calibrate import Band
from ringside.predict.plan.advice import Situation, helps, worth
from ringside.predict.plan.buckets import exposed_s
from ringside.predict.plan.options import collective, option
from ringside.predict.plan.plan import PlanQuestion, plan
from ringside.predict.plan.step import Job, groups, step_time

FLAT = Topology("flat", (1,) * 4, between=LinkClass("ethernet", 0.0, 1e9))
LAYERS, SIZE, COMPUTE_S = 10, 1e9, 3.0
GATHER = 0.75 * SIZE / LAYERS / 1e9  # of a layer among four: three quarters of it pass every link


def ring(part, _):
    return option(part, "ring")


def step(job, compute_s=COMPUTE_S, topology=FLAT):
    return step_time(topology, SIZE, compute_s, job, ring)


# ------------------------------------------------------------------------------------------------ data parallel


@pytest.mark.parametrize("buckets", [1, 4, 10])
@pytest.mark.parametrize("compute_s", [0.1, 1.0, 10.0])
def test_plain_data_parallel_is_what_the_formula_of_buckets_says(buckets, compute_s):
    found = step(Job(buckets=buckets), compute_s)
    bucket_s = 2 * 0.75 * SIZE / buckets / 1e9
    assert found.exposed.value == pytest.approx(exposed_s(buckets, bucket_s, 2 / 3 * compute_s))
    assert found.seconds.value == pytest.approx(compute_s + found.exposed.value)
    assert found.communication.value == pytest.approx(1.5 * SIZE / 1e9)


@pytest.mark.parametrize(("stage", "parts"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_a_stage_moves_what_zero_says(stage, parts):
    """Stage 3 half as much more than an all-reduce (S. Rajbhandari et al., 2020, section 7)."""
    found = step(Job(stage=stage, layers=LAYERS))
    assert found.communication.value == pytest.approx(parts * 0.75 * SIZE / 1e9)
    assert found.exposed.value <= found.communication.value
    assert found.data == 4


def test_fsdp_that_waits_for_everything_takes_the_sum():
    found = step(Job(stage=3, layers=LAYERS, prefetch=0, blocking=("all_gather", "reduce_scatter")))
    assert found.seconds.value == pytest.approx(COMPUTE_S + 3 * LAYERS * GATHER)


def test_a_layer_ahead_hides_what_its_computation_is_long_enough_for():
    """Forward and backward each wait for their first gather; backward for its last scatter too."""
    found = step(Job(stage=3, layers=LAYERS), compute_s=30.0)
    assert found.exposed.value == pytest.approx(3 * GATHER)
    none = step(Job(stage=3, layers=LAYERS, prefetch=0), compute_s=30.0)
    assert none.exposed.value > 2 * LAYERS * GATHER
    assert (
        step(Job(stage=3, layers=LAYERS, prefetch=3)).seconds.value <= step(Job(stage=3, layers=LAYERS)).seconds.value
    )


def test_kept_weights_are_gathered_once():
    kept = step(Job(stage=3, layers=LAYERS, reshard=False))
    assert kept.communication.value == pytest.approx(2 * LAYERS * GATHER)
    assert kept.seconds.value < step(Job(stage=3, layers=LAYERS)).seconds.value


def test_micro_batches_gather_again_and_reduce_once_but_from_stage_2_on():
    gather_and_reduce = {0: 2, 1: 2, 2: 5, 3: 12}  # in units of three quarters of the model
    for stage, parts in gather_and_reduce.items():
        found = step(Job(stage=stage, layers=LAYERS, micro_batches=4))
        assert found.communication.value == pytest.approx(parts * 0.75 * SIZE / 1e9), stage


# ------------------------------------------------------------------------------------------------ tensor and pipeline


def test_tensor_parallel_layers_wait_for_four_all_reduces_each():
    found = step(Job(layers=LAYERS, tensor=4, activation_bytes=1e8))
    assert found.data == 1
    assert found.exposed.value == pytest.approx(4 * LAYERS * 1.5 * 1e8 / 1e9)
    assert found.seconds.value == pytest.approx(COMPUTE_S + found.exposed.value)


def test_replicas_average_the_gradients_of_their_part_of_the_model():
    found = step(Job(tensor=2, activation_bytes=0.001))
    assert found.data == 2
    assert found.communication.value == pytest.approx(SIZE / 2 / 1e9, rel=1e-6)  # of two ranks: all of it goes once


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("many", [1, 4, 12])
def test_a_pipelines_bubble_is_a_micro_batch_for_every_stage_but_one(schedule, many):
    """D. Narayanan et al., SC 2021, section 2.2: (p - 1) / m of the computation, whichever of the two schedules."""
    found = step(Job(layers=4, pipeline=4, micro_batches=many, activation_bytes=1.0, schedule=schedule))
    assert found.seconds.value == pytest.approx(COMPUTE_S * (1 + 3 / many), rel=1e-6)
    assert found.bubble.value == pytest.approx(COMPUTE_S * 3 / many, rel=1e-6)


def test_a_single_micro_batch_pays_every_transfer_twice():
    found = step(Job(layers=4, pipeline=4, micro_batches=1, activation_bytes=1e9))
    assert found.seconds.value == pytest.approx(4 * COMPUTE_S + 2 * 3 * 1.0)


@pytest.mark.parametrize(("inside", "transfers"), [(None, 2), (LinkClass("nvlink", 1e-6, 4e11), 1)])
def test_two_stages_of_1f1b_swap_tensors_at_once_on_nccl_and_one_after_the_other_on_gloo(inside, transfers):
    """Stage 0: F, F, swap, B, receive, B; stage 1: receive, F, B, swap, F, B."""
    hosts = replace(FLAT, ranks_per_host=(1, 1), inside=inside)
    found = step(Job(layers=2, pipeline=2, micro_batches=2, activation_bytes=1e9), topology=hosts)
    transfer_s = found.communication.value / (1 + transfers)  # of stage 0, which ends last
    assert found.seconds.value == pytest.approx(1.5 * COMPUTE_S + (2 + transfers) * transfer_s)


def test_groups_share_a_hosts_interfaces():
    cluster = preset("dgx-h100", hosts=16)
    data, tensor, lane = groups(cluster, Job(tensor=4, pipeline=2, activation_bytes=1.0))
    assert data is not None
    assert tensor is not None
    assert lane is not None
    assert (tensor.hosts, tensor.ranks) == (1, 4)
    assert (data.hosts, data.ranks_per_host[0]) == (8, 2)
    assert (lane.hosts, lane.ranks) == (2, 2)
    whole = cluster.nics * cluster.between.bytes_per_s
    assert data.nics * data.between.bytes_per_s == pytest.approx(whole / 4)
    assert lane.nics * lane.between.bytes_per_s == pytest.approx(whole / 8)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"stage": 4}, "--zero 4"), ({"layers": 0}, "--layers 0"), ({"prefetch": -1}, "--prefetch -1"),
        ({"tensor": 2}, "--activation-bytes SIZE"), ({"pipeline": 64, "activation_bytes": 1.0}, "--layers 32: fewer"),
        ({"micro_batches": 10**6}, "at most"), ({"activation_bytes": float("nan")}, "--activation-bytes nan"),
    ],
)  # fmt: skip
def test_a_job_that_cannot_be_is_refused_in_one_line(wrong, words):
    with pytest.raises(UsageError, match=words) as refused:
        Job(**wrong)
    assert "\n" not in str(refused.value)


def test_ranks_that_cannot_be_divided_are_refused_in_one_line():
    for tensor, pipeline in ((3, 1), (1, 3), (8, 1)):
        with pytest.raises(UsageError, match="cannot be divided") as refused:
            groups(FLAT, Job(tensor=tensor, pipeline=pipeline, activation_bytes=1.0))
        assert "\n" not in str(refused.value)


def test_stages_that_share_hosts_hand_on_between_hosts_too():
    """Eight stages on four hosts: every second hand-on leaves the host, and the slowest sets the pace."""
    _, _, lane = groups(preset("dgx-h100", hosts=4), Job(pipeline=8, activation_bytes=1.0))
    assert lane is not None
    assert lane.hosts == 2
    _, _, lane = groups(preset("dgx-h100", hosts=1), Job(pipeline=8, activation_bytes=1.0))
    assert lane is not None
    assert lane.hosts == 1


def test_one_rank_computes_and_no_more():
    alone = Topology("alone", (1,))
    assert step(Job(stage=3, layers=LAYERS), topology=alone).seconds.value == pytest.approx(COMPUTE_S)


# ------------------------------------------------------------------------------------------------ advice


def test_the_knee_is_where_a_doubling_stops_to_pay():
    flat = Topology("flat", (1,) * 8, between=LinkClass("ethernet", 0.0, 1e9))

    def seconds(topology):  # what is exposed grows with the square of the hosts
        return option(flat, "ring").predict([1e9]).bands[0].map(lambda _: 1.0 + (topology.hosts / 16) ** 2)

    found = worth(flat, seconds)
    assert found is not None
    assert [scale.hosts for scale in found.scales] == [1, 2, 4, 8, 16, 32]
    assert (found.hosts, found.ranks) == (8, 8)  # 16 hosts train 1.25 times as fast: 2 · 1.25 / 2
    assert found.next == pytest.approx(1.25)
    far = worth(flat, lambda topology: seconds(topology).map(lambda _: 1.0))
    assert far is not None
    assert (far.hosts, far.next) == (32, None)


def test_hosts_of_several_sizes_have_no_knee():
    uneven = Topology("uneven", (2, 1), FLAT.between, FLAT.between)
    assert worth(uneven, lambda _: Band(1.0, 1.0, 1.0)) is None


def test_what_helps_is_what_it_saves_when_the_job_is_priced_anew():
    now = Situation(FLAT, SIZE, 0.3, Job(buckets=1), "ring")

    def seconds(there):
        return step_time(there.topology, there.size_bytes, there.compute_s, there.job, ring).seconds

    found = {one.what: one for one in helps(now, seconds, "", 8)}
    wire = 1.5 * SIZE / 1e9
    assert found["twice the bandwidth of ethernet between hosts"].saved.value == pytest.approx(wire / 2)
    assert found["half the bytes on the wire"].share == pytest.approx(wire / 2 / (0.3 + wire))
    assert found["--accumulate 2"].saved.value == pytest.approx(wire / 2)
    assert found["8 buckets"].saved.value > 0
    assert all(one.saved.low <= one.saved.value <= one.saved.high for one in found.values())


def test_what_cannot_be_played_is_no_help():
    now = Situation(FLAT, SIZE, 0.3, Job(stage=3, layers=150_000), "ring")
    found = helps(now, lambda there: Band(*3 * (1.0 + there.size_bytes / SIZE,)), "", None)
    assert [one.what for one in found] == ["half the bytes on the wire"]


def test_many_micro_batches_are_played_where_they_change_nothing_between_layers():
    assert step(Job(layers=LAYERS, micro_batches=10_000)).seconds.value < COMPUTE_S + 1.6
    with pytest.raises(UsageError, match="--accumulate 10000: at most"):
        Job(stage=3, micro_batches=10_000)


def test_the_stage_that_was_asked_for_is_the_one_whose_memory_is_told():
    from ringside.view.predict_text import short_plan

    question = PlanQuestion(preset("dgx-h100", 4), 14e9, parameters=7e9, memory_bytes=80e9, compute_s=0.2)
    for asked, told in ((3, 3), (2, 2), (0, 1)):  # 1 is the least that fits
        found = plan(replace(question, job=Job(stage=asked)))
        (line,) = (line for line in short_plan(found) if "(ZeRO stage" in line)
        assert f"(ZeRO stage {told}" in line


def test_a_plan_answers_in_order():
    from ringside.view.predict_text import short_plan

    lines = short_plan(
        plan(PlanQuestion(preset("dgx-h100", 4), 14e9, parameters=7e9, memory_bytes=80e9, compute_s=0.2))
    )
    order = [next(i for i, line in enumerate(lines) if line.startswith(words)) for words in (
        "step: ", "worth it: ", "does not fit", "why: ", "would help most: "
    )]  # fmt: skip
    assert order == sorted(order)
    assert order[0] == 0


def test_of_a_run_its_own_buckets_are_the_step_and_better_ones_a_help():
    cluster = preset("ethernet-10g", 4)
    found = plan(PlanQuestion(cluster, 1e9, algorithm="ring", compute_s=2.0, ran=1))
    assert found.step is not None
    assert found.step.job.buckets == 1
    assert any(one.what == f"{found.buckets[0].count} buckets" for one in found.helps)


def test_a_divided_model_fits_by_its_part():
    job = Job(tensor=8, pipeline=4, layers=80, micro_batches=16, activation_bytes=64e6)
    cluster = preset("dgx-h100", 16)
    found = plan(PlanQuestion(cluster, 140e9, parameters=70e9, memory_bytes=80e9, compute_s=5.0, job=job))
    assert found.fit is not None
    assert found.fit.states[0].total_bytes == pytest.approx(16 * 70e9 / 32)
    assert not found.fit.refused
    assert found.step is not None
    assert found.step.data == 4
    assert collective(cluster, "sendrecv").why_extrapolated(64e6)
