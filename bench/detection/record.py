"""Record own times of real jobs, healthy and with a real fault, as the noise that the detector is judged on.

One session is a list of short jobs, drawn from a seed: 2, 4 or 8 ranks on two cores; a GPT, a perceptron of several
layers, or a model that waits as the host of an accelerator does; over Gloo or Ringside's engine; quiet, beside one or
two busy loops, under a CPU quota, or two jobs side by side. One job in four has a fault: one rank does 12 to 50% more
work from a random step on, or its input takes longer. A job is watched as any job is; its step records become arrays.

    python -m bench.detection.record --out runs/noise/a.npz --minutes 20 --cores 0,1 --seed 7

Which session is for tuning and which for scoring is fixed in `sessions.toml`, before it is looked at.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from bench.common import make_parser, module_command, process_group
from numpy.typing import NDArray

LOG_STEP = 0.005
"""Times are kept as integers on a logarithmic scale of that step, from a microsecond on; 0: none."""
PHASES = ("own", "data", "forward", "backward", "optimizer", "cpu", "step", "run_delay")
VITALS = ("seconds", "ran_seconds", "waited_seconds", "throttled_seconds", "steal_ratio", "preemptions")
LIMIT_S = 240.0
MESSAGES = "messages"
"""What the ranks of a job write to stderr."""


class Job(msgspec.Struct, frozen=True):
    """One job of a session.

    Args:
        ranks: How many.
        model: gpt, mlp or waiting.
        engine: gloo (only watched) or ringside.
        load: quiet, busy 1, busy 2, quota or pair.
        seconds: How long it trains, about.
        fault: As `ringside.faults` writes them; "": none.
    """

    ranks: int
    model: str
    engine: str
    load: str
    seconds: float
    fault: str = ""


def encode(seconds: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Return times on the logarithmic scale, uint16 of the same shape."""
    with np.errstate(all="ignore"):
        codes = np.round(np.log(seconds * 1e6) / np.log1p(LOG_STEP))
    return np.where(np.isfinite(codes), np.clip(codes, 1, 65535), 0).astype(np.uint16)


def decode(codes: NDArray[np.uint16]) -> NDArray[np.float64]:
    """Return the times, seconds; 0 where there is none."""
    return np.where(codes > 0, np.exp(codes * np.log1p(LOG_STEP)) * 1e-6, 0.0)


# ------------------------------------------------------------------------------------------------ on a rank


@process_group()
def train(job: Job, run_dir: str) -> None:
    """Train as one rank until the time is over."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import ringside
    from ringside.demo.model import ByteGPT, Size
    from ringside.faults.inject import inject, parse_fault

    rank = dist.get_rank()
    torch.manual_seed(0)
    crowd = max(job.ranks // 2, 1)
    if job.model == "gpt":
        size = Size(width=96, layers=3, heads=4, context=64, batch=max(4 // crowd, 1))
        model: Any = ByteGPT(size)
        inputs = torch.randint(0, 256, (8, size.batch, size.context + 1))
    else:
        width, layers = (512, 4) if job.model == "mlp" else (64, 2)
        batch = max(96 // crowd, 8) if job.model == "mlp" else 4
        model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)])
        inputs = torch.randn(8, batch, width)
        if job.model == "waiting":
            model.register_forward_pre_hook(lambda *_: time.sleep(0.02))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    engine = "native" if job.engine == "gloo" else "ringside"
    session = ringside.attach(ddp, engine=engine, run_dir=run_dir, digest_every=0).session
    assert session is not None
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4)
    injector = inject(parse_fault(job.fault, job.ranks) if job.fault else None, model, rank)
    generator = np.random.default_rng(rank)
    ends = torch.zeros(1)
    deadline = time.monotonic() + job.seconds
    step = 0
    while True:
        injector.step(step)
        time.sleep(0.0003 * generator.random())  # a loader that hands on what it has ready
        batch = inputs[step % 8]
        optimizer.zero_grad()
        loss = ddp(batch).float().mean() if job.model != "gpt" else ddp(batch)
        loss.backward()
        optimizer.step()
        step += 1
        if step % 64 == 0:  # rank 0's clock decides, seldom
            ends[0] = float(time.monotonic() > deadline)
            dist.broadcast(ends, 0)
            if ends[0]:
                break
    session.end()


# ------------------------------------------------------------------------------------------------ the session


def jobs(rng: np.random.Generator, seconds: float) -> Iterator[Job]:
    """Yield jobs for ever, each kind of load in turn."""
    number = 0
    while True:
        for load in ("quiet", "busy 1", "busy 2", "quota", "pair"):
            ranks = int(rng.choice([2, 2, 2, 4, 8]))
            model = str(rng.choice(["gpt", "mlp", "waiting"]))
            engine = str(rng.choice(["gloo", "ringside"]))
            fault = ""
            if number % 4 == 3:
                rank, begin = int(rng.integers(ranks)), int(rng.integers(80, 200))
                fault = f"slow:rank={rank},factor={rng.choice([1.12, 1.3, 1.5])},from_step={begin}"
                if rng.random() < 0.25:
                    fault = f"input:rank={rank},seconds={rng.integers(3, 12) / 1000},from_step={begin}"
            number += 1
            yield Job(ranks, model, engine, load, seconds, fault)


@contextlib.contextmanager
def loaded(load: str, cores: list[int]) -> Iterator[str]:
    """Have that load beside what runs inside; yield the directory of a cgroup to join, "" for none."""
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=lambda: os.sched_setaffinity(0, cores))
        for _ in range(int(load[5:]) if load.startswith("busy") else 0)
    ]
    group = make_quota(1.6) if load == "quota" else ""
    try:
        yield group
    finally:
        for process in busy:
            process.kill()
            process.wait()
        if group:
            with contextlib.suppress(OSError):
                Path(group).rmdir()


def make_quota(cpus: float) -> str:
    """Make a cgroup (v1 or v2) that may use so many CPUs; "" where that is not allowed."""
    name = f"ringside-noise-{os.getpid()}"
    with contextlib.suppress(OSError):
        for root, file, text in (
            ("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", f"{int(cpus * 100_000)}"),
            ("/sys/fs/cgroup", "cpu.max", f"{int(cpus * 100_000)} 100000"),
        ):
            if os.path.exists(f"{root}/cgroup.procs"):
                os.mkdir(f"{root}/{name}")
                Path(f"{root}/{name}/{file}").write_text(text)
                return f"{root}/{name}"
    return ""


def start(job: Job, run_dir: Path, cores: list[int], group: str, port: int) -> list[Any]:
    """Start the ranks of a job."""

    def settle() -> None:
        os.sched_setaffinity(0, cores)
        if group:
            Path(f"{group}/cgroup.procs").write_text(str(os.getpid()))

    command = module_command("bench.detection.record", "--rank", msgspec.json.encode(job).decode(), str(run_dir))
    shared = {"WORLD_SIZE": str(job.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = []
    for rank in range(job.ranks):
        with (run_dir.parent / MESSAGES).open("ab") as messages:
            environ = {**os.environ, **shared, "RANK": str(rank)}
            ranks.append(
                subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=messages, preexec_fn=settle)
            )
    return ranks


def run(job: Job, cores: list[int], folder: Path, port: int) -> list[dict[str, Any]]:
    """Run a job under its load; return its arrays, and those of the one beside it.

    Raises:
        RuntimeError: A rank failed.
    """
    beside = [job, msgspec.structs.replace(job, fault="")] if job.load == "pair" else [job]
    with loaded(job.load, cores) as group:
        if job.load == "quota" and not group:
            print("left out: no cgroup with a quota may be made here", file=sys.stderr, flush=True)
            return []
        started = [start(each, folder / str(number), cores, group, port + number) for number, each in enumerate(beside)]
        try:
            deadline = time.monotonic() + LIMIT_S
            for process in [process for ranks in started for process in ranks]:
                if process.wait(max(deadline - time.monotonic(), 1.0)):
                    raise RuntimeError(f"{job}: {(folder / MESSAGES).read_text()[-800:]}")
        finally:
            for process in [process for ranks in started for process in ranks]:
                process.kill()
                process.wait()
    return [arrays(each, folder / str(number)) for number, each in enumerate(beside)]


def arrays(job: Job, run_dir: Path) -> dict[str, Any]:
    """Return a run's times, uint16 [phases, steps, ranks], and vitals, float32 [rows, 2 + VITALS]: step, rank, ..."""
    from ringside.monitor.run.directory import decode_record

    found = [decode_record(line) for line in (run_dir / "steps.jsonl").read_bytes().splitlines()]
    records = [record for record in found if record is not None]
    last = max(record.step for record in records)
    times = np.zeros((len(PHASES), last + 1, job.ranks))
    vitals = []
    for record in records:
        times[:, record.step, record.rank] = [getattr(record, f"{phase}_seconds") for phase in PHASES]
        if record.vitals is not None:
            row = [getattr(record.vitals, name) for name in VITALS]
            vitals.append([record.step, record.rank, *(np.nan if value is None else value for value in row)])
    return {
        "job": msgspec.json.encode(job).decode(),
        "times": encode(times),
        "vitals": np.array(vitals, dtype=np.float32).reshape(-1, 2 + len(VITALS)),
    }


def main() -> None:
    """Record one session."""
    parser = make_parser("bench.detection.record", __doc__)
    parser.add_argument("--out", type=Path, help="the file to write")
    parser.add_argument("--minutes", type=float, default=20.0, help="how long (default: 20)")
    parser.add_argument("--seconds", type=float, default=40.0, help="of one job (default: 40)")
    parser.add_argument("--cores", type=cores_of, metavar="N,N", help="such as 0,1 (default: the first two)")
    parser.add_argument("--seed", type=int, default=0, help="draws the jobs")
    parser.add_argument("--port", type=int, default=29700, help="the first of two (default: 29700)")
    parser.add_argument("--rank", nargs=2, metavar=("JOB", "DIR"), help="train as one rank of a job")
    options = parser.parse_args()
    if options.rank:
        train(msgspec.json.decode(options.rank[0], type=Job), options.rank[1])
        return
    if options.out is None:
        parser.error("--out FILE says where the session goes")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    cores, began_unix = options.cores or sorted(os.sched_getaffinity(0))[:2], time.time()
    deadline = time.monotonic() + 60 * options.minutes
    kept: list[dict[str, Any]] = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for number, job in enumerate(jobs(np.random.default_rng(options.seed), options.seconds)):
        if time.monotonic() + options.seconds + 10 > deadline:
            break
        folder = Path(tempfile.mkdtemp(prefix="ringside-noise-"))
        try:
            found = run(job, cores, folder, options.port)
        except RuntimeError as error:
            print(f"left out: {error}", file=sys.stderr, flush=True)
            continue
        finally:
            shutil.rmtree(folder)
        for each in found:
            kept.append(each)
            own = decode(each["times"][0])
            median = np.median(own[own > 0]) if (own > 0).any() else 0.0
            print(f"{number}: {each['job']}: {len(own)} steps, own {median * 1e3:.1f} ms", flush=True)
        about = {"began_unix": began_unix, "cores": cores, "seed": options.seed, "machine": machine()}
        save(options.out, kept, about)


def cores_of(text: str) -> list[int]:
    """Return the cores named by `0,1`, all of which this process may use."""
    may = os.sched_getaffinity(0)
    cores = [int(core) if core.isdecimal() else -1 for core in text.split(",")]
    if not set(cores) <= may:
        raise argparse.ArgumentTypeError(f"{text!r}: such as 0,1; this process may use {sorted(may)}")
    return cores


def machine() -> str:
    """Return the processor's name and how many there are."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0] if names else 'processor'}"


def save(path: Path, kept: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Write a session: `about`, and per job `<n>.job`, `<n>.times`, `<n>.vitals`."""
    values: dict[str, Any] = {"about": json.dumps(about)}
    for number, each in enumerate(kept):
        values |= {f"{number}.{name}": value for name, value in each.items()}
    beside = path.with_suffix(".part")
    with beside.open("wb") as file:
        np.savez_compressed(file, **values)
    os.replace(beside, path)


if __name__ == "__main__":
    main()
