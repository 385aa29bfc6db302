"""What a rank of a lab does with a communicator, by name; it tells a result as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ringside
from ringside.monitor import StepRecord

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def tell(value: object) -> None:
    print("RESULT " + json.dumps(value), flush=True)


def grouped() -> None:
    with ringside.communicator(timeout=30) as comm:
        x = torch.arange(1000.0) + rank
        comm.all_reduce(x, algorithm="hosts/ring")
        fine = bool((x == torch.arange(1000.0) * size + sum(range(size))).all())
        tell([list(map(list, comm.roster.hosts)), comm.local is not None, fine])


def at_the_switch() -> None:
    with ringside.communicator(timeout=30, switch=True) as comm:
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


def once(algorithm: str) -> None:
    with ringside.communicator(timeout=30, switch=True) as comm:
        x = torch.ones(1 << 20)
        comm.all_reduce(x, algorithm=algorithm)
        tell(float(x[0]))


def buckets() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [part for _ in range(8) for part in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.5, gradient_as_bucket_view=True)
    attachment = ringside.attach(model, run_dir=os.environ["OUT"])
    records: list[StepRecord] = []
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


def by_a_light_wire(code: str) -> None:
    """Tell a digest of sums and of a trained model, and what the host's interface sent beside float32."""
    sums, sent = [], []
    for wire in (code, None):
        with ringside.communicator(timeout=60, wire_dtype=wire, algorithm="hosts/ring") as comm:
            generator = torch.Generator().manual_seed(rank)
            comm.all_reduce(torch.ones(1000))
            dist.barrier()
            before = interface_bytes()
            for elements in (2_000_001, 1_000_000):
                x = comm.all_reduce(torch.randn(elements, generator=generator))
                sums.append(hashlib.sha256(x.numpy().tobytes()).hexdigest())
            dist.barrier()
            sent.append(interface_bytes() - before)
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (torch.nn.Linear(128, 128), torch.nn.ReLU())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.2, gradient_as_bucket_view=True)
    os.environ["RINGSIDE_WIRE_DTYPE"] = code
    attachment = ringside.attach(model, engine="ringside", monitor=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(64, 128, generator=generator)).square().mean().backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    sums.append(hashlib.sha256(weights.numpy().tobytes()).hexdigest())
    attachment.detach()
    tell([sums, sent[0] / sent[1]])


def interface_bytes() -> int:
    rows = [line.split(":") for line in pathlib.Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(figures.split()[8]) for name, figures in rows if name.strip() != "lo")


def over_a_long_link() -> None:
    """Tell how many connections a link has, and whether sums over them are right."""
    with ringside.communicator(timeout=60) as comm:
        between: Any = comm.buckets
        exchange, fine = between.across.exchange, []
        for algorithm in (None, "ring", "direct", "tree"):
            for elements in (1, 1000, 700_001):
                x = torch.arange(float(elements)) % 1000 + rank
                comm.all_reduce(x, algorithm=algorithm)
                fine.append(bool((x == torch.arange(float(elements)) % 1000 * size + sum(range(size))).all()))
        tell([exchange.connections, all(fine)])


def until_a_host_vanishes() -> None:
    comm = ringside.communicator(timeout=60)
    x = torch.ones(1000)
    comm.all_reduce(x, algorithm="hosts/ring")
    pathlib.Path(os.environ["READY"], str(rank)).touch()
    began = began_last = time.monotonic()
    try:
        while time.monotonic() - began < 40:
            comm.all_reduce(x.fill_(1), algorithm="hosts/ring")
            began_last = time.monotonic()
        tell(["nothing happened"])
    except ringside.PeerLostError as error:
        tell([str(error), list(error.ranks), time.monotonic() - began_last])
    os._exit(0)


JOBS = (grouped, at_the_switch, once, buckets, by_a_light_wire, over_a_long_link, until_a_host_vanishes)
DOES = {job.__name__: job for job in JOBS}
DOES[sys.argv[1]](*sys.argv[2:])
