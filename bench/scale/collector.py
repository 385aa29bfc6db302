"""What the monitor takes in a second without any store: decoding, collector with all watchers, writer; one process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from ringside.monitor import RunInfo, StepRecord
from ringside.monitor.collector import StepCollector
from ringside.monitor.run.directory import RunWriter
from ringside.monitor.run.records import SCHEMA

PAYLOAD_BYTES = 100 << 20  # of a step's gradients, as recorded; none are sent


@dataclass(frozen=True)
class Alone:
    """How much one process takes; CPU seconds.

    Args:
        ranks, steps: Of the job.
        decode_s: Per record, from the bytes of a message.
        collect_s: Per record, to completed, judged and written.
        records_per_s: Records per second of CPU, both together.
    """

    ranks: int
    steps: int
    decode_s: float
    collect_s: float
    records_per_s: float


def alone(own_s: np.ndarray, run_dir: Path) -> Alone:
    """Feed a job's records to a collector, one message per rank and step, as fast as it takes them.

    Args:
        own_s: Own times, float64 [steps, ranks], seconds.
        run_dir: Where the run is written.
    """
    steps, ranks = own_s.shape
    info = RunInfo(
        schema=SCHEMA,
        name="alone",
        started_unix=time.time(),
        command=[],
        world_size=ranks,
        hosts=[""] * ranks,
        pids=[0] * ranks,
        engine="native",
    )
    collector = StepCollector(ranks, RunWriter(run_dir, info))
    decode, decoder = 0.0, msgspec.msgpack.Decoder(list[StepRecord])
    began = time.process_time()
    encoding = 0.0
    for step, row in enumerate(own_s.tolist()):
        before = time.process_time()
        messages = [msgspec.msgpack.encode([record(step, rank, own, max(row))]) for rank, own in enumerate(row)]
        encoding += time.process_time() - before
        before = time.process_time()
        arrived = [one for message in messages for one in decoder.decode(message)]
        decode += time.process_time() - before
        collector.add(arrived)
    seconds, count = time.process_time() - began - encoding, steps * ranks
    return Alone(ranks, steps, decode / count, (seconds - decode) / count, count / seconds)


def record(step: int, rank: int, own: float, slowest: float) -> StepRecord:
    """Return what a rank records of a step in which it worked for `own` seconds and the slowest for `slowest`."""
    wait = slowest - own
    return StepRecord(
        step=step,
        rank=rank,
        ended_unix=time.time(),
        step_seconds=slowest + 0.005,
        own_seconds=own,
        wait_seconds=wait,
        exposed_seconds=wait + 0.005,
        sync_seconds=wait + 0.005,
        wire_seconds=0.005,
        forward_seconds=own / 3,
        backward_seconds=own * 2 / 3,
        cpu_seconds=own,
        samples=32,
        payload_bytes=PAYLOAD_BYTES,
        collectives=4,
        overhead_seconds=1e-5,
    )
