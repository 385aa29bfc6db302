"""Real hosts: what runs between network namespaces that cannot share memory."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from ringside.lab import Lab

from .factory import LabFactory

pytestmark = pytest.mark.native

HEAD = """
import json, os, sys, torch, torch.distributed as dist
import ringside
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
def tell(value):
    print("RESULT " + json.dumps(value), flush=True)
"""


def run(lab: Lab, tmp_path: Path, body: str, env: dict[str, str] | None = None) -> list[Any]:
    """Run a script on every rank of the lab and return what each told."""
    script = tmp_path / "script.py"
    script.write_text(HEAD + textwrap.dedent(body))
    result = lab.run([sys.executable, str(script)], env, timeout_s=90, after_failure_s=20)
    result.check()
    return [
        json.loads(line.removeprefix("RESULT "))
        for rank in result.ranks
        for line in rank.stdout.splitlines()
        if line.startswith("RESULT ")
    ]


@pytest.mark.core
def test_ranks_are_grouped_by_the_hosts_they_are_on(lab_factory: LabFactory, tmp_path: Path) -> None:
    lab = lab_factory(hosts=3, ranks_per_host=[2, 1, 2])
    body = """
    with ringside.Communicator(timeout_s=30) as comm:
        x = torch.arange(1000.0) + rank
        comm.all_reduce(x, algorithm="hosts/ring")
        fine = bool((x == torch.arange(1000.0) * size + sum(range(size))).all())
        tell([list(map(list, comm.roster.hosts)), comm.local is not None, fine])
    """
    for hosts, shares, fine in run(lab, tmp_path, body):
        assert hosts == [[0, 1], [2], [3, 4]]
        assert fine
        del shares


def test_a_reducer_at_the_switch_adds_up(lab_factory: LabFactory, tmp_path: Path) -> None:
    lab = lab_factory(hosts=3, ranks_per_host=2)
    env = {"MASTER_ADDR": lab.address(0), "MASTER_PORT": "29641"}
    reducer = lab.run_switch([sys.executable, "-m", "ringside.sync.reducer"], env)
    body = """
    with ringside.Communicator(timeout_s=30, switch=True) as comm:
        found = []
        for name in ("in_network", "leaders/in_network", "ring"):
            for op in ("sum", "avg", "max"):
                for elements in (1, 1000, 300_000):
                    x = torch.full((elements,), float(rank))
                    comm.all_reduce(x, op, algorithm=name)
                    want = {"sum": sum(range(size)), "avg": (size - 1) / 2, "max": size - 1}[op]
                    found.append(bool((x == want).all()))
        x = comm.all_reduce(torch.ones(100), scale=-2.0, algorithm="in_network")
        found.append(float(x[0]) == -2.0 * size)
        x = comm.all_reduce(torch.full((100,), float(rank)), "avg", weights=rank + 1.0, algorithm="in_network")
        mean = sum((r + 1) * r for r in range(size)) / sum(r + 1 for r in range(size))
        found.append(abs(float(x[0]) - mean) < 1e-5)
        x = comm.all_reduce(torch.ones(100), "avg", scale=3.0, algorithm="leaders/in_network")
        found.append(float(x[0]) == 3.0)
        half = comm.all_reduce(torch.full((100,), 20000.0, dtype=torch.float16), "avg", algorithm="leaders/in_network")
        found.append(abs(float(half[0]) - 20000) < 50)
        tell(found)
    """
    for found in run(lab, tmp_path, body, env):
        assert len(found) == 31
        assert all(found)
    assert reducer.wait(20) == 0
    before = lab.interface_bytes(0)
    assert before[0] > 0


@pytest.mark.long
def test_a_reducer_takes_less_of_each_link_than_a_ring(lab_factory: LabFactory, tmp_path: Path) -> None:
    lab = lab_factory(hosts=4, ranks_per_host=1)
    sent = {}
    for port, name in enumerate(("in_network", "ring")):
        env = {"MASTER_ADDR": lab.address(0), "MASTER_PORT": str(29642 + port)}
        reducer = lab.run_switch([sys.executable, "-m", "ringside.sync.reducer"], env)
        before = lab.interface_bytes(1)[1]
        body = f"""
        with ringside.Communicator(timeout_s=30, switch=True) as comm:
            x = torch.ones(1 << 20)
            comm.all_reduce(x, algorithm="{name}")
            tell(float(x[0]))
        """
        assert run(lab, tmp_path, body, env) == [4.0] * 4
        reducer.wait(20)
        sent[name] = lab.interface_bytes(1)[1] - before
    # One tensor against 2 (4 - 1) / 4 of it, and both with some talk at start-up.
    assert 1.3 < sent["ring"] / sent["in_network"] < 1.6


TRAIN = """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [part for _ in range(8) for part in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    from torch.nn.parallel import DistributedDataParallel
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.5, gradient_as_bucket_view=True)
    attachment = ringside.attach(model, run_dir=os.environ["OUT"])
    records = []
    attachment.session.on_record(records.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    noise = torch.Generator().manual_seed(rank)
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.randn(512, 256, generator=noise)).square().mean().backward()
        optimizer.step()
    attachment.session.end()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    times = [[record.exposed_seconds, record.sync_seconds] for record in records[3:]]
    tell([attachment.counters, float(weights.double().sum()), times])
"""


def test_buckets_travel_between_hosts_while_backward_computes(lab_factory: LabFactory, tmp_path: Path) -> None:
    lab = lab_factory(hosts=2, ranks_per_host=2)
    sums = {}
    for engine in ("auto", "native"):
        env = {"RINGSIDE_ENGINE": engine, "OUT": str(tmp_path / engine)}
        found = run(lab, tmp_path, TRAIN, env)
        assert len(found) == 4
        assert len({total for _, total, _ in found}) == 1, "all ranks end with the same parameters"
        sums[engine] = found[0][1]
        for counters, _, times in found:
            assert all(name.startswith("ringside/") for name in counters) == (engine == "auto"), counters
            assert times
            # Total communication is more than what is exposed: the first buckets are under way during backward.
            assert sum(sync for _, sync in times) > sum(exposed for exposed, _ in times)
    assert sums["auto"] == pytest.approx(sums["native"], rel=1e-5)


def test_a_host_that_vanishes_is_named_by_every_survivor(lab_factory: LabFactory, tmp_path: Path) -> None:
    lab = lab_factory(hosts=3, ranks_per_host=[2, 2, 1])
    script = tmp_path / "script.py"
    ready = tmp_path / "ready"
    script.write_text(
        HEAD
        + textwrap.dedent(
            """
            import pathlib, time
            comm = ringside.Communicator(timeout_s=60)
            x = torch.ones(1000)
            comm.all_reduce(x, algorithm="hosts/ring")
            pathlib.Path(os.environ["READY"], str(rank)).touch()
            began = time.monotonic()
            try:
                while time.monotonic() - began < 40:
                    comm.all_reduce(x.fill_(1), algorithm="hosts/ring")
                    began_last = time.monotonic()
                tell(["nothing happened"])
            except ringside.PeerLostError as error:
                tell([str(error), list(error.ranks), time.monotonic() - began_last])
            os._exit(0)
            """
        )
    )
    ready.mkdir()
    cutter = _cut_when_ready(lab, ready, ranks=5, host=2)
    result = lab.run([sys.executable, str(script)], {"READY": str(ready)}, timeout_s=60)
    cutter.join(10)
    told = {
        number: json.loads(line.removeprefix("RESULT "))
        for number, rank in enumerate(result.ranks)
        for line in rank.stdout.splitlines()
        if line.startswith("RESULT ")
    }
    for survivor in range(4):
        message, ranks, seconds = told[survivor]
        assert ranks == [4], told
        assert "rank 4 on host" in message
        assert seconds < 15  # 4 s by the kernel's word, and room for a busy machine


def _cut_when_ready(lab: Lab, ready: Path, *, ranks: int, host: int) -> Any:
    import threading
    import time

    def cut() -> None:
        deadline = time.monotonic() + 50
        while len(list(ready.iterdir())) < ranks and time.monotonic() < deadline:
            time.sleep(0.05)  # other processes' files: there is nothing to wait on
        lab.cut(host=host)

    thread = threading.Thread(target=cut)
    thread.start()
    return thread
