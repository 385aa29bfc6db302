"""A training job of many processes whose compute is slept, watched by the real monitor.

Every rank is a process, forked from one parent, with a real `ringside.pytorch.recording.session.Session`: its step
clock, its thread, its outbox into a real `TCPStore`; rank 0's collects, judges and writes the run. Only gradients are
missing: the process group is torch's "fake" one, and ranks sleep until the moment at which a synchronous job would have
finished the step. The parent keeps the store, so that its share is measured by itself.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
from bench.common import resident_bytes
from bench.scale.rank import SETTLE_S, Heard, Job, be_rank, sleep_until
from bench.scale.shared import Shared
from torch.distributed import TCPStore

from ringside.bench.plan import free_memory_bytes
from ringside.errors import RingsideError
from ringside.monitor.run.directory import STEPS
from ringside.processes import die_with_parent, read_stat

LEAST_FREE_BYTES = 2 << 30  # of memory; with less the machine would kill processes by its own choice
# Steps before anything is measured: connections, first allocations, pages that processes share until they write.
WARM_STEPS = 4

SAMPLE_S = 0.25  # between two looks at how far the collector is
SAMPLED_RANKS = 16  # whose CPU and memory are looked at, beside rank 0
CATCH_UP_S = 60.0  # at most, from the last step until the collector has all


@dataclass
class Outcome:
    """What a job showed; seconds, bytes, and CPU as shares of one core.

    Args:
        ranks, steps: Of the job.
        verdicts: In the order in which they came.
        completed: Steps the collector had completed in the end.
        late: Records that came after their step was completed.
        records: Records in the run directory.
        start_s: Until all ranks had joined.
        steps_per_s: Steps completed per second, from the end of the warm-up until the collector had all.
        lag_steps: Steps finished by the fastest rank minus steps completed, sampled from the warm-up on.
        catch_up_s: From the end of the last step until the collector had all but it (a rank sends a step's record when
            the next begins, and the last one when it ends).
        chief_cpu: CPU of rank 0's process, the monitor and everything else in it.
        chief_rss_bytes: Its resident memory in the end; `chief_grown_bytes` is what came of it since the warm-up.
        store_cpu: CPU of the process that keeps the store.
        rank_cpu: Mean CPU of a few other ranks; `rank_pss_bytes` their mean proportional memory.
        messages, bytes: Sent by all ranks.
        written_bytes: Length of `steps.jsonl`.
        finish_s: CPU seconds rank 0 needed for the summary and the report.
    """

    ranks: int
    steps: int
    verdicts: list[Heard] = field(default_factory=list)
    completed: int = 0
    late: int = 0
    records: int = 0
    start_s: float = 0.0
    steps_per_s: float = 0.0
    lag_steps: list[int] = field(default_factory=list)
    catch_up_s: float = 0.0
    chief_cpu: float = 0.0
    chief_rss_bytes: int = 0
    chief_grown_bytes: int = 0
    store_cpu: float = 0.0
    rank_cpu: float = 0.0
    rank_pss_bytes: int = 0
    messages: int = 0
    bytes: int = 0
    written_bytes: int = 0
    finish_s: float = 0.0

    @property
    def missing(self) -> int:
        """Records that did not arrive."""
        return self.ranks * self.steps - self.records


def run(job: Job, run_dir: Path, *, tell: Callable[[str], None] = lambda _: None) -> Outcome:
    """Run a job to its end and return what it showed.

    Args:
        job: What the ranks do.
        run_dir: Where rank 0 writes the run.
        tell: Told how far it is.

    Raises:
        RingsideError: There is not enough memory for so many processes, or ranks failed.
    """
    shared, outcome, pids = Shared(job.ranks), Outcome(job.ranks, job.steps), list[int]()
    began = time.monotonic()
    gc.collect()
    gc.freeze()  # what is shared with the parent stays shared
    try:
        # All ranks are forked before this process has any thread; then the store, whose port they wait for.
        for rank in range(job.ranks):
            _check_memory(rank, job.ranks)
            if pid := os.fork():
                pids.append(pid)
                continue
            try:  # the child: it dies with its parent, and never returns into the parent's code
                die_with_parent()
                be_rank(job, rank, run_dir, shared)
            finally:
                sys.stderr.flush()
                os._exit(0)
        tell(f"{job.ranks} processes after {time.monotonic() - began:.1f} s")
        store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=SETTLE_S), wait_for_workers=False)
        shared.port[0] = store.port
        deadline = time.monotonic() + SETTLE_S
        while not shared.ready.all():
            if shared.failed.any() or time.monotonic() > deadline:
                late = np.flatnonzero(shared.ready == 0)
                raise RingsideError(
                    f"{len(late)} of {job.ranks} ranks did not join within {SETTLE_S:.0f} s (first: {late[0]})"
                )
            _check_memory(0, job.ranks)
            time.sleep(0.05)
        outcome.start_s = time.monotonic() - began
        tell(f"all joined after {outcome.start_s:.1f} s")
        # They begin at an agreed time, and leave together when the collector has what they sent.
        shared.start[0] = time.monotonic() + 0.5 + job.ranks / 2_000
        shared.begin.open()
        _observe(job, shared, pids, outcome)
        shared.leave.open()
        deadline = time.monotonic() + SETTLE_S
        while pids and time.monotonic() < deadline:
            pids[:] = [pid for pid in pids if not os.waitpid(pid, os.WNOHANG)[0]]
            time.sleep(0.02)
        del store
    finally:
        gc.unfreeze()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # nobody has waited for them yet, so they are still ours
        for pid in pids:
            os.waitpid(pid, 0)
        shared.begin.open()
        shared.leave.open()
    if shared.failed.any():
        raise RingsideError(f"{int(shared.failed.sum())} of {job.ranks} ranks failed; the first says why on stderr")
    # What ranks counted, and what rank 0 wrote.
    outcome.completed, outcome.late = int(shared.completed[0]), int(shared.late[0])
    outcome.messages, outcome.bytes = int(shared.messages.sum()), int(shared.bytes.sum())
    outcome.finish_s = float(shared.finish_us[0]) / 1e6
    written = (run_dir / STEPS).read_bytes()
    outcome.written_bytes, outcome.records = len(written), written.count(b"\n")
    outcome.verdicts = [Heard(**json.loads(line)) for line in (run_dir / "heard").read_text().splitlines()]
    return outcome


def _check_memory(rank: int, ranks: int) -> None:
    if rank % 32:  # asking costs as much as a fork
        return
    free = free_memory_bytes()
    if free < LEAST_FREE_BYTES:
        raise RingsideError(
            f"{rank} of {ranks} processes have left {free >> 20} MB of memory free: use fewer --ranks, or a machine "
            "with more memory"
        )


def _observe(job: Job, shared: Shared, pids: list[int], outcome: Outcome) -> None:
    """Look at the job while it makes steps, and wait until the collector has all of them."""
    start, ends = float(shared.start[0]), job.ends_s
    others = pids[1 :: max(1, (job.ranks - 1) // SAMPLED_RANKS)][:SAMPLED_RANKS]
    watched = [pids[0], os.getpid(), *others]
    sleep_until(start + ends[min(WARM_STEPS, job.steps // 2)])
    completed, rss, began, before = int(shared.completed[0]), resident_bytes(pids[0]), time.monotonic(), _cpu(watched)
    while time.monotonic() < start + ends[-1] and not shared.failed.any():
        sleep_until(min(time.monotonic() + SAMPLE_S, start + ends[-1]))
        outcome.lag_steps.append(int(shared.sent.max() - shared.completed[0]))
    ended, after = time.monotonic(), _cpu(watched)
    shares = [(b - a) / (ended - began) for a, b in zip(before, after, strict=True)]
    outcome.chief_cpu, outcome.store_cpu = shares[:2]
    outcome.rank_cpu = float(np.mean(shares[2:])) if others else 0.0
    # Until the collector has all steps but the last, whose record ranks only send when they end.
    deadline = time.monotonic() + CATCH_UP_S
    while shared.completed[0] < job.steps - 1 and time.monotonic() < deadline and not shared.failed.any():
        time.sleep(0.01)
    done = start + float(shared.complete_us[0]) / 1e6
    outcome.catch_up_s = max(done - ended, 0.0)
    outcome.steps_per_s = (int(shared.completed[0]) - completed) / max(done - began, 1e-9)
    if others:
        pages = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in others]
        outcome.rank_pss_bytes = int(np.mean([1024 * int(text.split("\nPss:")[1].split()[0]) for text in pages]))
    outcome.chief_rss_bytes = resident_bytes(pids[0])
    outcome.chief_grown_bytes = outcome.chief_rss_bytes - rss


def _cpu(pids: list[int]) -> list[float]:
    """CPU seconds of processes so far, all their threads."""
    stats = {pid: read_stat(pid) for pid in pids}
    if gone := [pid for pid, stat in stats.items() if stat is None]:
        raise SystemExit(f"processes {gone} of the job have ended")
    return [stat.cpu_s for stat in stats.values() if stat is not None]
