"""Gradient accumulation with no_sync, clipping, and a backward that keeps its graph."""

import contextlib
import sys

import torch
import torch.distributed as dist
from kit import Net, batches, begin, keep, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

PARTS = 3


def main():
    rank, _ = begin()
    model = DDP(Net(), bucket_cap_mb=0.01, gradient_as_bucket_view="views" in sys.argv)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step, (x, y) in enumerate(batches(12, rank)):
        last = step % PARTS == PARTS - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = nn.functional.cross_entropy(model(x), y) / PARTS
            loss.backward(retain_graph=step == 4)
            if step == 4:
                (0.5 * loss).backward()
        if last:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad(set_to_none="views" not in sys.argv)
    say(f"rank {rank}: norms {' '.join(f'{norm:.6f}' for norm in norms)}")
    keep("model", model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
