"""Exceptions in a step that the script catches, and then goes on with the next batch."""

import sys

import torch
import torch.distributed as dist
from kit import Net, batches, begin, keep, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Trap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise MemoryError("as if there were no room")


def main():
    place = sys.argv[1]
    rank, _ = begin()
    model = DDP(Net(), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(batches(8, rank)):
        optimizer.zero_grad()
        bad = step in (0, 3, 6)
        try:
            if bad and place == "loader":
                raise OSError("a broken picture")
            output = model(x[:, :-1] if bad and place == "forward" else x)
            if bad and place == "loss":
                output = output[:, :2]  # labels are out of bounds
            if bad and place == "backward":
                output = Trap.apply(output)
            nn.functional.cross_entropy(output, y).backward()
        except (OSError, RuntimeError, MemoryError, IndexError) as error:
            say(f"rank {rank}: step {step} left out: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        optimizer.step()
    keep("model", model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
