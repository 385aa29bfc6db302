"""Forks of a rank in mid-training: one evaluates, one trains on gradients of its own, one ends at once."""

import multiprocessing
import os

import torch
import torch.distributed as dist
from kit import Net, batches, begin, keep, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def evaluate(module, x, y, queue):
    queue.put(nn.functional.cross_entropy(module(x), y).item())


def finetune(module, x, y, queue):
    for parameter in module.parameters():
        parameter.grad.fill_(1e6)  # a fork's memory is its own
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.zero_grad(set_to_none=False)
    nn.functional.cross_entropy(module(x), y).backward()
    optimizer.step()
    queue.put(sum(float(p.grad.square().sum()) for p in module.parameters()))


def main():
    rank, _ = begin()
    model = DDP(Net(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    context = multiprocessing.get_context("fork")
    for step, (x, y) in enumerate(batches(6, rank)):
        optimizer.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(model(x), y).backward()
        if step in (0, 2, 4):
            for work in (evaluate, finetune):
                queue = context.SimpleQueue()
                child = context.Process(target=work, args=(model.module, x, y, queue))
                child.start()
                say(f"rank {rank}: step {step}, {work.__name__} {queue.get():.6f}")
                child.join()
                say(f"rank {rank}: step {step}, {work.__name__} ended with {child.exitcode}")
            if os.fork() == 0:
                os._exit(0)
            os.wait()
        optimizer.step()
    keep("model", model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
