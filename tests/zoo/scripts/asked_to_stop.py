"""Preemption and Ctrl-C: all ranks hear of it, agree on a step, and take a while to save; they end with status 0."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from kit import Net, batches, begin, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

asked = []


def main():
    seconds = float(sys.argv[1])
    rank, _ = begin()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: asked.append(number))
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(batches(100_000, rank)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        stop = torch.tensor(float(len(asked)))
        dist.all_reduce(stop)
        if step == 20:
            kept = {key: value.clone() for key, value in model.state_dict().items()}
            open(f"started.{rank}", "w").close()
        if stop:
            break
        time.sleep(0.01)
    time.sleep(seconds)  # a large model to a slow disk
    torch.save(kept, f"saving.{rank}.pt")
    os.replace(f"saving.{rank}.pt", f"last.{rank}.pt")
    say(f"rank {rank}: asked {len(asked)} times")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
