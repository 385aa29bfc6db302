"""The hang watch of ranks and hosts in one process: their pages, their letters, and looks at times that tests choose.

What `test_watch.py` shows with real ranks that hang, these show of every part, without waiting for it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from tests.support.waiting import Clock, until  # noqa: E402

from ringside.monitor.hang.attribution import ProcessState, RankState  # noqa: E402
from ringside.processes import read_stat  # noqa: E402
from ringside.pytorch.hang_watch import host as watch_host  # noqa: E402
from ringside.pytorch.hang_watch import store_channel as watch_mail  # noqa: E402
from ringside.pytorch.hang_watch import watch  # noqa: E402
from ringside.pytorch.hang_watch.board import ProgressPage, ProgressView  # noqa: E402
from ringside.pytorch.hang_watch.host import Host, RankHandle  # noqa: E402
from ringside.pytorch.hang_watch.stacks import Stacks  # noqa: E402
from ringside.pytorch.hang_watch.store_channel import FRESH_S, StoreChannel  # noqa: E402

PATIENCE_S = 30.0


# ------------------------------------------------------------------------------------------------ letters of hosts


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], StoreChannel]]:
    """Opens the end of one of three hosts, of two ranks, one and one, in one store."""
    monkeypatch.setattr(watch_mail, "MAIL_S", 0.002)
    store = dist.HashStore()
    with contextlib.ExitStack() as stack:

        def open_mail(host: int) -> StoreChannel:
            mail = StoreChannel(store, host, [[0, 1], [2], [3]])
            stack.callback(mail.close)
            return mail

        yield open_mail


def test_hosts_hear_where_the_others_ranks_stand(hosts: Callable[[int], StoreChannel]) -> None:
    first, second = hosts(0), hosts(1)
    first.announce(9)  # nothing was posted yet: there is nothing to send
    now = time.monotonic()
    assert [s.rank for s in second.others(now)] == [0, 1, 3]
    assert {s.entered for s in second.others(now)} == {-1}
    assert second.speaker(now) == 1
    assert second.episode(0) == 0
    first.post([RankState(rank=0, entered=5), RankState(rank=1, entered=4)], episode=0)
    until(lambda: second.speaker(time.monotonic()) == 0)
    assert [(s.rank, s.entered) for s in second.others(time.monotonic())] == [(0, 5), (1, 4), (3, -1)]
    assert first.speaker(time.monotonic()) == 0
    second.post([RankState(rank=2, entered=3)], episode=0)
    until(lambda: [s.entered for s in first.others(time.monotonic())] == [3, -1])  # the first host reads all
    first.announce(2)
    until(lambda: second.episode(0) == 2)
    assert [s.entered for s in second.others(time.monotonic())][:2] == [5, 4]
    first.post([RankState(rank=0, entered=6)], episode=3)
    until(lambda: second.episode(0) == 3)
    assert second.silence_s(time.monotonic() + 7.0) == pytest.approx(7.0, abs=2.0)


def test_reports_of_a_host_count_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks seldom could take one for another else, and the host for a silent one."""
    monkeypatch.setattr(watch_mail, "MAIL_S", 0.002)
    store, numbers = dist.HashStore(), [0]
    mail = StoreChannel(store, 0, [[0], [1]])
    reports = 2 * [partial(mail.post, [], 0)] + [partial(mail.announce, 1), partial(mail.post, [], 1)]
    for report in reports:
        report()
        until(lambda: store.check(["host/0"]) and watch_mail.decode_report(store.get("host/0")).number != numbers[-1])
        numbers.append(watch_mail.decode_report(store.get("host/0")).number)
    mail.close()
    assert numbers == sorted(set(numbers))


def test_who_speaks_is_the_first_host_that_was_heard_of_lately(hosts: Callable[[int], StoreChannel]) -> None:
    first, second, third = hosts(0), hosts(1), hosts(2)
    second.post([], episode=0)
    until(lambda: third.speaker(time.monotonic()) == 1)
    first.post([], episode=0)
    until(lambda: third.speaker(time.monotonic()) == 0)
    heard = time.monotonic()
    assert third.speaker(heard + FRESH_S - 1.0) == 0
    assert third.speaker(heard + FRESH_S) == 2  # all that it knows is old
    assert second.speaker(heard + FRESH_S) == 1


def test_who_does_not_speak_reads_no_more_than_who_does(hosts: Callable[[int], StoreChannel]) -> None:
    first, second, third = hosts(0), hosts(1), hosts(2)
    third.post([RankState(rank=3, entered=1)], episode=0)
    until(lambda: second.others(time.monotonic())[-1].entered == 1)  # the first was never heard of: the second speaks
    first.post([], episode=0)
    until(lambda: second.speaker(time.monotonic()) == 0)
    third.post([RankState(rank=3, entered=2)], episode=0)
    until(lambda: first.others(time.monotonic())[-1].entered == 2)
    assert second.others(time.monotonic())[-1].entered == 1


def test_what_was_heard_grows_old_where_nothing_new_comes(
    hosts: Callable[[int], StoreChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(watch_mail, "time", SimpleNamespace(monotonic=clock))
    first, second = hosts(0), hosts(1)
    told = [
        RankState(rank=0, waiting_s=1.0, still_s=2.0, silent_s=0.25, process=ProcessState(state="S")),
        RankState(rank=1, waiting_s=0.0, still_s=9.0, silent_s=8.0, process=ProcessState(state="R")),
    ]
    first.post(told, episode=0)
    until(lambda: second.speaker(clock.now) == 0)
    heard = clock.now
    fresh = second.others(heard + FRESH_S)[:2]
    assert fresh == [
        RankState(rank=0, waiting_s=1 + FRESH_S, still_s=2 + FRESH_S, silent_s=0.25 + FRESH_S, process=told[0].process),
        RankState(rank=1, still_s=9 + FRESH_S, silent_s=8 + FRESH_S, process=told[1].process),
    ]
    old = second.others(heard + FRESH_S + 1.0)[:2]
    assert old == [
        RankState(rank=0, waiting_s=1.0, still_s=3 + FRESH_S, silent_s=FRESH_S + 1.0),
        RankState(rank=1, still_s=10 + FRESH_S, silent_s=8.0),
    ]
    unheard = second.others(clock.now + 3.0)[-1]  # nothing since it began
    assert (unheard.rank, unheard.still_s, unheard.silent_s) == (3, 3.0, 3.0)


def test_stacks_come_once_from_each_host_and_those_that_do_not_are_left_out(
    hosts: Callable[[int], StoreChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = hosts(0), hosts(1), hosts(2)
    second.post_stacks(1, {2: "in validate"})
    third.post_stacks(2, {3: "of a later hang"})
    assert first.stacks(1, limit_s=0.3) == {2: "in validate"}
    third.post_stacks(1, {3: "in forward"})
    assert first.stacks(1, limit_s=PATIENCE_S) == {2: "in validate", 3: "in forward"}
    for mail in (second, third):
        mail.post_stacks(3, {9: "there"})
    assert first.stacks(3, limit_s=PATIENCE_S) == {9: "there"}
    monkeypatch.setattr(first, "silence_s", lambda now: FRESH_S)
    assert first.stacks(3, limit_s=PATIENCE_S) == {}  # nothing is asked of a store that does not answer
    monkeypatch.undo()
    first.close()
    assert first.stacks(4, limit_s=PATIENCE_S) == {}


class Breaks(dist.Store):  # type: ignore[misc]
    """A store that is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = Event()

    def check(self, keys: list[str]) -> bool:
        self.asked.set()
        raise RuntimeError("connection reset")


def test_a_store_that_is_gone_is_said_once_and_only_while_it_matters(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch_mail, "MAIL_S", 0.002)
    caplog.set_level("INFO", "ringside")
    mail = StoreChannel(Breaks(), 0, [[0], [1]])
    until(lambda: "receives nothing from other hosts any more (connection reset)" in caplog.text)
    assert mail.silence_s(time.monotonic() + 3.0) >= 3.0
    mail.close()
    assert caplog.text.count("receives nothing") == 1


# ------------------------------------------------------------------------------------------------ ranks of one host


class Ranks:
    """Pages and stacks of some ranks, all of them in this process, and how one of them sees the others."""

    def __init__(self, count: int) -> None:
        self.boards = [ProgressPage() for _ in range(count)]
        self.stacks = [Stacks() for _ in range(count)]
        stat = read_stat(os.getpid())
        assert stat is not None
        self.hellos = [
            RankHandle(rank, "here", os.getpid(), stat.started, board.fd, stacks.fd, stacks.signal)
            for rank, (board, stacks) in enumerate(zip(self.boards, self.stacks, strict=True))
        ]
        self.opened: list[Host] = []

    def seen_by(self, rank: int, *more: RankHandle) -> Host:
        self.opened.append(Host(rank, self.boards[rank], [*self.hellos, *more]))
        return self.opened[-1]

    def close(self) -> None:
        parts: list[Any] = [*self.opened, *self.boards, *self.stacks]
        for part in parts:
            part.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks(3)
    yield made
    made.close()


def test_the_lowest_rank_whose_watcher_works_speaks_for_the_host(ranks: Ranks) -> None:
    host, now = ranks.seen_by(1), time.monotonic()
    beats = {0: now, 1: now - 99.0, 2: now}
    for rank, at in beats.items():
        ranks.boards[rank].put("beat_at", at)
    assert host.leader(now) == 0
    assert host.leader(now, unable={0}) == 1
    assert host.leader(now + watch_host.FRESH_S) == 1
    assert host.leader(now, unable={0, 1}) == 2
    assert host.leader(now, unable={0, 1, 2}) == 1
    ranks.boards[0].put("left", 1)
    assert host.leader(now) == 1


def test_a_rank_whose_page_is_gone_is_not_seen_and_that_is_said(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ringside")
    gone = RankHandle(7, "here", 2**22 + 1, 1, 3, 4, 0)
    host = ranks.seen_by(0, gone)
    assert "the hang watch cannot see rank 7" in caplog.text
    assert [standing.rank for standing in host.standings(time.monotonic())] == [0, 1, 2]
    assert host.episode_of(7) == 0
    ranks.boards[1].put("episode", 4)
    assert host.episode_of(1) == 4
    assert host.spoken == 0
    for rank, spoken in enumerate((1, 0, 2)):
        ranks.boards[rank].put("spoken", spoken)
    assert host.spoken == 3


def test_the_kernel_is_asked_where_somebody_waits_or_is_silent(ranks: Ranks) -> None:
    now = time.monotonic()
    host = ranks.seen_by(0)
    for board in ranks.boards:
        board.put("beat_at", now)

    def asked(at: float, **how: bool) -> list[bool]:
        return [standing.process.kernel_function != "" or standing.process.state != "S" or
                standing.process.cpu_share == standing.process.cpu_share
                for standing in host.standings(at, **how)]  # fmt: skip

    time.sleep(0.21)  # from then on the kernel's answer tells what share of a core it uses
    host.standings(now, ask_kernel=True)
    until(lambda: all(asked(time.monotonic(), ask_kernel=True)))
    later = time.monotonic()
    assert asked(now) == [False] * 3
    ranks.boards[1].put("beat_at", later - 1.5)
    ranks.boards[0].put("beat_at", later)
    ranks.boards[2].put("beat_at", later)
    assert asked(later) == [False, True, False]
    ranks.boards[1].put("beat_at", later)
    ranks.boards[2].put("waiting_since", later - 0.5)
    assert asked(later) == [False] * 3
    ranks.boards[2].put("waiting_since", later - 1.5)
    assert asked(later) == [True] * 3


def test_ranks_that_do_not_write_their_stacks_are_made_to(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_host, "OWN_STACKS_S", 0.05)
    monkeypatch.setattr(watch_host, "ASKED_STACKS_S", 0.3)
    other = RankHandle(5, "here", os.getpid(), ranks.hellos[0].started + 1, ranks.boards[0].fd, ranks.stacks[0].fd, 0)
    host = ranks.seen_by(0, other)  # of a process that is gone: another one has its number
    ranks.stacks[0].dump()
    ranks.boards[0].put("dumped", 2)
    before = watch_host.read_stacks(os.getpid(), ranks.stacks[0].fd)
    texts = host.stacks(2, Event())
    assert set(texts) == {0, 1, 2}
    assert all("test_ranks_that_do_not_write" in text for text in texts.values())
    assert texts[0] == before, "who has written was not asked again"


def test_ranks_that_write_their_stacks_are_waited_for_until_the_session_ends(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_host, "OWN_STACKS_S", PATIENCE_S)
    monkeypatch.setattr(watch_host, "request_stacks", lambda *who: pytest.fail("everybody has answered"))
    host = ranks.seen_by(0)
    for board, stacks in zip(ranks.boards, ranks.stacks, strict=True):
        stacks.dump()
        board.put("dumped", 1)
    assert len(host.stacks(1, Event())) == 3
    monkeypatch.undo()
    monkeypatch.setattr(watch_host, "OWN_STACKS_S", PATIENCE_S)
    monkeypatch.setattr(watch_host, "ASKED_STACKS_S", PATIENCE_S)
    ended = Event()
    ended.set()
    began = time.monotonic()
    assert len(host.stacks(2, ended)) == 3
    assert time.monotonic() - began < PATIENCE_S


def test_who_looks_at_a_host_no_more_maps_no_page_of_it_and_keeps_its_own(ranks: Ranks) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:ringside-watch")

    gc.collect()  # boards of earlier tests
    before = mapped()
    host = ranks.seen_by(1)
    assert mapped() == before + 2
    host.close()
    assert mapped() == before
    assert host.standings(time.monotonic()) == []
    ranks.boards[1].entered(8)  # the training thread goes on


# ------------------------------------------------------------------------------------------------ whole watchers


class Job:
    """Two ranks' watchers, which look when they are told to; rank 0's events are collected."""

    def __init__(self, run: Path) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.run, self.steps = run, [0, 0]
        store = dist.HashStore()
        self.watches = [self._watch(store, rank) for rank in range(2)]
        for one in self.watches:
            assert one.met.wait(PATIENCE_S)
        self.now = time.monotonic()

    def _watch(self, store: Any, rank: int) -> watch.HangWatch:
        tell = (lambda kind, fields: self.told.append((kind, fields))) if rank == 0 else None
        path = self.run if rank == 0 else None
        found = watch.begin(store, rank, 2, step=lambda: self.steps[rank], path=path, put_event=tell)
        assert found is not None
        return found

    def look(self, *ranks: int, seconds: float = 1.0) -> None:
        """Let time pass, and then these ranks look."""
        self.now += seconds
        for rank in ranks:
            self.watches[rank].tick(self.now)

    def train(self, passes: int) -> None:
        for one in self.watches:
            for _ in range(passes):
                one.board.entered(4096)
                one.board.waiting()
                one.board.resumed()

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.told]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(watch, "TICK_S", 1e6)
    monkeypatch.setattr(watch, "LAST_LOOK_S", 0.0)
    monkeypatch.setattr(watch_host, "OWN_STACKS_S", 0.02)
    monkeypatch.setattr(watch_host, "ASKED_STACKS_S", 0.2)
    monkeypatch.delenv("RINGSIDE_LAUNCHED", raising=False)
    run = tmp_path / os.fsdecode(b"run-\xff\xfe-\xc3\xbc")  # a path need not be text
    run.mkdir()
    (run / "run.json").write_text("{}")
    made = Job(run)
    yield made
    for one in made.watches:
        one.end()


def test_a_rank_that_others_wait_for_is_told_of_once_with_all_stacks_and_again_when_it_goes_on(job: Job) -> None:
    job.train(3)
    job.steps = [7, 7]
    job.watches[0].board.entered(4096)
    job.watches[0].board.waiting()
    for _ in range(3):
        job.look(0, 1)
    assert job.told == []
    for _ in range(4):
        job.look(0, 1)
    assert job.kinds() == ["verdict", "stacks"]
    verdict = job.told[0][1]["verdict"]
    assert (verdict["kind"], verdict["ranks"], job.told[0][1]["step"]) == ("hang", [1], 7)
    assert job.told[1][1] == {
        "episode": 1, "ranks": [0, 1], "files": ["stacks/hang-1-rank-0.txt", "stacks/hang-1-rank-1.txt"],
    }  # fmt: skip
    for rank in range(2):
        assert "test_a_rank_that_others_wait_for" in (job.run / "stacks" / f"hang-1-rank-{rank}.txt").read_text()
        assert job.watches[rank].board.view(rank).number("dumped") == 1
    assert job.watches[0].board.view(0).number("episode") == 1
    job.watches[1].board.entered(4096)
    for one in job.watches:
        one.board.waiting()
        one.board.resumed()
    job.now = time.monotonic()
    job.look(0, 1, seconds=0.0)
    assert job.kinds() == ["verdict", "stacks", "repaired"]
    assert job.watches[0].board.view(0).number("episode") == 0
    for rank, one in enumerate(job.watches):
        assert os.fstat(one.stacks.fd).st_size == 0, f"the stacks of rank {rank}"
    job.watches[0].board.entered(4096)
    job.watches[0].board.waiting()
    for _ in range(7):
        job.look(0, 1)
    assert [fields.get("episode") for kind, fields in job.told if kind == "stacks"] == [1, 2]


def test_who_is_waited_for_before_it_is_called_a_hang_is_told_once_for_each_place(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job.train(1)  # so early a pass may take long
    place = watch.place_of(job.watches[0].training_thread)
    for told, where in enumerate(("train.py:9 in validate", "train.py:9 in validate", "train.py:30 in save")):
        monkeypatch.setattr(watch, "place_of", lambda thread, where=where: place._replace(where=where, call=""))
        job.watches[0].board.entered(4096)
        job.watches[0].board.waiting()
        for _ in range(9):
            job.look(0, 1)
        assert job.kinds() == ["waited_for"] * max(told, 1)
        assert job.told[-1][1]["where"] == where
        job.watches[0].board.resumed()
        job.watches[1].board.entered(4096)
        job.now = time.monotonic()
        job.look(0, 1, seconds=0.0)
    assert (job.told[0][1]["ranks"], job.told[0][1]["waiting"]) == ([1], [0])
    assert caplog.text.count("rank 1 is waited for: rank 0 waits in ") == 2


def events(run: Path) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_where_rank_0_does_not_look_rank_1_writes_it_into_the_run(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.train(3)
    job.watches[1].board.entered(4096)
    job.watches[1].board.waiting()
    for _ in range(7):
        job.look(1)
    assert job.told == []
    assert [event["kind"] for event in events(job.run)] == ["verdict", "stacks"]
    first = events(job.run)[0]
    assert (first["verdict"]["ranks"], first["unix"] > 1.7e9) == ([0], True)
    assert "rank 0" in caplog.text
    job.train(1)
    job.watches[0].board.put("beat_at", 0.0)  # its training goes on, and its watcher does not
    job.now = time.monotonic()
    job.look(1, seconds=0.0)
    assert [event["kind"] for event in events(job.run)] == ["verdict", "stacks", "repaired"]


def test_a_rank_that_takes_over_does_not_repeat_what_was_told(job: Job) -> None:
    job.train(3)
    job.watches[1].board.entered(4096)
    job.watches[1].board.waiting()
    for _ in range(7):
        job.look(0, 1)
    assert job.kinds() == ["verdict", "stacks"]
    for _ in range(9):
        job.look(1)
    assert events(job.run) == []


def test_a_launched_run_has_its_parent_to_print_verdicts_and_without_a_run_nothing_is_written(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RINGSIDE_LAUNCHED", "1")
    (job.run / "run.json").unlink()
    job.train(3)
    job.watches[1].board.entered(4096)
    job.watches[1].board.waiting()
    for _ in range(7):
        job.look(1)
    assert caplog.text == ""
    assert sorted(path.name for path in job.run.iterdir()) == []


def test_stacks_that_cannot_be_written_are_said_and_left_out(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    (job.run / "stacks").write_text("a file")
    job.train(3)
    job.watches[0].board.entered(4096)
    job.watches[0].board.waiting()
    for _ in range(7):
        job.look(0, 1)
    assert job.kinds() == ["verdict"]
    assert "the stacks of the hung ranks cannot be written" in caplog.text


def test_what_a_rank_says_of_itself(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    one = job.watches[0]
    page = one.board.view(0)
    sequence = [5]
    monkeypatch.setattr(one, "group", SimpleNamespace(_get_sequence_number_for_group=lambda: sequence[0]))
    one.board.entered(8)
    job.now, job.steps = time.monotonic(), [11, 0]
    job.look(0, seconds=0.1)
    assert (page.number("step"), page.number("beat_at"), page.text("where")) == (11, job.now, "")
    assert (page.number("group_seq"), page.number("group_moved_at")) == (5, job.now)
    job.look(0, seconds=0.5)
    assert page.number("group_moved_at") == job.now - 0.5
    job.look(0, seconds=0.4)  # it has stood still for a while: where is it?
    assert page.text("where").startswith("test_watch_turns.py:")
    assert page.text("call") == ""
    assert page.number("call_since") == 0.0
    place = watch.place_of(one.training_thread)._replace(call="barrier", size_bytes=48)
    monkeypatch.setattr(watch, "place_of", lambda thread: place if thread == one.training_thread else None)
    moved = page.number("group_moved_at")
    job.look(0, seconds=0.1)
    assert (page.text("call"), page.number("call_bytes"), page.number("call_since")) == ("barrier", 48, moved)
    sequence[0] = 6
    job.look(0, seconds=0.1)
    assert page.number("call_since") == 0.0
    monkeypatch.setattr(one, "group", None)  # it cannot tell
    job.look(0, seconds=0.1)
    assert page.number("group_seq") == 0


def test_gradients_that_nobody_waits_for_on_the_host_are_pending(job: Job) -> None:
    one, under_way = job.watches[0], [False]
    page = one.board.view(0)
    one.pending = lambda: under_way[0]
    one.board.entered(8)
    moved = page.number("moved_at")
    job.now = moved
    under_way[0] = True
    job.look(0, seconds=0.5)
    assert page.number("waiting_since") == 0.0
    job.look(0, seconds=0.5)
    assert page.number("waiting_since") == moved
    under_way[0] = False
    job.look(0, seconds=0.5)
    assert page.number("waiting_since") == 0.0
    one.board.waiting()  # by the hook: the watcher takes away only what it has said itself
    job.now = time.monotonic()
    job.look(0, seconds=0.1)
    assert page.number("waiting_since") > 0.0


def between_hosts(monkeypatch: pytest.MonkeyPatch, run: Path) -> Job:
    """Two watchers, each of which takes the other's host for another one."""
    keys = iter(("node-0", "node-1"))
    monkeypatch.setattr(watch, "host_key", lambda: next(keys))
    monkeypatch.setattr(watch, "OTHER_HOSTS_STACKS_S", 0.5)
    monkeypatch.setattr(watch_mail, "MAIL_S", 0.002)
    monkeypatch.setattr(watch_mail, "FRESH_S", 1e6)  # times that tests choose say nothing of a store that answers
    return Job(run)


def has_heard(one: watch.HangWatch) -> bool:
    return one.mail is not None and any(seen.entered >= 0 for seen in one.mail.others(time.monotonic()))


def test_between_hosts_the_first_one_speaks_and_the_other_hands_over_its_stacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(watch, "TICK_S", 1e6)
    monkeypatch.setattr(watch_host, "OWN_STACKS_S", 0.02)
    monkeypatch.setattr(watch_host, "ASKED_STACKS_S", 0.2)
    (tmp_path / "run.json").write_text("{}")
    job = between_hosts(monkeypatch, tmp_path)
    first, second = job.watches
    assert [one.mail is not None for one in job.watches] == [True, True]
    job.train(3)
    second.board.entered(4096)
    second.board.waiting()
    job.look(1)  # it has heard of nobody, and speaks for the job until it has
    until(lambda: has_heard(first))
    job.look(0)
    until(lambda: has_heard(second))
    assert first.mail is not None
    assert second.mail is not None
    mail = first.mail
    monkeypatch.setattr(mail, "silence_s", lambda now: 2.5)
    for _ in range(6):
        job.steps[1] += 1
        job.look(1)
        until(lambda: mail.others(job.now)[0].step == job.steps[1])
        job.look(0, seconds=0.0)
    assert job.kinds() == ["verdict", "stacks"]
    verdict = job.told[0][1]["verdict"]
    assert verdict["ranks"] == [0]
    assert verdict["cause"].endswith("; the job's store has not answered for 2.5 s")
    assert verdict["evidence"]["store_silent_seconds"] == 2.5
    assert events(tmp_path) == []
    until(lambda: second.mail is not None and second.mail.episode(0) == 1)
    job.look(1)
    assert second.board.view(1).number("episode") == second.board.view(1).number("dumped") == 1
    texts = mail.stacks(1, PATIENCE_S)
    assert list(texts) == [1]
    assert "test_between_hosts_the_first_one_speaks" in texts[1]
    for one in job.watches:
        one.end()
    assert job.kinds() == ["verdict", "stacks"]


def test_a_rank_that_failed_tells_why_before_it_ends(job: Job) -> None:
    from ringside.errors import MismatchError

    job.train(3)
    job.watches[0].board.entered(4096)
    job.watches[0].board.failed(MismatchError("rank 1 called another", (1,)))
    job.watches[0].end()
    assert job.kinds() == ["verdict"] or job.kinds() == ["verdict", "stacks"]
    assert job.told[0][1]["verdict"]["kind"] == "mismatch"
    job.watches[0].end()
    assert job.watches[0].board.fd == -1


def test_the_last_that_a_rank_shows_is_where_it_has_ended(job: Job) -> None:
    seen = ProgressView.of_process(0, os.getpid(), job.watches[0].board.fd)
    job.look(0)
    job.steps = [9, 0]
    job.watches[0].end()
    assert (seen.number("step"), seen.number("left")) == (9, 1)
    seen.close()


def test_the_end_in_good_order_is_no_verdict_and_is_said(job: Job) -> None:
    page = ProgressView.of_process(0, os.getpid(), job.watches[0].board.fd)
    job.train(3)
    job.watches[0].end()
    assert page.number("left") == 1
    page.close()
    assert job.told == []
    job.watches[1].end()
    assert events(job.run) == []


# ------------------------------------------------------------------------------------------------ beginning


@pytest.mark.parametrize(
    ("size", "environ", "watches"),
    [(1, "", False), (2, "off", False), (2, "0", False), (2, "OFF", False), (2, "on", True)],
)
def test_a_watch_is_for_jobs_of_several_ranks_that_want_it(
    monkeypatch: pytest.MonkeyPatch, size: int, environ: str, watches: bool
) -> None:
    monkeypatch.setenv("RINGSIDE_WATCH", environ)
    found = watch.begin(dist.HashStore(), 0, size, step=lambda: 0, path=None, put_event=None)
    assert (found is not None) is watches
    if found is not None:
        found.end()


def test_a_watch_that_cannot_be_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def breaks(**_: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(watch, "ProgressPage", breaks)
    assert watch.begin(dist.HashStore(), 0, 2, step=lambda: 0, path=None, put_event=None) is None
    assert "hangs are not watched for here (OSError: no memory); training goes on" in caplog.text


def test_ranks_that_never_come_are_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(watch, "HELLO_S", 0.05)
    monkeypatch.setattr(watch, "TICK_S", 1e6)
    store = dist.HashStore()
    last = watch.begin(store, 2, 3, step=lambda: 0, path=None, put_event=None)
    first = watch.begin(store, 0, 3, step=lambda: 0, path=tmp_path, put_event=lambda kind, fields: None)
    assert first is not None
    assert last is not None
    assert first.met.wait(PATIENCE_S)
    assert last.met.wait(PATIENCE_S)
    assert [hello.rank for hello in last.hellos] == [0, 2]
    assert last.path == tmp_path
    assert first.mail is None, "they are on one host"
    alone = watch.begin(dist.HashStore(), 1, 2, step=lambda: 0, path=None, put_event=None)
    assert alone is not None
    for one in (alone, first, last):
        one.end()  # also while it waits for rank 0
    assert not alone.met.is_set()


def test_a_rank_that_is_late_and_alone_on_its_host_watches_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "HELLO_S", 0.0)
    monkeypatch.setattr(watch, "TICK_S", 1e6)
    store = dist.HashStore()
    first = watch.begin(store, 0, 2, step=lambda: 0, path=tmp_path, put_event=lambda kind, fields: None)
    assert first is not None
    assert first.met.wait(PATIENCE_S)
    monkeypatch.setattr(watch, "host_key", lambda: "another host")
    late = watch.begin(store, 1, 2, step=lambda: 0, path=None, put_event=None)
    assert late is not None
    assert late.met.wait(PATIENCE_S), caplog.text
    assert [hello.rank for hello in late.hellos] == [0]
    assert late.mail is not None
    for one in (first, late):
        one.end()
    assert not caplog.text
