"""What the doctor says of sets of traces whose truth is known, and of the recorded ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from ringside.doctor import as_json, examine
from ringside.doctor.kineto.collector import read_trace
from ringside.doctor.kineto.match import match_collectives
from ringside.doctor.kineto.steps import steps_of
from ringside.doctor.kineto.trace import RankTrace, jobs_of

from .kineto_maker import NEW, OLD, RCCL, Job
from .shared_data import shared


def traces_of(folder: Path) -> list[RankTrace]:
    found = []
    for path in sorted(folder.iterdir()):
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rb") as stream:
            found.append(read_trace(stream, path.name))  # type: ignore[arg-type]
    return found


def culprits(folder: Path) -> list[tuple[str, list[int]]]:
    return [(verdict.kind, verdict.ranks) for verdict in examine([folder]).verdicts]


@pytest.mark.parametrize("kernel", [NEW, OLD, RCCL, ""])
@pytest.mark.parametrize("details", [True, False])
def test_a_slow_rank_is_named_whatever_its_kernels_are_called(tmp_path, kernel, details):
    folder = Job(slow={2: 1.3}, kernel=kernel, details=details).write(tmp_path)
    found = examine([folder])
    assert [(v.kind, v.ranks) for v in found.verdicts] == [("slow_rank", [2])]
    verdict = found.verdicts[0]
    assert verdict.excess_ratio == pytest.approx(0.3, abs=0.05)
    assert verdict.since_step == 3
    assert verdict.evidence["wait_seconds"] < verdict.evidence["others_wait_seconds"]
    assert verdict.cost_rank_seconds == pytest.approx(12 * 4 * 0.003, rel=0.2)
    assert found.questions["similar_step_times"].answer is False


@pytest.mark.parametrize("kernel", [NEW, ""])
@pytest.mark.parametrize("steps", [1, 3, 12, 60])
def test_healthy_traces_give_no_straggler(tmp_path, kernel, steps):
    assert culprits(Job(kernel=kernel, steps=steps, noise=0.05, ranks=8).write(tmp_path)) == []


def test_a_culprit_that_moves_is_no_straggler(tmp_path):
    found = examine([Job(noise=0.3, steps=20, seed=4).write(tmp_path)])
    assert [v for v in found.verdicts if v.kind == "slow_rank"] == []
    assert any("moves" in line.why for line in found.unjudged)


@pytest.mark.parametrize(("slow_for", "named"), [(12, []), (17, []), (23, [1])])
def test_a_rank_that_was_slow_for_a_while_is_named_if_that_was_a_third_of_the_trace(tmp_path, slow_for, named):
    """Seen alone, each of these episodes is certain; what lasted a fifth of a trace is hardly why a job is slow."""
    job = Job(ranks=3, steps=60, kernel="", sizes=(1 << 20,), slow={1: 1.5}, slow_steps=range(30, 30 + slow_for))
    assert [verdict.ranks for verdict in examine([job.write(tmp_path)]).verdicts] == ([named] if named else [])


@pytest.mark.parametrize("seed", range(20))
def test_chance_alone_accuses_nobody(tmp_path, seed):
    folder = Job(ranks=2 + seed % 7, noise=0.2, steps=4 + seed, seed=seed, kernel="").write(tmp_path)
    assert culprits(folder) == []


def test_numbers_of_one_rank_and_step(tmp_path):
    job = Job(ranks=2, noise=0.0, slow={1: 1.5}, kernel="", sizes=(1000, 1000))
    fast, slow = (steps_of(trace) for trace in traces_of(job.write(tmp_path)))
    assert fast.numbers.tolist() == list(range(3, 15))
    assert fast.step_s == pytest.approx(np.full(12, 0.017), rel=0.01)
    assert slow.exposed_s == pytest.approx(np.full(12, 0.002), rel=0.01)
    assert fast.exposed_s == pytest.approx(np.full(12, 0.007), rel=0.01)
    assert fast.work_s == pytest.approx(np.full(12, 0.010), rel=0.01)
    assert fast.tail_s == pytest.approx(np.full(12, 0.0035), rel=0.01)
    assert fast.collectives.tolist() == [2] * 12
    assert fast.nbytes.tolist() == [8000.0] * 12


def test_communication_behind_work_is_hidden(tmp_path):
    trace = Job(ranks=1, steps=1, noise=0.0).traces()[0]
    kernel = next(event for event in trace["traceEvents"] if event["name"] == NEW)
    trace["traceEvents"].append({**kernel, "name": "void gemm<float>(int)", "tid": 7, "dur": 400.0})
    (tmp_path / "rank0.json").write_text(json.dumps(trace))
    steps = steps_of(traces_of(tmp_path)[0])
    assert steps.hidden_s == pytest.approx([0.0004], rel=0.01)
    assert steps.exposed_s == pytest.approx([0.0016], rel=0.01)


def test_clocks_of_hosts_are_told_from_collective_ends(tmp_path):
    job = Job(clock_us={1: 250_000.0, 2: -3_000.0}, slow={3: 1.2}, hosts=["a", "b"])
    matched = match_collectives(traces_of(job.write(tmp_path)))
    clocks = matched.clocks - matched.clocks[0]
    assert clocks == pytest.approx([0.0, 0.25, -0.003, 0.0], abs=1e-5)
    assert matched.lateness.mean(axis=0)[3] == pytest.approx(0.001, rel=0.2)
    assert matched.lateness.mean(axis=0)[:3].max() < 0.0005
    assert matched.end_spread_s() < 1e-5
    assert culprits(tmp_path) == [("slow_rank", [3])]


@pytest.mark.parametrize("change", [{"integers": True}, {"ranks_as_text": True}, {"distributed_info": False}])
def test_other_ways_to_write_the_same(tmp_path, change):
    assert culprits(Job(slow={1: 1.4}, **change).write(tmp_path, packed=True)) == [("slow_rank", [1])]


def test_a_trace_without_its_rank_takes_it_from_its_name(tmp_path):
    found = examine([Job(distributed_info=False, kernel="").write(tmp_path, only=[2, 3], name="worker")])
    assert "2 was taken from its name" in found.notes[0].text
    assert any("which rank" in line.what for line in found.unjudged)


def test_one_rank_of_eight_says_what_cannot_be_judged(tmp_path):
    found = examine([Job(ranks=8).write(tmp_path, only=[5])])
    assert found.verdicts == []
    assert any(line.what == "who is slow" and "of 8 ranks only rank 5" in line.why for line in found.unjudged)
    assert found.questions["communication_dominates"].answer is not None
    assert found.questions["similar_step_times"].answer is None
    assert found.what_if is None


def test_missing_ranks_are_said_and_the_others_judged(tmp_path):
    found = examine([Job(slow={1: 1.4}).write(tmp_path, only=[0, 1, 3])])
    assert [(v.kind, v.ranks) for v in found.verdicts] == [("slow_rank", [1])]
    assert any("not rank 2" in line.why for line in found.unjudged)


def test_two_files_of_one_rank(tmp_path):
    job = Job(slow={0: 1.4})
    job.write(tmp_path / "a")
    job.write(tmp_path / "b", only=[1])
    found = examine([tmp_path])
    assert [(v.kind, v.ranks) for v in found.verdicts] == [("slow_rank", [0])]
    left = [note for note in found.notes if not note.used]
    assert [note.file for note in left] == [str(tmp_path / "b" / "rank1.pt.trace.json")]
    assert "second trace of rank 1" in left[0].text


def test_two_recordings_of_one_rank_are_one(tmp_path):
    first = Job(ranks=2, steps=6, kernel="")
    later = Job(ranks=2, steps=6, kernel="", first_step=20, start_us=first.start_us + 2e7)
    first.write(tmp_path / "a")
    later.write(tmp_path / "b")
    (job,) = jobs_of([*traces_of(tmp_path / "a"), *traces_of(tmp_path / "b")])
    assert [len(trace.steps) for trace in job.traces] == [12, 12]


def test_traces_of_two_jobs_are_judged_apart(tmp_path):
    Job(ranks=4, slow={3: 1.5}).write(tmp_path / "a")
    Job(ranks=2, slow={0: 1.5}, kernel="", steps=20).write(tmp_path / "b")
    Job(ranks=4, start_us=1_800_000_000_000_000.0).write(tmp_path / "c")
    found = examine([tmp_path])
    assert sorted((v.kind, v.ranks) for v in found.verdicts) == [("slow_rank", [0]), ("slow_rank", [3])]
    assert any(line.what == "all traces as one job" for line in found.unjudged)


@pytest.mark.parametrize(
    ("ranks", "others", "first", "named"),
    [
        (3, {1: [5]}, 5, [1]),
        (3, {0: [5], 1: [5]}, 5, [2]),
        (2, {1: [5]}, 5, []),  # one against one: neither is called right
        (4, {0: [5], 1: [5]}, 5, []),  # two against two
        (5, {0: [5], 1: [5]}, 5, [0, 1]),
        (3, {1: [5], 2: [9]}, 5, [1]),  # what follows the first is its consequence
        (3, {1: [9], 2: [5]}, 5, [2]),
        (3, {}, None, None),
    ],
)
def test_ranks_that_called_different_collectives(tmp_path, ranks, others, first, named):
    """`others` gathered where the rest reduced: rank → numbers of the collectives."""
    traces = Job(ranks=ranks).traces()
    for rank, numbers in others.items():
        for event in traces[rank]["traceEvents"]:
            if event.get("cat") == "kernel" and event["args"].get("Seq") in numbers:
                event["args"]["Collective name"] = "_allgather_base"
    for rank, trace in enumerate(traces):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(trace))
    verdicts = [verdict for verdict in examine([tmp_path]).verdicts if verdict.kind == "mismatch"]
    assert [(one.evidence["seq"], one.ranks) for one in verdicts] == ([] if first is None else [(first, named)])


def test_a_truncated_trace_is_used_as_far_as_it_goes(tmp_path):
    folder = Job(slow={1: 1.5}, kernel="", steps=20).write(tmp_path)
    path = folder / "rank0.pt.trace.json"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 3 // 4])
    found = examine([folder])
    assert [(v.kind, v.ranks) for v in found.verdicts] == [("slow_rank", [1])]
    assert "breaks off after" in next(note.text for note in found.notes if note.file.endswith("rank0.pt.trace.json"))


def test_a_truncated_gzip_is_used_as_far_as_it_goes(tmp_path):
    folder = Job(slow={1: 1.5}, kernel="", steps=30).write(tmp_path, packed=True)
    path = folder / "rank2.pt.trace.json.gz"
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 4 // 5])
    found = examine([folder])
    assert [(v.kind, v.ranks) for v in found.verdicts] == [("slow_rank", [1])]
    text = " ".join(note.text for note in found.notes if note.file == str(path))
    assert "lost" in text


def test_what_if_of_a_job_with_one_slow_rank(tmp_path):
    found = examine([Job(slow={1: 1.5}, noise=0.0, ranks=4).write(tmp_path)]).what_if
    assert found is not None
    # work 10 ms, one of four at 15 ms, transfers 2 ms: (15 + 2) / (mean 11.25 + 2)
    assert found["slowdown"] == pytest.approx(17 / 13.25, rel=0.01)
    assert found["slowdown_at_median"] == pytest.approx(17 / 12, rel=0.01)
    assert found["worst_ranks"] == [1]
    # Repaired it works as long as the mean, 11.25 ms, and still longest: all that was lost goes away.
    assert found["worst_worker_share"] == pytest.approx((17 - 13.25) / (17 - 13.25), rel=0.01)
    assert found["step_s"] == pytest.approx(found["recorded_step_s"], rel=0.01)


def test_small_collectives_are_counted(tmp_path):
    answer = examine([Job(sizes=(10, 10)).write(tmp_path)]).questions["small_collectives"]
    assert answer.answer is False
    assert answer.numbers["collectives_per_step"] == 2
    assert answer.numbers["small_ratio"] == 1.0


@pytest.mark.parametrize(
    ("small", "large", "waits_for", "many", "too_many"),
    [
        (15, 0, 0.2, False, False),
        (16, 0, 0.2, True, True),
        (16, 14, 0.2, True, True),
        (16, 16, 0.2, True, True),
        (16, 17, 0.2, False, False),  # most are large: their bytes take the time
        (16, 24, 0.2, False, False),
        (16, 0, 0.06, True, True),
        (16, 0, 0.04, True, False),  # there are many, and they cost next to nothing
    ],
)
def test_many_small_collectives_that_ranks_wait_for_are_a_verdict(tmp_path, small, large, waits_for, many, too_many):
    """Small is below 256 KiB, many are 16 a step and half of all, and ranks wait for 5% of the step."""
    sizes = [(64 << 10) - 1] * small + [64 << 10] * large
    transfers_us = 10_000.0 * waits_for / (1 - waits_for)
    job = Job(ranks=2, steps=3, noise=0.0, sizes=sizes, transfer_us=transfers_us / len(sizes))
    found = examine([job.write(tmp_path)])
    assert [verdict.kind for verdict in found.verdicts] == ["small_collectives"] * too_many
    steps = found.facts["kineto"]["steps_in_common"]
    assert [(one.since_step, one.detected_step) for one in found.verdicts] == [(steps[0], steps[-1])] * too_many
    assert found.questions["small_collectives"].answer is many
    for verdict in found.verdicts:
        assert verdict.ranks == []
        assert verdict.cause.startswith(f"{small} of {small + large} collectives per step carry less than 256 KiB")
        assert verdict.evidence["exposed_ratio"] == pytest.approx(waits_for, rel=0.01)


@pytest.mark.parametrize(("count", "too_many"), [(199, False), (200, True)])
def test_hundreds_of_collectives_of_unknown_size_are_too_many(tmp_path, count, too_many):
    folder = Job(ranks=2, steps=3, noise=0.0, sizes=[0] * count, transfer_us=1.0, details=False).write(tmp_path)
    found = examine([folder])
    assert [verdict.kind for verdict in found.verdicts] == ["small_collectives"] * too_many
    answer = found.questions["small_collectives"]
    assert (answer.answer, answer.numbers) == (None, {"collectives_per_step": count})
    assert answer.words == f"{count}.0 collectives per step; their sizes are not in the traces."


def test_traces_of_which_no_collective_is_another_ones_and_traces_without_events(tmp_path):
    for rank, trace in enumerate(Job(ranks=2, steps=4).traces()):
        for event in trace["traceEvents"]:
            if "Process Group Name" in event["args"]:
                event["args"]["Process Group Name"] = str(rank)
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(trace))
    (tmp_path / "rank2.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": []}))
    found = examine([tmp_path])
    assert found.facts["kineto"]["unmatched_collectives"] == 16
    (line,) = [line.why for line in found.unjudged if line.what == "waits and lateness"]
    assert line == "no collective of one rank is found on another: the traces are of different steps or jobs"
    (empty,) = [note for note in found.notes if not note.used]
    assert (empty.file, empty.text) == (str(tmp_path / "rank2.json"), "has no complete event")


@pytest.mark.parametrize(("waits_for", "bound"), [(0.6, False), (0.68, False), (0.72, True), (0.75, True)])
def test_a_job_is_bound_by_communication_if_ranks_wait_for_seven_tenths_of_a_step(tmp_path, waits_for, bound):
    transfer_us = 10_000.0 * waits_for / (1 - waits_for) / 2
    found = examine([Job(ranks=3, noise=0.0, slow={1: 0.99}, transfer_us=transfer_us).write(tmp_path)])
    assert [verdict.kind for verdict in found.verdicts] == ["communication_bound"] * bound
    for verdict in found.verdicts:
        assert verdict.evidence["exposed_ratio"] == pytest.approx(waits_for, rel=0.01)


def test_a_job_that_only_communicates(tmp_path):
    found = examine([Job(transfer_us=40_000.0, hosts=["a", "b"]).write(tmp_path)])
    assert [verdict.kind for verdict in found.verdicts] == ["communication_bound"]
    assert found.questions["network_between_hosts"].answer is True
    assert found.questions["communication_dominates"].answer is True


def test_the_recorded_healthy_set_names_nobody():
    found = examine([shared("kineto") / "dlrm_8rank.tar.gz"])
    assert found.verdicts == []
    figures = found.facts["kineto"]
    assert figures["ranks"] == list(range(8))
    assert figures["matched_collectives"] == 8
    assert figures["unmatched_collectives"] == 0
    # one host, one clock: the ends of NCCL's kernels agree within microseconds
    assert max(map(abs, figures["clock_offset_seconds"].values())) < 1e-5
    assert all(answer.numbers for answer in found.questions.values())


def test_one_rank_of_three_hundred():
    found = as_json(examine([shared("kineto") / "gloo_world300_rank34.json.gz"]))
    assert found["verdicts"] == []
    assert "rank 34 of 300: 1 step, 10 collectives" in found["files"][0]["text"]
    assert any(
        "of 300 ranks only rank 34 is here, not ranks 0-33 and 35-299: give" in each["why"]
        for each in found["unjudged"]
    )


def test_a_trace_that_does_not_know_its_rank():
    found = examine([shared("kineto") / "rank_not_found.json.gz"])
    assert found.notes[0].used
    assert any("which rank" in line.what for line in found.unjudged)
    assert any("launch" in line.why for line in found.unjudged)


@pytest.mark.parametrize("world", [10**30, -1, "x", None, True, [8]])
def test_a_header_that_cannot_be_costs_nothing(tmp_path, world):
    trace = Job(ranks=1, steps=2).traces()[0]
    trace["distributedInfo"] = {"rank": world, "world_size": world}
    trace["traceEvents"].append(
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{10**30}", "ts": 1, "dur": 1}
    )
    (tmp_path / "rank0.json").write_text(json.dumps(trace))
    (note,) = examine([tmp_path]).notes
    assert note.used
    assert "rank 0 of 1: 2 steps" in note.text


@pytest.mark.parametrize(("waits_for", "answer"), [(0.15, False), (0.19, False), (0.21, None), (0.5, None)])
def test_without_hosts_a_network_that_is_hardly_waited_for_is_no_bottleneck_and_more_is_not_judged(
    tmp_path, waits_for, answer
):
    transfer_us = 10_000.0 * waits_for / (1 - waits_for) / 2
    found = examine([Job(ranks=2, noise=0.0, transfer_us=transfer_us).write(tmp_path)])
    assert found.questions["network_between_hosts"].answer is answer


def test_the_world_is_as_large_as_the_trace_that_knows_it_says(tmp_path):
    traces = Job(ranks=3, kernel="").traces()
    del traces[1]["distributedInfo"]
    for rank, trace in enumerate(traces):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(trace))
    assert examine([tmp_path]).facts["kineto"]["world_size"] == 3
