"""What the benchmarks share: where things lie, command lines, result files, tables, timed blocks and floors.

All of them are started from the repository's root, `python -m bench.lab`, and so are the processes that they start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS, RUNS = ROOT / "docs", ROOT / "runs"
RANKS_LIMIT_S = 600.0  # for all ranks of a job on this host to end


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the docstring of a module that is started with `python -m`."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def module_command(module: str, *words: str, python: str = sys.executable) -> list[str]:
    """Return the command that runs a module of `bench` in a process of its own, from the root."""
    return [python, "-m", module, *words]


def run_ranks_here(command: Sequence[str], ranks: int) -> Any:
    """Run a command once per rank on this host, each with one OpenMP thread; return the JSON of rank 0's last line.

    Raises:
        SystemExit: A rank failed; its own messages are on stderr.
    """
    with socket.socket() as probe:  # a port that is free now; nobody else is told of it
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank)},
            stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        printed, _ = processes[0].communicate(timeout=RANKS_LIMIT_S)
        failed = [rank for rank, process in enumerate(processes) if process.wait(RANKS_LIMIT_S)]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if failed:
        raise SystemExit(f"rank {failed[0]} failed; its messages are above")
    return last_json(printed)


def run_own_ranks(module: str, ranks: int, lab: str | None, *, rate: str = "1gbit", limit_s: float) -> Any:
    """Run a module with this process's own words once per rank; return the JSON of rank 0's last line.

    Args:
        module: Its name.
        ranks: How many, on this host.
        lab: On hosts of the network lab instead: `2x3` are two hosts with three ranks each.
        rate: Of the lab's links.
        limit_s: For the ranks in the lab to end.
    """
    command = module_command(module, *sys.argv[1:])
    if not lab:
        return run_ranks_here(command, ranks)
    from ringside.lab import Lab

    hosts, _, per_host = lab.partition("x")
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with Lab(hosts=int(hosts), ranks_per_host=int(per_host or 1), rate=rate) as made:
        return last_json(made.run(command, quiet, timeout_s=limit_s, after_failure_s=5.0).check().ranks[0].stdout)


def last_json(printed: str) -> Any:
    """Return what stands as JSON on the last line that a process printed: libraries may print before it."""
    return json.loads(printed.strip().rpartition("\n")[2])


def numbers(text: str) -> list[int]:
    """Return the numbers of an option such as `2,4,8`."""
    return [int(part) for part in text.split(",")]


def names_among(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return an argument's type: names with commas between, each of them known."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := set(names) - set(known):
            raise argparse.ArgumentTypeError(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        return names

    return parse


def report_progress(text: str) -> None:
    """Print a line on stderr at once: stdout is for results."""
    print(text, file=sys.stderr, flush=True)


def read_results(path: Path) -> dict[str, Any]:
    """Return the figures that earlier runs left in a file, by name; nothing where there is none."""
    return json.loads(path.read_text()) if path.exists() else {}


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table without a line's end after it."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows))


def page_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table as a paragraph of a page: with a line's end after it."""
    return markdown_table(head, rows) + "\n"


def processor_ticks() -> tuple[int, int]:
    """Return (idle, all) of what the kernel counts for the cores of this machine, in its ticks."""
    counted = [int(word) for word in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    return counted[3] + counted[4], sum(counted)  # one that waits for a disk is idle


def resident_bytes(pid: int | str = "self") -> int:
    """Return how much memory of a process is resident."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def process_group(backend: str = "gloo") -> Iterator[None]:
    """Within it, or in a function that it decorates, this process is a rank of one thread; all ranks leave together."""
    import torch
    import torch.distributed as dist

    if backend == "ringside":
        import ringside  # noqa: F401 - makes the backend known
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the interval that holds a median with 95% confidence, by order statistics; of fewer than 6 values, all.

    Of n values the k smallest are below the median with the binomial's probability, whatever they are drawn from
    (W. J. Conover, Practical Nonparametric Statistics, section 3.2).
    """
    ordered, n = sorted(values), len(values)
    outside, cut = 0.0, 0
    while cut < n // 2 and (outside := outside + math.comb(n, cut) / 2**n) <= 0.025:
        cut += 1
    first = max(cut - 1, 0)
    return ordered[first], ordered[n - 1 - first]


def slowest_step_s(step: Callable[[], Any], times: int) -> float:
    """Return the mean seconds of a step in a block of them, on the slowest rank of the default process group."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    # All begin together, and each stops its own clock: a rank that comes late is in the time of those that wait for it.
    began = time.perf_counter()
    for _ in range(times):
        step()
    seconds = torch.tensor([(time.perf_counter() - began) / times], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


@dataclass(frozen=True)
class Floor:
    """One thing that is promised.

    Args:
        what: In words.
        value: What was measured; None: it was not.
        least: It is met from here on; None: there is no such bound.
        most: It is met up to here; None: there is no such bound.
        unit: Of all three.
    """

    what: str
    value: float | None
    least: float | None = None
    most: float | None = None
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether it is kept; what was not measured is not."""
        value = self.value
        if value is None:
            return False
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def describe(self) -> str:
        """Return one line: whether it is met, by which figure, and its bounds."""
        ends = (("at least", self.least), ("at most", self.most))
        bounds = " and ".join(f"{word} {end:g}" for word, end in ends if end is not None)
        value = "not measured" if self.value is None else f"{self.value:.3f} {self.unit}".rstrip()
        return f"{'met   ' if self.met else 'missed'} {self.what}: {value} ({bounds})"
