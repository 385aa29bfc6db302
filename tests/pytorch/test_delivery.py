"""Step records on their way to rank 0, over every kind of store."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from ringside.monitor import StepRecord  # noqa: E402
from ringside.pytorch.recording import record_transport as delivery  # noqa: E402
from ringside.pytorch.recording.record_transport import RecordReceiver, RecordSender, batch_seconds, can_append  # noqa: E402

RANKS = 70  # more than two boxes


@pytest.fixture(autouse=True, params=[0, 600], ids=["emptied", "kept"])
def emptied_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Empty boxes at once, or only once something has gathered in them."""
    monkeypatch.setattr(delivery, "EMPTIED_BYTES", request.param)
    return int(request.param)


KINDS = ("tcp", "hash", "file")


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    if request.param == "tcp":
        inner: dist.Store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    elif request.param == "hash":
        inner = dist.HashStore()
    else:
        inner = dist.FileStore(str(tmp_path / "store"), 1)
    assert can_append(inner) == (request.param != "file")
    return dist.PrefixStore("session/1", inner)


@pytest.fixture
def appending() -> dist.Store:
    return dist.PrefixStore("session/1", dist.HashStore())


def record(step: int, rank: int) -> StepRecord:
    return StepRecord(step=step, rank=rank, ended_unix=1.5, step_seconds=0.1, own_seconds=0.1)


def test_every_record_arrives_once_and_in_its_ranks_order(store: dist.Store) -> None:
    outboxes = [RecordSender(store, rank) for rank in range(RANKS)]
    inbox = RecordReceiver(store, RANKS)
    assert inbox.poll() == []
    arrived: list[StepRecord] = []
    for turn in range(6):
        for rank, outbox in enumerate(outboxes):
            if (turn + rank) % 3:
                outbox.send([record(2 * turn, rank), record(2 * turn + 1, rank)])
        arrived += inbox.poll() if turn % 2 else []
    arrived += inbox.poll()
    assert len(arrived) == 2 * 6 * RANKS * 2 // 3
    for rank in range(RANKS):
        steps = [one.step for one in arrived if one.rank == rank]
        assert steps == sorted(set(steps))
    assert inbox.poll() == []


def test_the_inbox_is_open_until_every_rank_has_said_that_nothing_more_will_come(store: dist.Store) -> None:
    inbox = RecordReceiver(store, 3)
    outboxes = [RecordSender(store, rank) for rank in range(3)]
    outboxes[1].send([])
    outboxes[2].send([record(0, 2)])
    assert (inbox.poll(), bool(inbox.open)) == ([record(0, 2)], True)
    outboxes[2].send([])
    outboxes[0].send([])
    assert (inbox.poll(), bool(inbox.open)) == ([], False)


def test_records_that_were_sent_before_rank_0_was_there_are_kept(store: dist.Store) -> None:
    RecordSender(store, 1).send([record(0, 1)])
    assert RecordReceiver(store, 2).poll() == [record(0, 1)]


def test_an_outbox_counts_what_it_sends(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "BATCH_RECORDS", 4)
    outbox, inbox = RecordSender(store, 0), RecordReceiver(store, 1)
    records = [record(step, 0) for step in range(10)]
    outbox.send(records)
    assert outbox.messages == 3
    assert outbox.sent_bytes > 10 * 20
    assert inbox.poll() == records
    assert inbox.open


class FilledMeanwhile:
    """A store to which others add just before it is asked to empty a box."""

    def __init__(self, store: dist.Store, fill: Callable[[], object]) -> None:
        self._store, self._fill = store, fill

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def compare_set(self, *asked: Any) -> Any:
        self._fill()
        return self._store.compare_set(*asked)


def test_what_comes_into_a_box_while_it_is_emptied_is_read_next(
    appending: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is asked to empty a box that holds more by then: nothing is lost, and nothing comes twice."""
    monkeypatch.setattr(delivery, "EMPTIED_BYTES", 0)
    outbox = RecordSender(appending, 0)
    late = iter([[record(1, 0)], [record(2, 0)], [record(3, 0)]])
    fill = lambda: [outbox.send(batch) for batch in itertools.islice(late, 1)]  # noqa: E731
    inbox = RecordReceiver(FilledMeanwhile(appending, fill), 1)  # type: ignore[arg-type]
    outbox.send([record(0, 0)])
    assert [one.step for _ in range(5) for one in inbox.poll()] == [0, 1, 2, 3]
    assert appending.get("box/0") == b""


def test_boxes_that_many_threads_fill_lose_nothing() -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    inbox = RecordReceiver(dist.PrefixStore("p", server), 8)

    def fill(rank: int) -> None:
        outbox = RecordSender(dist.PrefixStore("p", dist.TCPStore("127.0.0.1", server.port, None, False)), rank)
        for step in range(300):
            outbox.send([record(step, rank)])
        outbox.send([])

    threads = [threading.Thread(target=fill, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    arrived: list[StepRecord] = []
    for _ in range(100_000):
        arrived += inbox.poll()
        if not inbox.open:
            break
    for thread in threads:
        thread.join(10)
    assert [sum(one.rank == rank for one in arrived) for rank in range(8)] == [300] * 8
    assert sorted((one.rank, one.step) for one in arrived) == [(rank, step) for rank in range(8) for step in range(300)]


def test_a_box_too_full_to_be_compared_is_thrown_away_once_read(
    appending: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "BOX_BYTES", 1_000)
    outbox, inbox = RecordSender(appending, 0), RecordReceiver(appending, 1)
    records = [record(step, 0) for step in range(50)]
    outbox.send(records)
    assert inbox.poll() == records
    assert appending.get("box/0") == b""
    outbox.send([record(50, 0)])
    assert inbox.poll() == [record(50, 0)]


def test_of_many_ranks_each_sends_less_often() -> None:
    assert [batch_seconds(ranks) for ranks in (1, 128, 256, 512, 1024, 100_000)] == [0.25, 0.25, 0.25, 0.5, 1.0, 1.0]


def test_a_damaged_batch_costs_only_itself(store: dist.Store, caplog: pytest.LogCaptureFixture) -> None:
    inbox = RecordReceiver(store, 2)
    first, second = RecordSender(store, 0), RecordSender(store, 1)
    first.post(b"\xc1 no msgpack")
    second.send([record(0, 1)])
    first.send([record(1, 0)])
    assert sorted(inbox.poll(), key=lambda one: one.rank) == [record(1, 0), record(0, 1)]
    assert "rank 0 are damaged" in caplog.text
