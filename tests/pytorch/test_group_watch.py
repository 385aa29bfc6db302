"""`watch()` on real ranks: jobs of several kinds, what it hooks into, and that training is never disturbed by it."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from bench.monitor.parallel_jobs import Episode, train  # noqa: E402
from tests.monitor.device import FakeDevice  # noqa: E402
from tests.support.ranks import Team, hear, on_ranks, place, say  # noqa: E402
from tests.support.waiting import until  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402

import ringside  # noqa: E402
from ringside.errors import UnsupportedError, UsageError  # noqa: E402
from ringside.monitor.wait_meter import WaitMeter, WatchedGroup  # noqa: E402
from ringside.pytorch import group_watch  # noqa: E402
from ringside.pytorch.group_watch import Ends  # noqa: E402
from ringside.pytorch.process_group.carrier import Carrier, carrier_of  # noqa: E402
from ringside.pytorch.recording import session as sessions  # noqa: E402
from ringside.pytorch.recording.session import RecordingSettings  # noqa: E402

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(
        not hasattr(dist.ProcessGroup, "_set_default_backend"), reason="the process group needs torch 2.7"
    ),
]

ONSET = 45

has_pipelines = pytest.mark.skipif(
    not hasattr(dist.AllreduceOptions, "asyncOp"),
    reason="up to torch 2.7 its own pipelines stand still, over stock Gloo too: works without pipelines",
)
"""Of several messages at once they keep the last one's work; Gloo cancels those that nobody keeps."""


def events(path: Path, *kinds: str) -> list[dict[str, Any]]:
    lines = (path / "events.jsonl").read_text().splitlines() if (path / "events.jsonl").exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] in kinds]


def of_ranks(path: Path) -> list[dict[str, Any]]:
    """Return the verdicts on ranks: on a busy machine the job may be bound by communication, too."""
    return [event["verdict"] for event in events(path, "verdict") if event["verdict"]["ranks"]]


@pytest.mark.noisy
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("kind", "slow", "place", "peers"),
    [
        pytest.param("fsdp", 2, None, None, marks=pytest.mark.core),
        pytest.param("pp_dp", 1, "pp 0, dp 1", "rank 0", marks=[pytest.mark.long, has_pipelines]),
        pytest.param("tp_dp", 3, "dp 1, tp 1", "rank 1", marks=pytest.mark.thorough),
        pytest.param("experts", 0, None, None, marks=pytest.mark.long),
    ],
)
def test_the_slow_rank_is_named(tmp_path: Path, kind: str, slow: int, place: str | None, peers: str | None) -> None:
    path = tmp_path / "run"
    with Team(4) as team:
        team.run(train, kind, "ringside", str(path), ONSET + 50, [Episode(slow, ONSET, 1000, 1.35)], limit_s=150)
    (verdict,) = of_ranks(path)
    assert (verdict["kind"], verdict["ranks"]) == ("slow_rank", [slow])
    assert abs(verdict["since_step"] - ONSET) <= 10
    assert verdict["evidence"].get("place") == place
    assert verdict["evidence"].get("peers") == peers
    assert str(slow) not in verdict["evidence"]["held_up"].split()
    summary = json.loads((path / "summary.json").read_text())
    assert [told["ranks"] for told in summary["verdicts"]] == [[slow]]
    assert summary["verdicts"][0]["evidence"].get("place") == place
    assert summary["assessment"]["state"] == "straggler"
    records = [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]
    assert all(record["groups"] and "new_groups" not in record for record in records)


@has_pipelines
@pytest.mark.noisy
@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_a_heavier_stage_is_said_and_no_rank_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with Team(4) as team:
        team.run(train, "heavy_stage", "ringside", str(path), 120, [], limit_s=150)
    summary = json.loads((path / "summary.json").read_text())
    (verdict,) = (told for told in summary["verdicts"] if told["kind"] != "communication_bound")
    assert (verdict["kind"], verdict["ranks"], verdict["evidence"]["stage"]) == ("stage_imbalance", [], 1)
    assert verdict["evidence"]["stage_ranks"] == "ranks 2 and 3"
    assert summary["pipeline"]["micro_batches"] == 4
    assert 0.1 < summary["pipeline"]["waiting_ratio"] < 0.6


@pytest.mark.noisy
@pytest.mark.timeout(180)
@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "register_pre_hook"), reason="needs torch 2.14")
@pytest.mark.parametrize(("kind", "slow"), [("fsdp", 1), ("compiled_fsdp", 0), ("tp_dp", 2), ("ddp", 3)])
def test_the_slow_rank_is_named_over_stock_gloo(tmp_path: Path, kind: str, slow: int) -> None:
    """By the hooks of its groups; DTensor's waits and DDP's are in C++."""
    path = tmp_path / "run"
    with Team(4) as team:
        team.run(train, kind, "gloo", str(path), ONSET + 50, [Episode(slow, ONSET, 1000, 1.35)], limit_s=150)
    assert [verdict["ranks"] for verdict in of_ranks(path)] == [[slow]]


def join() -> int:
    """Make the default group of this rank, ours; return its number."""
    here = place()
    dist.init_process_group(
        "ringside", store=dist.FileStore(f"/tmp/{here.job}", here.size), rank=here.rank, world_size=here.size
    )
    return here.rank


def leave() -> None:
    if (session := sessions.current()) is not None:
        session.end()
    dist.destroy_process_group()


def one_step(parameter: Any, optimizer: Any, group: Any = None) -> None:
    parameter.grad = torch.ones(4)
    dist.all_reduce(parameter.grad, group=group)
    optimizer.step()


def groups_that_come_and_go(path: str) -> dict[str, Any]:
    rank = join()
    register, wait = c10d._register_process_group, dist.Work.wait
    watch = ringside.watch(run_dir=path)
    assert ringside.watch() is watch
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    one_step(parameter, optimizer)
    for _ in range(3):  # made, used and destroyed again; some of one rank, and some overlapping
        pair, alone = dist.new_group([0, 1]), [dist.new_group([other]) for other in range(2)][rank]
        one_step(parameter, optimizer, pair)
        one_step(parameter, optimizer, alone)
        dist.destroy_process_group(pair)
        dist.destroy_process_group(alone)
    if rank == 0:
        dist.send(torch.ones(2), 1)
    else:
        received = torch.zeros(2)
        dist.irecv(received, 0).wait()
        assert received.tolist() == [1.0, 1.0]
    one_step(parameter, optimizer)
    world = carrier_of(dist.group.WORLD)
    watched = [name for name in vars(world) if getattr(Carrier, name, None) is not None]
    watch.off()
    left = [name for name in vars(world) if getattr(Carrier, name, None) is not None]
    restored = c10d._register_process_group is register and dist.Work.wait is wait
    one_step(parameter, optimizer)
    steps = watch.session.clock.step
    leave()
    return {"watched": len(watched), "left": left, "restored": restored, "steps": steps}


def test_groups_that_are_made_and_destroyed_and_torch_as_it_was_after_off(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for told in on_ranks(2, groups_that_come_and_go, str(path)):
        assert told["watched"] > 20
        assert told["left"] == []
        assert told["restored"]
        assert told["steps"] == 8, "what is not watched any more is no step"
    records = [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]
    assert len(records) == 16
    (last,) = (record for record in records if record["step"] == 7 and record["rank"] == 1)
    assert [(peer, count, size) for _, peer, count, size, _ in last["groups"]] == [(0, 1, 8), (-1, 1, 16)]
    named = [group for event in events(path, "groups") for group in event["groups"]]
    assert {tuple(group["ranks"]) for group in named} == {(0, 1), (0,), (1,)}


def tokens_to_experts() -> int:
    """Both ranks send three numbers to rank 0 and one to rank 1, and get them back; return what was counted."""
    rank = join()
    watch = ringside.watch()
    there, back = [3, 1], [3, 3] if rank == 0 else [1, 1]
    received, returned = torch.zeros(sum(back)), torch.zeros(4)
    dist.all_to_all_single(received, torch.ones(4), back, there)
    dist.all_to_all(list(returned.split(there)), list(received.split(back)))
    dist.all_reduce(torch.zeros(100))
    routed = watch.session.clock.groups.end_step()().routed_bytes
    watch.off()
    leave()
    return routed


def test_what_ranks_send_and_receive_in_all_to_alls_is_counted_and_nothing_else() -> None:
    assert on_ranks(2, tokens_to_experts) == [2 * 6 * 4, 2 * 4 * 4]


def switched_off() -> bool:
    join()
    register = c10d._register_process_group
    watch = ringside.watch()
    watch.step()
    watch.off()
    untouched = c10d._register_process_group is register and sessions.current() is None and watch.session is None
    dist.destroy_process_group()
    return untouched


def test_off_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with Team(2, {"RINGSIDE": "off"}) as team:
        assert team.run(switched_off) == [True, True]


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        ringside.watch()


def with_a_hook_that_fails(path: str) -> tuple[list[float], str]:
    join()
    watch = ringside.watch(run_dir=path)
    meter = watch.session.clock.groups
    said: list[str] = []
    logging.getLogger("ringside.isolation").addFilter(lambda record: bool(said.append(record.getMessage())))
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    one_step(parameter, optimizer)
    meter.counts = None  # what cannot be counted with
    for _ in range(3):
        one_step(parameter, optimizer)
    leave()
    return parameter.tolist(), "; ".join(said)


def test_a_hook_that_fails_is_dropped_and_training_goes_on(tmp_path: Path) -> None:
    for values, said in on_ranks(2, with_a_hook_that_fails, str(tmp_path / "run")):
        assert values == pytest.approx([-0.8] * 4)
        assert said.count("watching process groups failed") == 1


def on_stock_gloo(path: str) -> list[str]:
    here, said = place(), list[str]()
    store = dist.FileStore(f"/tmp/{here.job}", here.size)
    dist.init_process_group("gloo", store=store, rank=here.rank, world_size=here.size)
    logger = logging.getLogger("ringside.pytorch.group_watch")
    logger.addFilter(lambda record: bool(said.append(record.getMessage())))
    ringside.watch(run_dir=path)
    dist.new_group([0, 1])
    parameter = torch.nn.Parameter(torch.zeros(4))
    one_step(parameter, torch.optim.SGD([parameter], lr=0.1))
    leave()
    return said


@pytest.mark.skipif(hasattr(dist.ProcessGroup, "register_pre_hook"), reason="this torch has hooks")
def test_what_is_not_covered_is_said_in_one_line(tmp_path: Path) -> None:
    for rank, said in enumerate(on_ranks(2, on_stock_gloo, str(tmp_path / "run"))):
        assert len(said) == (1 if rank == 0 else 0)
        assert all("from 2.14 on" in line for line in said)


class QueuedWork:
    """A collective on a device, which is over when the test says so."""

    def __init__(self) -> None:
        self.is_over = False

    def is_completed(self) -> bool:
        return self.is_over


class Uncaptured:
    """A device on which no graph is captured."""

    @staticmethod
    def beside_captures() -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def test_what_a_device_does_is_asked_whether_it_is_over_until_it_is_and_then_let_go() -> None:
    meter = WaitMeter(0, lambda began, ended: None)
    meter.add(WatchedGroup("1", "", lambda: [0, 1]))
    works = [QueuedWork() for _ in range(3)]
    issued = [meter.issue("1", -1, 8) for _ in works]
    ends = Ends(meter.guard, Uncaptured())
    for work, one in zip(works, issued, strict=True):
        ends.add(work, one)
    works[1].is_over = True
    until(lambda: issued[1].over == issued[1].over, "the end of the second")
    assert [one.over == one.over for one in issued] == [False, True, False]
    issued[0].is_waited_for = True  # Python has waited for it, and has noted that by itself
    works[2].is_over = True
    until(lambda: issued[2].over == issued[2].over, "the end of the third")
    known = [weakref.ref(work) for work in works]
    del works, work
    until(lambda: [gc.collect(), all(ref() is None for ref in known)][1], "that works which are over are let go")
    assert issued[0].over != issued[0].over
    ends.close()


def reduce_on_meta(carrier: Any) -> None:
    """All-reduce what is on a device of its own; a backend (torch ≥ 2.14) refuses it, when it has been seen."""
    with contextlib.suppress(UnsupportedError):
        carrier.allreduce([torch.empty(0, device="meta")], dist.AllreduceOptions())


def on_a_device_without_a_clock(path: str) -> list[Any]:
    """All-reduce what is on a device that no events are known of."""
    join()
    said: list[str] = []
    logging.getLogger("ringside.pytorch.group_watch").addFilter(lambda record: bool(said.append(record.getMessage())))
    watch = ringside.watch(run_dir=path)
    clock, carrier = watch.session.clock, carrier_of(dist.group.WORLD)
    dist.all_reduce(torch.zeros(4))
    is_watched = clock.groups is not None and clock.groups.has_issued
    for _ in range(2):
        reduce_on_meta(carrier)
    found = [is_watched, clock.groups is None, watch.session.watch is None or watch.session.watch.groups is None, said]
    leave()
    return found


def test_on_a_device_that_cannot_be_timed_groups_are_not_watched_and_that_is_said_once(tmp_path: Path) -> None:
    words = "collectives on meta are not timed: this job is not watched by its groups"
    for rank, found in enumerate(on_ranks(2, on_a_device_without_a_clock, str(tmp_path / "run"))):
        assert found == [True, True, True, [words] if rank == 0 else []]


class Device(FakeDevice, Uncaptured):
    """Pretended, with all that `watch()` asks of CUDA's."""


def beside_a_device(path: str) -> list[Any]:
    """Training is on a device, of which a collective was issued; return what is known of one of host tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_watch, "events_of", lambda device: Device())
        patch.setattr(torch.cuda, "default_stream", lambda device: None)
        join()
        watch = ringside.watch(run_dir=path)
        groups, carrier = watch.session.clock.groups, carrier_of(dist.group.WORLD)
        reduce_on_meta(carrier)
        groups.end_step()
        counted, moved = groups.counts.total(), groups.moves
        dist.all_reduce(torch.zeros(4))
        found = [groups.device is not None, groups.has_issued, groups.counts.total() - counted, groups.moves - moved]
        leave()
        return found


def test_what_the_host_does_beside_a_device_is_counted_and_not_timed(tmp_path: Path) -> None:
    assert on_ranks(2, beside_a_device, str(tmp_path / "run")) == [[True, False, 1, 1]] * 2


def two_messages() -> dict[int, float]:
    """Rank 0 waits for a message of each of the others, of which rank 1 is late; return how long, by sender."""
    rank = join()
    watch = ringside.watch()
    dist.barrier()
    watch.session.clock.groups.end_step()
    if rank == 0:
        for work in [dist.irecv(torch.zeros(4), sender) for sender in (1, 2)]:
            work.wait()
    else:
        time.sleep(0.1 if rank == 1 else 0.0)
        dist.send(torch.ones(4), 0)
    sums = watch.session.clock.groups.end_step()()
    leave()
    return {use.peer: use.blocked_seconds for use in sums.uses}


def test_a_wait_for_a_message_is_ascribed_to_its_sender() -> None:
    waited, *_ = on_ranks(3, two_messages)
    assert waited[1] > waited[2]


def by_hand(path: str) -> int:
    join()
    watch = ringside.watch(run_dir=path)
    for _ in range(5):
        dist.all_reduce(torch.ones(4))
        dist.barrier()
        watch.step()
    steps = watch.session.clock.step
    leave()
    return steps


def test_a_loop_without_an_optimizer_says_itself_where_a_step_ends(tmp_path: Path) -> None:
    assert on_ranks(2, by_hand, str(tmp_path / "run")) == [5, 5]
    records = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["rank"] == 0] == list(range(5))


def one_is_missing(path: str, limit_s: float) -> None:
    """Ranks 0 and 1 meet in a barrier of their own, and rank 1 does not come; rank 2 waits for rank 0 in another."""
    rank = join()
    sessions.begin(path, "ringside", RecordingSettings(hang_s=limit_s))
    watch = ringside.watch(run_dir=path)
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    first, second = dist.new_group([0, 1]), dist.new_group([0, 2])
    for _ in range(3):
        one_step(parameter, optimizer)
    until(watch.session.watch.met.is_set, "what the ranks' watchers know of each other")
    dist.barrier()
    say("ready")
    if rank == 1:
        hear()
    if rank < 2:
        dist.barrier(group=first)
    if rank != 1:
        dist.barrier(group=second)
    leave()


def test_who_is_missing_from_a_barrier_of_a_subgroup_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with Team(3) as team:
        team.start(one_is_missing, str(path), 1.5)
        team.await_word()
        deadline = time.monotonic() + 30.0
        while not events(path, "waited_for", "verdict"):
            assert time.monotonic() < deadline, "nobody was named"
            time.sleep(0.02)
        team.tell(1, "go on")
        assert all(outcome.ok for outcome in team.finish())
    (told,) = events(path, "waited_for")
    assert told["ranks"] == [1], "rank 0 waits itself, and rank 2 for it"
    assert told["waiting"] == [0, 2]
    assert told["op"] == "barrier"
    assert told["where"].endswith("in hear")
    assert events(path, "verdict") == [], "a rank may be at work: no hang is called before its time"
