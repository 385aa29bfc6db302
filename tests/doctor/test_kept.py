"""Everything the doctor says of files of every kind, held against what was kept: each figure, word and order."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.support.kept import Kept
from tests.support.mangle import mangled

from ringside.doctor import Findings, examine
from ringside.doctor.kineto.straggler import persistent_rank

from .dumps import START_NS, call, dump, world, write
from .kineto_maker import OLD, RCCL, Job
from .nccl_logs import BUS_IDS_2_10, OLD_2_4, hosts_of, interleaved, job_log, log_of_rank
from .noisy_ranks import KINDS, noisy_times
from .scans import EVENTS, scanned
from .shared_data import shared
from .timeline_maker import Shape, run
from .torch_logs import ELASTIC, error_file, standing, timeout
from .written_run import write_run

pytestmark = pytest.mark.core
USUAL = [*map(call, range(1, 6)), call(6, done=False)]


def _log(folder: Path, text: str) -> None:
    (folder / "job.log").write_text(text)


# ------------------------------------------------------------------------------------------------ traces


def slow_rank_of_two_hosts(folder: Path) -> None:
    job = Job(slow={2: 1.4}, hosts=["a", "a", "b", "b"], clock_us={2: 3_000.0, 3: 3_000.0}, steps=10)
    job.write(folder, packed=True)


def nobody_is_slow(folder: Path) -> None:
    Job(ranks=3, steps=8, hosts=["a"], kernel=OLD, details=False, seed=1).write(folder)


def it_moves(folder: Path) -> None:
    Job(ranks=3, steps=5, noise=0.3, kernel=RCCL, seed=4, transfer_us=4_000.0).write(folder)


def bound_and_small(folder: Path) -> None:
    Job(ranks=2, steps=4, sizes=[1000] * 20 + [1 << 20] * 4, transfer_us=4_000.0, hosts=["a", "b"]).write(folder)


def five_of_eight(folder: Path) -> None:
    Job(ranks=8, steps=6, slow={3: 1.6}, distributed_info=False).write(folder, only=[0, 1, 3, 4, 7], name="worker")


def one_alone(folder: Path) -> None:
    Job(ranks=2, steps=4, kernel="").write(folder, only=[1])


def two_jobs_and_a_second_file(folder: Path) -> None:
    Job(ranks=2, slow={0: 1.5}, kernel="", steps=12).write(folder / "b")
    Job(ranks=3, start_us=1_800_000_000_000_000.0, steps=4).write(folder / "c")
    Job(ranks=3, start_us=1_800_000_000_000_000.0, steps=4).write(folder / "d", only=[1])


def other_calls(folder: Path) -> None:
    traces = Job(ranks=4, steps=4).traces()
    for event in traces[2]["traceEvents"]:
        if event.get("cat") == "kernel" and event["args"].get("Seq") in (3, 5):
            event["args"]["Collective name"] = "_allgather_base"
    for rank, trace in enumerate(traces):
        (folder / f"rank{rank}.json").write_text(json.dumps(trace))


def broken_off(folder: Path) -> None:
    Job(slow={1: 1.5}, kernel="", steps=12, ranks=2).write(folder)
    path = folder / "rank0.pt.trace.json"
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 4])


def without_steps(folder: Path) -> None:
    for rank, trace in enumerate(Job(ranks=2, steps=4, kernel="", sizes=(4096,)).traces()):
        events = trace["traceEvents"]
        trace["traceEvents"] = [event for event in events if "ProfilerStep" not in event["name"]]
        trace["distributedInfo"]["pg_config"] = [{"pg_name": "0"}]
        (folder / f"rank{rank}.json").write_text(json.dumps(trace))


def alone_without_collectives(folder: Path) -> None:
    trace = Job(ranks=1, steps=3, kernel="", distributed_info=False).traces()[0]
    trace["traceEvents"] = [event for event in trace["traceEvents"] if "gloo" not in event["name"]]
    (folder / "some.json").write_text(json.dumps(trace["traceEvents"]))


def uneven_steps(folder: Path) -> None:
    """Steps that not all ranks recorded, and a rank that is slow from its third step on."""
    slow = Job(ranks=3, steps=9, slow={2: 1.5}, slow_steps=range(3, 9), transfer_us=6_000.0, integers=True)
    traces = slow.traces()
    events = traces[0]["traceEvents"]
    traces[0]["traceEvents"] = [event for event in events if event["name"] != "ProfilerStep#5"]
    for rank, trace in enumerate(traces):
        (folder / f"rank{rank}.json").write_text(json.dumps(trace))


def recorded_elsewhere(folder: Path) -> None:
    for name in ("dlrm_8rank.tar.gz", "gloo_world300_rank34.json.gz", "rank_not_found.json.gz"):
        (folder / name).symlink_to(shared("kineto") / name)


# ------------------------------------------------------------------------------------------------ timelines


def _costs(kind: str, stage: int, replica: int, batch: int) -> float:
    seconds = {"forward-compute": 0.01, "backward-compute": 0.02, "optimizer": 0.005}.get(kind, 0.0005)
    return seconds * (1.5 if stage == 1 and replica == 1 and "compute" in kind else 1.0 + 0.01 * (batch % 3))


def a_pipeline(folder: Path) -> None:
    shape = Shape(stages=3, replicas=2, micro_batches=6, steps=3)
    run(shape, _costs)
    shape.events.remove(next(e for e in shape.events if e["args"].get("step") == 9 and e["name"] == "backward-compute"))
    (folder / "timeline-x.json.gz").write_bytes(gzip.compress(json.dumps(shape.events).encode()))
    (folder / "meta-x.yaml").write_text("trial_name: x\ndp_size: 2\npp_size: 3\nworld_size: 6\n")


def pipelines_of_many_shapes(folder: Path) -> None:
    for number, (stages, replicas, batches, chunks, overlap) in enumerate(
        [(1, 4, 3, 1, False), (4, 1, 5, 1, True), (4, 2, 8, 2, False), (2, 3, 4, 1, True), (3, 2, 6, 2, True)]
    ):
        shape = Shape(stages, replicas, batches, chunks, overlap, records_idle_calls=number % 2 == 0)
        run(shape, _costs)
        for event in shape.events:
            if event["name"] == "gc" and number > 2:
                event["dur"] = 1_500.0
        (folder / f"timeline-{number}.json").write_text(json.dumps(shape.events))
        sizes = f"dp_size: {replicas}\npp_size: {stages}\nvpp_size: {chunks}\nworld_size: {stages * replicas}\n"
        (folder / f"meta-{number}.yaml").write_text(f"trial_name: {number}\n{sizes}")


def a_pipeline_in_chunks(folder: Path) -> None:
    shape = Shape(stages=2, replicas=2, micro_batches=4, chunks=2, overlap=True, records_idle_calls=True)
    run(shape, _costs)
    (folder / "timeline.json").write_text(json.dumps({"traceEvents": shape.events}))


def a_published_timeline(folder: Path) -> None:
    for name in ("timeline-ST.json.gz", "meta-ST.yaml"):
        (folder / name).symlink_to(shared("what_if") / name)


# ------------------------------------------------------------------------------------------------ dumps


def never_came(folder: Path) -> None:
    write(folder, world(4, {2: USUAL[:5]}, USUAL))


def went_elsewhere(folder: Path) -> None:
    before = USUAL[:5]
    own = {1: [*before, call(6, dtype="Double", sizes=[[8, 3]], done=False)], 3: [*before, call(6, "broadcast")]}
    write(folder, world(6, own, USUAL), as_json=True)


def two_groups(folder: Path) -> None:
    pair = [call(1, group="1", desc="tp", at_ms=4), call(2, group="1", desc="tp", done=False, at_ms=5)]
    entries = {rank: [*USUAL[:3], *pair[: 1 + (rank == 2)]] for rank in (2, 3)}
    entries |= {rank: [*USUAL[:3], pair[0], call(4, done=False, at_ms=6)] for rank in (0, 1)}
    groups = {rank: {"0": range(4), "1": (0, 1) if rank < 2 else (2, 3)} for rank in range(4)}
    write(folder, {rank: dump(entries[rank], groups[rank], "2.5") for rank in range(4)})


def stopped(folder: Path) -> None:
    usual = [*map(call, range(1, 8)), call(8, done=False)]
    write(folder, world(4, {1: [call(seq, done=seq < 4) for seq in range(1, 9)]}, usual))


def some_are_missing(folder: Path) -> None:
    dumps = world(5, {}, USUAL)
    del dumps[3], dumps[1]
    dumps[0]["entries"].insert(0, {"collective_seq_id": "no number", "process_group": 7})
    write(folder, dumps)
    write(folder, {9: dump(USUAL, {"0": range(16)})})
    (folder / "trace").write_bytes((folder / "nccl_trace_rank_0").read_bytes())


def another_order(folder: Path) -> None:
    usual = [call(1), call(2, "all_gather"), call(3, "broadcast"), call(4, done=False)]
    swapped = [call(1), call(2, "broadcast"), call(3, "all_gather"), call(4, done=False)]
    write(folder / "soon", world(3, {2: swapped}, usual))
    ops = ["all_gather", *["all_reduce"] * 8, "broadcast"]
    late = [call(seq, op, done=seq < 10) for seq, op in enumerate(ops, 1)]
    other = [call(seq, op, done=seq < 10) for seq, op in enumerate(reversed(ops), 1)]
    write(folder / "late", world(4, {0: other}, late))
    write(folder / "never", world(3, {1: [call(1), call(2, "reduce", done=False)]}, [call(1), call(2, done=False)]))
    write(folder / "halves", world(4, {r: [call(1, sizes=[[8]], done=False)] for r in (1, 3)}, [call(1, done=False)]))


def never_sent(folder: Path) -> None:
    write(folder, world(3, {0: [call(1), call(2, "recv 0<-1", p2p=True, done=False)]}, [call(1)]))


def each_waits_for_the_other(folder: Path) -> None:
    groups = {"0": range(2), "1": range(2)}
    other = call(1, group="1", desc="tp", done=False, at_ms=3)
    write(folder, {0: dump([call(1), call(2, done=False)], groups), 1: dump([call(1), other], groups)})


def under_way(folder: Path) -> None:
    write(
        folder,
        {r: dump([*map(call, range(1, 8 + 2 * r)), call(8 + 2 * r, done=False)], {"0": range(3)}) for r in range(3)},
    )
    for path in folder.iterdir():
        os.utime(path, ((START_NS + 9e6) / 1e9,) * 2)


def real_dumps(folder: Path) -> None:
    for name in ("gpu_error_1st", "lock_gil_1st"):
        (folder / name).mkdir()
        for path in shared(f"flight_recorder/{name}").iterdir():
            (folder / name / path.name).symlink_to(path)


# ------------------------------------------------------------------------------------------------ logs, errors, runs


def a_healthy_log(folder: Path) -> None:
    extra = ["Pattern 4, crossNic 0, nChannels 12, bw 20.000000/20.000000, type NVL/PIX, sameChannels 1"]
    _log(folder, job_log([4, 4], extra=extra))


def a_log_of_many_faults(folder: Path) -> None:
    def change(rank: int) -> dict[str, object]:
        sockets = {"network": "NET/Socket/0"} if rank in (3, 4) else {}
        return {**sockets, "environment": {"NCCL_ALGO": "Tree" if rank == 1 else "Ring"}}

    text = job_log([2, 2, 2], change, order=[0, 2, 1, 3, 4, 5])
    lost = (
        "node-{}:{}:1600 [{}] socket.cc:50 NCCL WARN socketProgress: Connection closed by remote peer node-{}<5000>\n"
    )
    _log(folder, text + lost.format(0, 1001, 1, 1) + lost.format(0, 1000, 0, 1) + lost.format(1, 1002, 0, 2))


def logs_of_ranks(folder: Path) -> None:
    places = hosts_of([2, 2])
    for rank in range(4):
        lines = log_of_rank(
            rank, places, complete=rank != 2, version="2.18.3+cuda12.1" if rank == 3 else "2.21.5+cuda12.4"
        )
        (folder / f"rank{rank}.log").write_text("\n".join(lines))


def a_hop_and_sockets(folder: Path) -> None:
    logs = [log_of_rank(rank, hosts_of([2, 2]), network="NET/Socket/0", channels=3) for rank in range(4)]
    logs = [[line for line in log if "Channel 01/0 : 2[0] -> 3[1]" not in line] for log in logs]
    reason = "node-0:1000:1000 [0] NCCL INFO NET/IB : No device found.\n"
    abort = "node-0:1001:1600 [1] NCCL INFO comm 0x55d0000100 rank 1 nranks 4 cudaDev 1 busId 2000 - Abort COMPLETE\n"
    _log(folder, reason + interleaved(logs) + abort)


def rings_of_many_kinds(folder: Path) -> None:
    many = {
        "hosts_in_turn": job_log([3, 3], order=[0, 3, 1, 4, 2, 5], channels=1),
        "without_a_rank": job_log([4]).replace("Channel 00/02 :  0  1  2  3", "Channel 00/02 :  0  1  3"),
        "three_hosts": job_log([2, 2, 2], lambda rank: {"network": "NET/Socket/0"} if rank == 2 else {}, channels=4),
        "not_complete": job_log([2, 2], lambda rank: {"complete": rank not in (1, 3)}),
        "two_communicators": job_log([2, 2]) + job_log([2, 2], comm_id="0x11", order=[0, 2, 1, 3], channels=3),
        "old": OLD_2_4 + BUS_IDS_2_10,
        "one_of_eight": "\n".join(log_of_rank(0, hosts_of([4, 4]))),
    }
    for name, text in many.items():
        (folder / name).mkdir()
        _log(folder / name, text.replace("node-", f"{name[:2]}-"))


def a_watchdog(folder: Path) -> None:
    text = "".join(timeout(rank, 1580) + standing(rank, 1582, 1579) for rank in (0, 1, 3)) + standing(2, 1579, 1579)
    (folder / "train.log").write_text("step 1 loss 2.3\n" * 20 + text)


def a_death(folder: Path) -> None:
    (folder / "train.log").write_text("".join(timeout(rank, 7) for rank in (0, 1, 2)) + ELASTIC)
    error_file(folder, 0, "DistBackendError: NCCL error: remote process exited", 100)
    error_file(folder, 2, "RuntimeError: CUDA out of memory", 101)
    (folder / "notes.txt").write_text("nothing\n")
    (folder / "empty").write_bytes(b"")
    (folder / "some.bin").write_bytes(bytes(range(256)))


def a_run(folder: Path) -> None:
    write_run(folder / "run", slow_rank=5)
    (folder / "run" / "events.jsonl").write_text("")


SCENES: list[Callable[[Path], None]] = [
    slow_rank_of_two_hosts, nobody_is_slow, it_moves, bound_and_small, five_of_eight, one_alone,
    two_jobs_and_a_second_file, other_calls, broken_off, without_steps, alone_without_collectives, uneven_steps,
    recorded_elsewhere,
    a_pipeline, pipelines_of_many_shapes, a_pipeline_in_chunks, a_published_timeline,
    never_came, went_elsewhere, two_groups, stopped, some_are_missing, another_order, never_sent,
    each_waits_for_the_other, under_way, real_dumps,
    a_healthy_log, a_log_of_many_faults, rings_of_many_kinds, logs_of_ranks, a_hop_and_sockets,
    a_watchdog, a_death, a_run,
]  # fmt: skip


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_all_that_is_found(scene: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: Kept):
    scene(tmp_path)
    monkeypatch.chdir(tmp_path)  # so that files are named alike everywhere
    heard = Heard()
    kept(scene.__name__, {**_summary(examine(["."], heard)), "said": heard.said, "read_bytes": heard.read_bytes})


class Heard:
    """Progress that is remembered."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.read_bytes = 0

    def begin(self, text: str) -> None:
        self.said.append(text)

    def advance(self, nbytes: int) -> None:
        self.read_bytes += nbytes


def _summary(found: Findings) -> dict[str, Any]:
    """Return all of it; of lanes, which have hundreds of spans, what each kind adds up to and the first few."""
    plain: dict[str, Any] = msgspec.to_builtins(found)
    for lane in plain["lanes"]:
        seconds: Counter[str] = Counter()
        for span in lane["spans"]:
            seconds[span["kind"]] += span["end_s"] - span["start_s"]
        lane["seconds"], lane["count"] = dict(sorted(seconds.items())), len(lane["spans"])
        lane["spans"] = lane["spans"][:5]
    return {name: value for name, value in plain.items() if value}


def test_ranks_that_are_slow_by_so_little_that_chance_may_explain_it(kept: Kept) -> None:
    found = []
    for kind in KINDS:
        for steps, ranks in ((3, 2), (4, 8), (9, 3), (12, 4), (30, 2)):
            named = []
            for seed in range(12):
                own = noisy_times(kind, steps, ranks, seed)
                own[:, 1] *= 1.05 + 0.03 * seed
                named.append(persistent_rank(own))
            found.append([kind, steps, ranks, named])
    kept("persistent", found)


def test_what_is_left_of_a_trace_that_breaks_off_or_is_damaged_anywhere(kept: Kept) -> None:
    head = {"schemaVersion": 1, "distributedInfo": {"rank": 3}}
    text = json.dumps({**head, "traceEvents": EVENTS[:6], "traceName": "x"}, indent=1).encode()
    found = []
    for place in range(0, len(text), 41):
        for broken in (text[:place], text[:place] + b"\x01" + text[place + 1 :], text[:place] + text[place + 30 :]):
            events, scan = scanned(broken)
            found.append([[event.ts for event in events], scan.losses(), scan.whole, sorted(scan.header)])
    kept("scans", found)


CRASH = "".join(timeout(rank, 1580) + standing(rank, 1582, 1579) for rank in (0, 1, 3)) + standing(2, 1579, 1579)
LOST = "node-0:1001:1600 [1] socket.cc:50 NCCL WARN socketProgress: Connection closed by remote peer node-1<5000>\n"
TEXTS = {
    "nccl": job_log([2, 2], lambda rank: {"environment": {"NCCL_ALGO": "Ring"}}) + LOST,
    "sockets": job_log([1, 2], channels=1, network="NET/Socket/0", version="2.18.3+cuda12.1"),
    "nccl_2_4": OLD_2_4,
    "nccl_2_10": BUS_IDS_2_10,
    "torch": CRASH + ELASTIC,
    "meta": "trial_name: x\ndp_size: 2\npp_size: 3\nvpp_size: 1\nworld_size: 12\ntp_size: 2\n# end\n",
}


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_read_of_logs_that_were_cut_wrapped_and_edited(kept: Kept, tmp_path: Path, name: str) -> None:
    random, found, path = np.random.default_rng(7), [], tmp_path / ("meta-x.yaml" if name == "meta" else "job.log")
    for number in range(50):
        path.write_text(TEXTS[name] if number == 0 else mangled(mangled(TEXTS[name], random), random))
        told = examine([path])
        drawn = [[one.nranks, one.hosts, one.note, *([[hop.src, hop.dst, hop.via, hop.wrong] for hop in hops]
                  for hops in (*one.rings.values(), *one.trees.values()))] for one in told.rings]  # fmt: skip
        found.append([
            [[one.kind, one.ranks, one.cause, sorted(map(str, one.evidence.values()))] for one in told.verdicts],
            [[one.what, one.why] for one in told.unjudged], [[note.used, note.text] for note in told.notes],
            drawn if number % 5 == 0 else [[len(hops) for hops in one] for one in drawn and [drawn[0][3:]]],
        ])  # fmt: skip
    kept(f"text_{name}", found)
