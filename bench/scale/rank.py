"""One rank of a job of `job.py`: a real session, told by a sleeping training loop what happens when."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from bench.scale.shared import Shared
from torch.distributed import TCPStore
from torch.testing._internal.distributed import fake_pg

from ringside.monitor.step_clock import SyncTimes
from ringside.monitor.verdict import Verdict
from ringside.pytorch.recording import session as sessions
from ringside.pytorch.recording.settings import RecordingSettings

assert fake_pg  # importing it is what makes the "fake" backend known

# Set in the ranks alone, after the fork.
SETTINGS = {
    "RINGSIDE_WATCH": "off",  # a thousand ranks of one host would map each other's pages; real ones are few
    "RINGSIDE_LAUNCHED": "1",  # whoever launched it tells verdicts
    "RES_OPTIONS": "timeout:1 attempts:1",  # torch asks DNS for the name of every connection's other end
}

# How long ranks may take to join and to leave.
SETTLE_S = 240.0

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Job:
    """What the ranks do.

    Args:
        own_s: Own time of every rank in every step, float64 [steps, ranks], seconds.
        wire_s: What the synchronisation takes once all have arrived, seconds.
        real_clock: Step clocks read the machine's clock, and own times hold what its scheduler adds; otherwise they
            read the moments at which things would have happened had each rank had a machine of its own.
        payload_bytes, collectives: Of each step's synchronisation.
    """

    own_s: Floats
    wire_s: float = 0.005
    real_clock: bool = False
    payload_bytes: int = 100 << 20
    collectives: int = 4

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.own_s)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return int(self.own_s.shape[1])

    @property
    def ends_s(self) -> Floats:
        """When each step ends, float64 [steps], seconds after the start: all wait for the slowest."""
        ends: Floats = np.cumsum(self.own_s.max(axis=1) + self.wire_s)
        return ends


@dataclass(frozen=True)
class Heard:
    """A verdict as it reached a listener on rank 0, and how far the job was.

    Args:
        kind, ranks, since_step, detected_step, excess_ratio: Of the verdict.
        sent_steps: Steps that the fastest rank had finished at that moment.
    """

    kind: str
    ranks: list[int]
    since_step: int
    detected_step: int
    excess_ratio: float
    sent_steps: int


def be_rank(job: Job, rank: int, run_dir: Path, shared: Shared) -> None:
    """Do what a rank does, from joining to leaving; the first that fails says why."""
    os.environ.update(SETTINGS)
    try:
        shared.begin.forked()
        shared.leave.forked()
        while not shared.port[0]:
            time.sleep(0.05)
        store = TCPStore("127.0.0.1", int(shared.port[0]), None, False, timedelta(seconds=SETTLE_S))
        dist.init_process_group("fake", store=store, rank=rank, world_size=job.ranks)
        session = sessions.begin(run_dir, "native", RecordingSettings(hello_s=SETTLE_S, goodbye_s=SETTLE_S))
        if rank == 0:
            _listen(session, run_dir, shared)
        shared.ready[rank] = 1
        shared.begin.wait()
        for step in _steps(job, rank, session, float(shared.start[0])):
            shared.sent[rank] = step + 1
        shared.leave.wait()
        session.end()
        shared.messages[rank], shared.bytes[rank] = session.outbox.messages, session.outbox.sent_bytes
    except BaseException:
        if not shared.failed.any():
            traceback.print_exc()
        shared.failed[rank] = 1


def sleep_until(when: float) -> None:
    """Sleep until a moment of the monotonic clock."""
    while (left := when - time.monotonic()) > 0:
        time.sleep(left)


def _listen(session: sessions.Session, run_dir: Path, shared: Shared) -> None:
    """On rank 0, note verdicts as they come, and how far the collector is after every batch."""
    heard = (run_dir / "heard").open("a", buffering=1)

    def note(verdict: Verdict) -> None:
        parts = (verdict.kind, verdict.ranks, verdict.since_step, verdict.detected_step, verdict.excess_ratio)
        heard.write(json.dumps(asdict(Heard(*parts, sent_steps=int(shared.sent.max())))) + "\n")

    session.on_verdict(note)
    assert session.rank0 is not None
    chief, collector = session.rank0, session.rank0.collector
    add, write_end = collector.add, chief.write_end

    def added(records: Any) -> Any:
        events, before = add(records), int(shared.completed[0])
        shared.completed[0], shared.late[0] = collector.steps, collector.late
        if collector.steps > before:
            shared.complete_us[0] = int(1e6 * (time.monotonic() - float(shared.start[0])))
        return events

    def written() -> None:
        shared.completed[0], shared.late[0] = collector.steps, collector.late
        began = time.process_time()
        write_end()
        shared.finish_us[0] = int(1e6 * (time.process_time() - began))

    collector.add, chief.write_end = added, written  # type: ignore[method-assign]


def _steps(job: Job, rank: int, session: sessions.Session, start: float) -> Iterator[int]:
    """Make the job's steps, yielding the number of each when it has ended."""
    clock, own_s, ends, slowest = session.clock, job.own_s[:, rank].tolist(), job.ends_s.tolist(), job.own_s.max(axis=1)
    now = _Now(job.real_clock)
    clock.now = now
    sleep_until(start)
    now.at = start
    clock.restart()
    for step, own in enumerate(own_s):
        began = start + (ends[step - 1] if step else 0.0)
        clock.forward_begins(samples=32)
        now.sleep_until(began + own / 3)
        clock.forward_ends()
        now.sleep_until(began + own)
        clock.backward_ends()
        now.sleep_until(start + ends[step])
        wait = float("nan") if job.real_clock else float(slowest[step]) - own
        times = SyncTimes(float(slowest[step]) - own + job.wire_s, job.wire_s, wait, job.payload_bytes, job.collectives)
        clock.sync_ends(lambda times=times: lambda: times)  # type: ignore[misc]
        clock.optimizer_begins()
        clock.optimizer_ends()
        sleep_until(start + ends[step])
        yield step


class _Now:
    """A clock for a step clock: the machine's, or one that stands where the job is said to be."""

    def __init__(self, real: bool) -> None:
        self._real, self.at = real, 0.0

    def __call__(self) -> float:
        return time.monotonic() if self._real else self.at

    def sleep_until(self, when: float) -> None:
        """Really sleep; or only say that it is later now, for nothing would happen in between."""
        if self._real:
            sleep_until(when)
        self.at = when
