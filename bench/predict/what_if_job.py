"""One rank of a job that `bench.predict.what_if` records: a model in DDP, trained as users do."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from bench.common import process_group

WARM_UP = 5  # steps: DDP's first buckets, connections, caches


@process_group()
def main(job: dict[str, Any]) -> None:
    """Train, and print what every step took after the warm-up, seconds."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import ringside
    from ringside.faults.inject import inject, parse_fault

    torch.manual_seed(0)
    rank, width = dist.get_rank(), job["width"]
    layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(job["layers"])]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=job["bucket_mb"])
    ringside.attach(model, run_dir=job["run"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(job["batch"], width), torch.randn(job["batch"], width)
    fault = inject(parse_fault(job["fault"]) if job["fault"] else None, model, rank)
    took = []
    for step in range(WARM_UP + job["steps"]):
        began = time.perf_counter()
        fault.step(step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        took.append(time.perf_counter() - began)
    print(json.dumps(took[WARM_UP:]))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
