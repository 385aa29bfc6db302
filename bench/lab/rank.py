"""What one rank does in the lab: all-reduces, and other collectives, by several contenders, in turn, timed and counted.

`jobs.py` starts it on every host with a plan (a JSON file); its last line on stdout is its report. Times are on
CLOCK_MONOTONIC, which all hosts of a lab share, for they are on one machine.

A turn is: barrier, read the host's counters, barrier, call `iterations` times, barrier, read the counters. Everybody
has ended the turn before and nobody has begun this one while somebody reads, so what is counted is one turn's, and two
barriers.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from bench.common import processor_ticks

from ringside.lab.wiring import INTERFACE

Call = Callable[[], Any]
GLOO, IDLE, DEFAULT = "gloo", "idle", "default"
# Contenders besides all-reduces are `COLLECTIVE:WAY`.
COLLECTIVES = ("reduce_scatter", "all_gather", "broadcast", "reduce", "barrier")
WAYS = ("gloo", "ranks", "ours")
_WARM_UPS = 2  # a first message finds no place posted for it, and the first ones open TCP's window
_CHECKED_BYTES = 1 << 20  # of a result that are compared with the sum before anything is timed
_MOST_ITERATIONS = 2000  # calls in a turn


def main() -> None:
    import torch.distributed as dist

    plan = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    report: list[dict[str, Any]] = []
    with contextlib.suppress(ImportError):
        import torch

        torch.set_num_threads(1)
    if plan["switch_ports"]:
        # A reducer meets one job at one store: so every number of ranks is a job of its own. The larger ones come
        # first, so that a rank that is not needed any more can go.
        for n, port in plan["switch_ports"]:
            if rank < n:
                url = f"tcp://{os.environ['MASTER_ADDR']}:{port}"
                dist.init_process_group("gloo", init_method=url, rank=rank, world_size=n)
                report += _turns([case for case in plan["cases"] if case["n"] == n], plan, {n: None}, rank)
                dist.destroy_process_group()
    else:
        dist.init_process_group("gloo")
        size = dist.get_world_size()
        needed = sorted({case["n"] for case in plan["cases"]})
        groups = {n: None if n == size else dist.new_group(range(n)) for n in needed}
        report = _turns(plan["cases"], plan, groups, rank)
        dist.barrier()
        dist.destroy_process_group()
    print(json.dumps(report), flush=True)


def _turns(
    cases: list[dict[str, Any]], plan: dict[str, Any], groups: dict[int, Any], rank: int
) -> list[dict[str, Any]]:
    """Prepare all cases, then let everybody have turns, round after round."""
    import ringside

    own = [case for case in cases if rank < case["n"]]
    switch = bool(plan["switch_ports"])
    with contextlib.ExitStack() as stack:
        comms = {
            n: stack.enter_context(ringside.communicator(group, switch=switch))
            for n, group in groups.items()
            if rank < n
        }
        ready = [turn for case in own for turn in _prepare(case, comms[case["n"]], groups[case["n"]], plan)]
        report = []
        last = max((turn.rounds for turn in ready), default=0)
        for number in range(last):
            for turn in ready if number % 2 else reversed(ready):  # nobody is always the one after the same other
                if number < turn.rounds:
                    report.append({**turn.run(), "round": number})
            if rank == 0:
                print(f"round {number + 1} of {last}", file=sys.stderr, flush=True)
        return report


def _prepare(case: dict[str, Any], comm: Any, group: Any, plan: dict[str, Any]) -> Iterator[_Turn]:
    """Yield the turns of a case's contenders, each checked and warm."""
    for name in case["contenders"]:
        array = np.zeros(case["size_bytes"] // 4, dtype=np.float32)
        if ":" in name:
            call = _collective_call(name, comm, group, array)
            for _ in range(_WARM_UPS):
                call()
            yield _Turn(case, name, call, comm, group, plan)
            continue
        if name != IDLE:
            # Numbers that differ by rank and place are reduced and compared; then zeros are left, whose sums stay zero.
            part = array[: _CHECKED_BYTES // 4]
            call, place = _call(name, comm, group, part), np.arange(len(part)) % 251
            for _ in range(_WARM_UPS):
                part[:] = place + comm.rank
                call()
                wrong = int((part != place * comm.size + comm.size * (comm.size - 1) / 2).sum())
                if wrong:
                    raise SystemExit(f"{name}, {case['n']} ranks, {part.nbytes} B: {wrong} elements are wrong")
                part[:] = 0
        call = _call(name, comm, group, array)
        if name == DEFAULT:
            # First the calls in which most is tried: what is measured is what comes after.
            for _ in range(plan["settle"]):
                if comm.settled(array.nbytes):
                    break
                call()
            if comm.rank == 0:
                print(comm.explain(array.nbytes), file=sys.stderr, flush=True)
        yield _Turn(case, name, call, comm, group, plan)


def _call(name: str, comm: Any, group: Any, array: Any) -> Call:
    import torch
    import torch.distributed as dist

    if name == IDLE:
        return lambda: None
    if name == GLOO:
        tensor = torch.from_numpy(array)
        return lambda: dist.all_reduce(tensor, group=group)
    algorithm = None if name == DEFAULT else name
    return lambda: comm.all_reduce(array, algorithm=algorithm)


def _collective_call(name: str, comm: Any, group: Any, array: np.ndarray[Any, Any]) -> Call:
    """Return what carries out a collective once.

    Args:
        name: `COLLECTIVE:WAY`; `ranks` is ours without shared memory inside the hosts.
        comm: Ours.
        group: The process group.
        array: float32 [all ranks' elements]: a reduce-scatter's input, an all-gather's result, what is broadcast.
    """
    import torch
    import torch.distributed as dist

    from ringside.engine.net import hierarchical_collectives

    collective, side = name.split(":")
    part = np.zeros(len(array) // comm.size, dtype=np.float32)
    if side == "gloo":
        whole, own = torch.from_numpy(array), torch.from_numpy(part)
        stock = {
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(own, whole, group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, own, group=group),
            "broadcast": lambda: dist.broadcast(whole, 0, group=group),
            "reduce": lambda: dist.reduce(whole, 0, group=group),
            "barrier": lambda: dist.barrier(group),
        }
        return stock[collective]
    ours = {
        "reduce_scatter": lambda: comm.reduce_scatter(array, out=part),
        "all_gather": lambda: comm.all_gather(part, out=array),
        "broadcast": lambda: comm.broadcast(array),
        "reduce": lambda: comm.reduce(array),
        "barrier": comm.barrier,
    }
    call = ours[collective]
    if side == "ours":
        return call

    def over_ranks() -> None:
        """Every rank counts as a host of its own: nothing is registered that goes through shared memory."""
        kept = dict(hierarchical_collectives.BY_KIND)
        hierarchical_collectives.BY_KIND.clear()
        try:
            call()
        finally:
            hierarchical_collectives.BY_KIND.update(kept)

    return over_ranks


class _Turn:
    """A contender in one case."""

    def __init__(
        self, case: dict[str, Any], name: str, call: Call, comm: Any, group: Any, plan: dict[str, Any]
    ) -> None:
        self.case, self.name, self.call, self.comm, self.group, self.plan = case, name, call, comm, group, plan
        self.rounds = case.get("rounds") or plan["rounds"]
        self.iterations = case.get("iterations")
        if not self.iterations:
            # As many calls as last as long as a turn should, the same number on all ranks.
            import torch
            import torch.distributed as dist

            trials = 1 if case["size_bytes"] > 1 << 20 else 5
            dist.barrier(group)
            start = time.perf_counter()
            for _ in range(trials):
                call()
            slowest = torch.tensor([(time.perf_counter() - start) / trials])
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
            self.iterations = max(1, min(_MOST_ITERATIONS, round(plan["turn_s"] / max(float(slowest), 1e-6))))

    def _call_at_agreed_times(self) -> list[tuple[float, float]]:
        """Make every call at a time that rank 0 says (the hosts share a clock): after a barrier, ranks would begin
        as far apart as the network's delay is long."""
        import torch
        import torch.distributed as dist

        start = time.perf_counter()
        self.call()
        gap = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(gap, dist.ReduceOp.MAX, group=self.group)
        first = torch.tensor([time.perf_counter()], dtype=torch.float64)
        dist.all_reduce(first, dist.ReduceOp.MAX, group=self.group)
        step_s = 1.5 * float(gap) + 5e-3
        spans = []
        for number in range(1, self.iterations + 1):
            begin = float(first) + number * step_s
            time.sleep(max(begin - time.perf_counter(), 0.0))
            start = time.perf_counter()
            self.call()
            spans.append((start, time.perf_counter()))
        return spans

    def run(self) -> dict[str, Any]:
        """Make the calls of one turn and return what was measured."""
        import torch.distributed as dist

        if self.case.get("warm"):
            self.call()
        hops_before = len(self.comm.hops) if self.plan["hops"] else 0
        dist.barrier(self.group)
        before = counters()
        dist.barrier(self.group)
        cpu_before, idle_before = time.process_time(), processor_ticks()
        if self.plan["apart"]:
            spans = self._call_at_agreed_times()
        else:
            start = time.perf_counter()
            for _ in range(self.iterations):
                self.call()
            spans = [(start, time.perf_counter())]
        cpu_s, idle_after = time.process_time() - cpu_before, processor_ticks()
        dist.barrier(self.group)
        after = counters()
        report = {
            "n": self.case["n"],
            "size_bytes": self.case["size_bytes"],
            "contender": self.name,
            "iterations": self.iterations,
            "spans": spans,
            "cpu_s": cpu_s,
            "ticks": [now - then for now, then in zip(idle_after, idle_before, strict=True)],
            "counted": [now - then for now, then in zip(after, before, strict=True)],
        }
        if self.name == DEFAULT:  # "16 MB: hosts/ring. It was ..."
            report["chosen"] = self.comm.explain(self.case["size_bytes"]).partition(": ")[2].partition(".")[0]
            exchange = self.comm.buckets.across.exchange
            report["in_flight"] = [exchange.window, exchange.connections]
        if self.plan["hops"]:
            report["hops"] = [[h.src, h.size_bytes, h.waited, h.first, h.last] for h in self.comm.hops[hops_before:]]
        return report


def counters() -> list[int]:
    """Return what the kernel counted on this host's link: bytes and frames received, bytes and frames sent."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == INTERFACE:
            numbers = rest.split()
            return [int(numbers[column]) for column in (0, 1, 8, 9)]
    raise SystemExit(f"there is no interface {INTERFACE} here: start this by bench/lab/")


if __name__ == "__main__":
    main()
