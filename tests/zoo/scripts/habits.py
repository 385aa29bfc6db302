"""Habits that scripts have, one per run: where they train, with which optimizer, and what they do with a model."""

import gc
import sys
import threading
import warnings
import weakref

import torch
import torch.distributed as dist
from kit import Net, batches, begin, keep, say, train
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


class Wrapped(DDP):
    """A subclass that forwards what it does not have, as many projects do."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)

    def forward(self, x, *, scale=1.0):
        return scale * super().forward(x)


def main():
    habit = sys.argv[1]
    rank, _ = begin()
    if habit == "strict":
        warnings.simplefilter("error")
    if habit == "doubles":
        torch.set_default_dtype(torch.float64)
    model = Wrapped(Net()) if habit == "subclass" else DDP(Net(), gradient_as_bucket_view=habit == "replaced")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if habit == "sharded":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-2)
    if habit == "thread":
        trainer = threading.Thread(target=train, args=(model, optimizer, 6, rank))
        trainer.start()
        trainer.join()
        say(f"rank {rank}: {[thread.name for thread in threading.enumerate() if not thread.daemon]}")
    elif habit == "closure":
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
        x, y = next(batches(1, rank))

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
    elif habit == "replaced":
        for x, y in batches(6, rank):
            nn.functional.cross_entropy(model(x), y).backward()
            for parameter in model.parameters():
                parameter.grad = parameter.grad.sign() * 0.1
            optimizer.step()
            optimizer.zero_grad()
    elif habit == "doubles":
        model = model.double()
        for x, y in batches(6, rank):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.double()), y).backward()
            optimizer.step()
    elif habit == "anomaly":
        with torch.autograd.set_detect_anomaly(True):
            train(model, optimizer, 6, rank)
    elif habit == "search":  # one model after the other, as a search over settings makes them
        gone = []
        for width in (8, 16, 24, 32):
            model = DDP(Net(width))
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), 4, rank)
            gone.append(weakref.ref(model))
        gc.collect()
        say(f"rank {rank}: {sum(each() is not None for each in gone)} left")
    else:
        train(model, optimizer, 6, rank)
    keep("model", model)
    if habit == "subclass":
        say(f"rank {rank}: {model(torch.ones(1, 32), scale=2.0).sum().item():.6f} {type(model.body).__name__}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
