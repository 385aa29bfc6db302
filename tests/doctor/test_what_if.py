"""The what-if answers: against the published ones, and against pipelines of many shapes that were really run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ringside.doctor import examine
from ringside.doctor.pipeline.reader import prepare_recording
from ringside.doctor.pipeline.timeline import Meta, TimelineEvent, build_timeline, looks_like_meta, parse_meta
from ringside.doctor.replay import (
    DependencyGraph,
    WhatIf,
    answer_what_if,
    replay_steps,
    step_recording,
    straggler_verdicts,
    what_if_table,
)
from ringside.errors import UsageError

from .shared_data import shared
from .timeline_maker import Shape, run

SECONDS = {"forward-compute": 0.01, "backward-compute": 0.02, "optimizer": 0.005}


def duration_of(kind: str, *_: int) -> float:
    return SECONDS.get(kind, 0.0005)


def answered(shape: Shape) -> WhatIf:
    events = msgspec.convert(shape.events, list[TimelineEvent])
    meta = Meta(dp_size=shape.replicas, pp_size=shape.stages, vpp_size=shape.chunks)
    return answer_what_if(prepare_recording(build_timeline(events, meta))[0])


def published(name: str) -> dict:
    return json.loads((shared("what_if") / name).read_text())


def test_the_published_trace_gives_the_published_answers():
    folder = shared("what_if")
    found = examine([folder / "timeline-ST.json.gz", folder / "meta-ST.yaml"])
    truth = published("result-ST.json")
    assert found.what_if is not None
    assert found.what_if["slowdown"] == pytest.approx(truth["blocking_slowdown"], rel=1e-5)
    assert found.what_if["worst_worker_share"] == pytest.approx(published("mw-ST.json")["Mw"], abs=1e-4)
    assert found.what_if["last_stage_share"] == pytest.approx(published("ms-ST.json")["Ms"], abs=1e-4)
    by_stage = [truth["blocking_decompose_by_stage"][str(stage)] for stage in range(4)]
    assert found.what_if["by_stage"] == pytest.approx(by_stage, rel=1e-5)
    by_replica = [truth["blocking_decompose_by_dp_rank"][str(replica)] for replica in range(2)]
    assert found.what_if["by_lane"] == pytest.approx(by_replica, rel=1e-5)
    for kind, value in truth["blocking_decompose_by_optype"].items():
        if kind in found.what_if["by_operation"]:
            assert found.what_if["by_operation"][kind] == pytest.approx(value, rel=1e-5)
    lost = sum(truth["step_t_nodelay"].values()) - sum(truth["step_t_noblk"].values())
    assert found.what_if["cost_rank_hours"] == pytest.approx(lost * 8 / 3600, rel=1e-4)
    assert [(verdict.kind, verdict.ranks) for verdict in found.verdicts] == [("uneven_work", [6, 7])]


@pytest.mark.parametrize(
    ("stages", "replicas", "batches", "chunks", "overlap", "idle_calls", "tolerance"),
    [(2, 2, 4, 1, False, False, 0.003), (4, 3, 8, 1, True, True, 0.003), (1, 4, 3, 1, False, False, 0.003),
     (5, 2, 7, 1, False, True, 0.003), (3, 1, 6, 1, False, False, 0.003), (8, 2, 16, 1, True, False, 0.003),
     (2, 2, 4, 2, False, False, 0.02), (4, 2, 8, 2, True, True, 0.02), (4, 2, 8, 2, False, False, 0.02),
     (4, 2, 8, 3, False, True, 0.02)],
)  # fmt: skip
def test_a_slow_worker_in_pipelines_of_many_shapes(stages, replicas, batches, chunks, overlap, idle_calls, tolerance):
    slow = (stages // 2, replicas - 1)
    shape = Shape(stages, replicas, batches, chunks, overlap, idle_calls)

    def slowed(kind: str, stage: int, replica: int, batch: int) -> float:
        return duration_of(kind) * (1.5 if (stage, replica) == slow and "compute" in kind else 1.0)

    def averaged(kind: str, *_: int) -> float:
        return duration_of(kind) * (1 + 0.5 / (stages * replicas) if "compute" in kind else 1.0)

    step_s = run(shape, slowed)
    found = answered(shape)
    ideal_s = run(shape, averaged, record=False)
    assert found.step_s == pytest.approx(step_s, rel=tolerance)
    assert found.ideal_step_s == pytest.approx(ideal_s, rel=tolerance)
    assert found.slowdown == pytest.approx(step_s / ideal_s, rel=tolerance)
    assert found.slowdown_at_median == pytest.approx(step_s / run(shape, duration_of, record=False), rel=tolerance)
    assert found.worst_ranks == [slow[0] * replicas + slow[1]]
    assert found.worst_worker_share is not None
    assert found.worst_worker_share > 0.9
    lost = (step_s - ideal_s) * shape.steps * stages * replicas / 3600
    assert found.cost_rank_hours == pytest.approx(lost, rel=0.1)


def test_a_heavy_last_stage(tmp_path):
    shape = Shape(stages=4, replicas=3, micro_batches=8)
    run(shape, lambda kind, stage, *_: duration_of(kind) * (1.6 if stage == 3 and "compute" in kind else 1.0))
    (tmp_path / "timeline-x.json").write_text(json.dumps(shape.events))
    (tmp_path / "meta-x.yaml").write_text("trial_name: x\ndp_size: 3\npp_size: 4\nworld_size: 12\n")
    found = examine([tmp_path])
    assert [(verdict.kind, verdict.ranks) for verdict in found.verdicts] == [("uneven_work", [9, 10, 11])]
    assert found.what_if is not None
    assert found.what_if["last_stage_share"] > 1.0


def test_a_healthy_pipeline_loses_nothing(tmp_path):
    random = np.random.default_rng(0)
    noise = {key: float(np.exp(random.normal(0, 0.01))) for key in np.ndindex(4, 2, 8)}
    shape = Shape(stages=4, replicas=2, micro_batches=8)
    run(shape, lambda kind, *place: duration_of(kind) * (noise[place] if "compute" in kind else 1.0))
    (tmp_path / "timeline.json").write_bytes(msgspec.json.encode({"traceEvents": shape.events}))
    found = examine([tmp_path])
    assert found.verdicts == []
    assert found.what_if is not None
    assert 0.99 < found.what_if["slowdown"] < 1.05
    assert any("no metadata" in line.why for line in found.unjudged)


def test_steps_that_are_not_whole_are_left_out(tmp_path):
    shape = Shape(steps=4)
    whole = run(shape, duration_of)
    shape.events.remove(next(e for e in shape.events if e["args"].get("step") == 9 and e["name"] == "backward-compute"))
    (tmp_path / "timeline.json.gz").write_bytes(gzip.compress(json.dumps(shape.events).encode()))
    found = examine([tmp_path])
    assert found.what_if is not None
    assert found.what_if["steps"] == 3
    assert found.what_if["step_s"] == pytest.approx(whole, rel=0.003)
    assert any(line.what == "steps 9" for line in found.unjudged)


def test_a_truncated_timeline_is_replayed_as_far_as_it_goes(tmp_path):
    shape = Shape(steps=6)
    run(shape, duration_of)
    names = [event for event in shape.events if event["ph"] == "M"]
    text = json.dumps([*names, *(event for event in shape.events if event["ph"] == "X")])
    (tmp_path / "timeline.json").write_text(text[: len(text) * 2 // 3])
    found = examine([tmp_path])
    assert found.what_if is not None
    assert 2 <= found.what_if["steps"] < 6
    assert "breaks off" in found.notes[0].text


def test_a_timeline_without_whole_steps_says_so(tmp_path):
    shape = Shape(steps=1)
    run(shape, duration_of)
    shape.events.remove(next(event for event in shape.events if event["name"] == "forward-compute"))
    (tmp_path / "timeline.json").write_text(json.dumps(shape.events))
    note = examine([tmp_path]).notes[0]
    assert not note.used
    assert "no step has the same operations" in note.text


def test_metadata(tmp_path: Path):
    meta = parse_meta("trial_name: ST\ndp_size: 2  # replicas\npp_size: 4\ntp_size: 8\nvpp_size: 2\nworld_size: 64\n")
    assert (meta.dp_size, meta.pp_size, meta.vpp_size, meta.ranks_per_worker) == (2, 4, 2, 8.0)
    assert looks_like_meta(b"dp_size: 2\npp_size: 4\n")
    assert not looks_like_meta(b"learning_rate: 2\n")
    assert not looks_like_meta(b"[\ndp_size: 2\npp_size: 4\n")
    with pytest.raises(UsageError, match="pp_size is '0'"):
        parse_meta("pp_size: 0")
    with pytest.raises(UsageError, match="world_size is 7"):
        parse_meta("dp_size: 2\npp_size: 4\nworld_size: 7")
    (tmp_path / "meta.yaml").write_text("dp_size: 2\npp_size: -1\n")
    assert not examine([tmp_path]).notes[0].used


def test_replay_by_hand():
    # a, then a transfer of both lanes together, then b; lane 1 is late
    graph = DependencyGraph(names=["a", "t", "b"], after=[[], [0], [1]], groups=[[1]], across=frozenset({1}))
    seconds = np.array([[[1.0, 3.0]], [[0.5, 0.5]], [[2.0, 1.0]]])
    assert replay_steps(graph, seconds).tolist() == [5.5]


def test_a_circle_is_named():
    graph = DependencyGraph(names=["a", "b"], after=[[1], [0]], groups=[])
    with pytest.raises(UsageError, match="circle, a among them"):
        replay_steps(graph, np.ones((2, 1, 1)))


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("meta_first", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
def test_however_a_timeline_and_its_metadata_are_given(tmp_path, wrapped, packed, meta_first, chunks):
    shape = Shape(stages=2, replicas=2, micro_batches=4, chunks=chunks)
    run(shape, lambda kind, stage, *_: duration_of(kind) * (1.5 if stage == 1 and "compute" in kind else 1.0))
    text = json.dumps({"traceEvents": shape.events} if wrapped else shape.events).encode()
    timeline, meta = tmp_path / "a" / f"JobX_trace.json{'.gz' if packed else ''}", tmp_path / "b" / "meta.JobX.yml"
    for path in (timeline, meta):
        path.parent.mkdir()
    timeline.write_bytes(gzip.compress(text) if packed else text)
    meta.write_text(f"dp_size: 2\npp_size: 2\ntp_size: 4\nvpp_size: {chunks}\nworld_size: 16\n")
    (tmp_path / "b" / "meta.JobY.yml").write_text("dp_size: 3\npp_size: 2\n")
    others = sorted((tmp_path / "b").iterdir())
    found = examine([*others, timeline] if meta_first else [timeline, *others]).what_if
    assert found is not None
    truth = answered(shape)
    assert found["slowdown"] == pytest.approx(truth.slowdown)
    assert found["last_stage_share"] == pytest.approx(truth.last_stage_share)
    assert found["cost_rank_hours"] == pytest.approx(4 * truth.cost_rank_hours)


def test_interleaving_that_the_metadata_does_not_tell_is_seen(tmp_path):
    shape = Shape(stages=2, replicas=2, micro_batches=4, chunks=2)
    run(shape, duration_of)
    events = msgspec.convert(shape.events, list[TimelineEvent])
    untold = answer_what_if(prepare_recording(build_timeline(events, Meta(dp_size=2, pp_size=2)))[0])
    assert untold.step_s == pytest.approx(answered(shape).step_s)


@pytest.mark.parametrize(
    "text",
    [
        "data_parallel_size: 2\npipeline_model_parallel_size: 4\nvirtual_pipeline_model_parallel_size: null\n",
        '{"dp_size": 2, "pp_size": 4}',
        "job:\n  dp_size: 2\n  pp_size: 4\n",
    ],
)
def test_metadata_in_other_forms(text):
    assert looks_like_meta(text.encode())
    meta = parse_meta(text)
    assert (meta.dp_size, meta.pp_size, meta.vpp_size) == (2, 4, 1)


def test_published_answers_are_no_metadata():
    assert not looks_like_meta((shared("what_if") / "result-ST.json").read_bytes()[:16384])


def test_operations_without_a_number_are_counted_in_the_order_in_which_they_began():
    shape = Shape(stages=3, replicas=2, micro_batches=6, chunks=2)
    run(shape, lambda kind, stage, replica, batch: duration_of(kind) * (1.0 + 0.1 * (stage + replica)))
    numbered = build_timeline(msgspec.convert(shape.events, list[TimelineEvent]))
    for number, event in enumerate(shape.events):
        if event["ph"] == "X":
            event["args"]["seq_id"] = (None, -1)[number % 2]
    shape.events.reverse()
    counted = build_timeline(msgspec.convert(shape.events, list[TimelineEvent]))
    kinds = ("forward-compute", "backward-compute", "forward-send", "optimizer")

    def picked(timeline):
        return {place: {key: cell[key] for key in cell if key.kind in kinds} for place, cell in timeline.cells.items()}

    assert picked(counted) == picked(numbered)
    assert (counted.meta, counted.ranks) == (numbered.meta, numbered.ranks)
    assert (counted.meta.dp_size, counted.meta.pp_size, counted.meta.vpp_size) == (2, 3, 2)


def test_what_a_replay_leaves_out_is_said(tmp_path):
    shape = Shape(steps=3)
    run(shape, duration_of)
    usual = next(event for event in shape.events if event["name"] == "optimizer")
    strange = [*["all-to-all"] * 3, *["mystery"] * 2, "a", "b", "c", "d"]
    shape.events += [{**usual, "name": name} for name in strange]
    (tmp_path / "timeline-x.json").write_text(json.dumps(shape.events))
    (tmp_path / "meta-x.yaml").write_text("dp_size: 3\npp_size: 2\n")
    told = {line.what: (line.why, line.side) for line in examine([tmp_path]).unjudged}
    assert told["missing workers"] == (
        "2 of 6 workers are not in the timeline; the others are replayed without them", False,
    )  # fmt: skip
    assert told["operations of unknown types"] == (
        "they were left out of the replay: all-to-all (3), mystery (2), a (1), b (1), c (1)", True,
    )  # fmt: skip
    assert told.keys() == {"missing workers", "operations of unknown types"}
    (tmp_path / "timeline-x.json").unlink()
    (alone,) = examine([tmp_path]).unjudged
    assert (alone.what, "but no timeline" in alone.why) == ("what if", True)


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        (lambda event: event["ph"] == "M", "the timeline has no operation of a training step"),
        (lambda event: event["ph"] == "M" or event["tid"] // 10 != 1, "some stages of the pipeline are not in the"),
    ],
)
def test_timelines_that_cannot_be_replayed_say_why(tmp_path, kept, why):
    shape = Shape(stages=3)
    run(shape, duration_of)
    (tmp_path / "timeline.json").write_text(json.dumps([event for event in shape.events if kept(event)]))
    (note,) = examine([tmp_path]).notes
    assert (why in note.text, note.used) == (True, False)


def test_transfers_of_a_stage_that_computes_nothing_move_nothing():
    shape = Shape(stages=2, replicas=1)
    run(shape, duration_of)
    events = [one for one in shape.events if one["name"] not in ("forward-compute", "backward-compute")]
    recording, steps = prepare_recording(build_timeline(msgspec.convert(events, list[TimelineEvent])))
    names = recording.graph.names
    alone = {names[group[0]] for group in recording.graph.groups if len(group) == 1}
    assert {name for name in names if "send" in name or "recv" in name} <= alone
    assert steps == [7, 8]


# ------------------------------------------------------------------------------------------------ the answers by hand


def of_steps(own_s, transfer_s=1.0, **how):
    """The answers for ranks that work so long, and then move data together for `transfer_s`."""
    own = np.array(own_s, dtype=float)
    longest = own.max(axis=1, keepdims=True) + transfer_s
    return answer_what_if(
        step_recording(own, longest - own, np.broadcast_to(longest, own.shape), range(own.shape[1]), **how)
    )


def test_what_one_slow_rank_of_four_costs():
    found = of_steps([[2.0, 2.0, 6.0, 2.0], [2.0, 2.0, 4.0, 2.0]], world_size=8, stride=10)
    # (7 + 5) / 2 s a step; everybody at the mean of all work, 2.75 s, or at the median, 2 s
    assert (found.step_s, found.recorded_step_s, found.ideal_step_s) == pytest.approx((6.0, 6.0, 3.75))
    assert (found.slowdown, found.slowdown_at_median) == pytest.approx((6 / 3.75, 6 / 3))
    assert (found.steps, found.workers, found.worst_ranks, found.last_stage_ranks) == (2, 4, [2], [])
    assert (found.worst_worker_share, found.last_stage_share) == (pytest.approx(1.0), None)
    # eight ranks, of which these are four, through twenty steps
    assert found.cost_rank_hours == pytest.approx(2.25 * 20 * 8 / 3600)
    assert found.by_lane == pytest.approx([1.0, 1.0, 1.6, 1.0])
    assert found.by_stage == pytest.approx([1.6])
    assert found.by_operation == pytest.approx({"work": 1.6, "transfer": 1.0})
    sheet = what_if_table(found)
    assert [row[0] for row in sheet.rows] == [
        "stage 0", *(f"replica {rank}" for rank in range(4)), "work", "transfer",
    ]  # fmt: skip
    assert [row[2] for row in sheet.rows] == pytest.approx([2.25, 0.0, 0.0, 2.25, 0.0, 2.25, 0.0])
    (verdict,) = straggler_verdicts(found, [5, 6], replicas=4)
    assert (verdict.kind, verdict.ranks, verdict.since_step, verdict.detected_step) == ("slow_rank", [2], 5, 6)
    assert verdict.cost_rank_seconds == pytest.approx(2.25 * 20 * 8)
    assert verdict.excess_ratio == pytest.approx(0.6)
    assert straggler_verdicts(found, [], replicas=4) == []


def test_of_a_hundred_workers_the_slowest_three_are_repaired_and_of_fewer_at_least_one():
    for ranks, repaired in ((33, 1), (34, 2), (100, 3), (101, 4)):
        own = np.ones((2, ranks))
        own[:, :5] += [0.5, 0.4, 0.3, 0.2, 0.1]
        found = of_steps(own)
        assert found.worst_ranks == list(range(repaired))
    assert of_steps(np.ones((3, 4))).worst_worker_share is None  # nothing is lost


@pytest.mark.parametrize(
    ("slowdown", "worst", "last", "stages", "replicas", "kind"),
    [
        (1.1, 0.5, 0.0, 1, 4, "slow_rank"),
        (1.0999, 0.9, 0.9, 1, 4, None),
        (1.1, 0.499, 0.9, 1, 4, None),  # there is no pipeline
        (1.1, 0.5, 0.9, 2, 2, "slow_rank"),
        (1.1, 0.5, 0.5, 2, 1, "uneven_work"),  # the worst worker is a stage of its own
        (1.1, 0.499, 0.5, 2, 2, "uneven_work"),
        (1.1, 0.9, 0.499, 2, 1, None),
        (1.1, None, None, 2, 2, None),
    ],
)
def test_workers_or_the_last_stage_are_the_reason_from_half_of_what_is_lost_on(
    slowdown, worst, last, stages, replicas, kind
):
    found = msgspec.structs.replace(
        of_steps([[1.0, 1.0]]), slowdown=slowdown, worst_worker_share=worst, last_stage_share=last,
        by_stage=[1.0] * stages, worst_ranks=[3, 1], last_stage_ranks=[2, 3],
    )  # fmt: skip
    verdicts = straggler_verdicts(found, [0], replicas=replicas)
    assert [one.kind for one in verdicts] == ([kind] if kind else [])
    for verdict in verdicts:
        assert verdict.ranks == ([1, 3] if kind == "slow_rank" else [2, 3])
        assert verdict.evidence["explained_ratio"] == (worst if kind == "slow_rank" else last)
