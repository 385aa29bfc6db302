"""Gradients looked at and changed through NumPy, DLPack and flat views that are held from step to step."""

import sys

import numpy as np
import torch
import torch.distributed as dist
from kit import Net, batches, begin, keep, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = begin()
    model = DDP(Net(), gradient_as_bucket_view="buckets" in sys.argv)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held, norms = [], []
    for step, (x, y) in enumerate(batches(6, rank)):
        optimizer.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(model(x), y).backward()
        if step == 0:
            held = [(p, p.grad.numpy(), np.from_dlpack(p.grad), p.grad.view(-1)) for p in model.parameters()]
        alike = [
            np.array_equal(p.grad.numpy(), view) and torch.equal(p.grad.view(-1), flat) for p, view, _, flat in held
        ]
        norms.append(f"{sum(float(np.square(shared).sum()) for _, _, shared, _ in held):.6f}")
        held[0][1][...] *= 0.5  # scales the gradient that the optimizer takes
        optimizer.step()
        say(f"rank {rank}: step {step}, {alike}")
    say(f"rank {rank}: {' '.join(norms)}")
    np.save(f"held.{rank}.npy", np.concatenate([view.ravel() for _, view, _, _ in held]))
    keep("model", model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
