"""Evaluation between steps: by all ranks through the DDP model, and by rank 0 alone; rank 0 stops early for all."""

import torch
import torch.distributed as dist
from kit import Net, batches, begin, keep, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


@torch.no_grad()
def loss_of(model, seed):
    model.eval()
    losses = [nn.functional.cross_entropy(model(x), y).item() for x, y in batches(3, seed)]
    model.train()
    return sum(losses) / len(losses)


def main():
    rank, _ = begin()
    model = DDP(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    stop = torch.zeros(1)
    for step, (x, y) in enumerate(batches(30, rank)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step % 4 == 3:
            mine = torch.tensor(loss_of(model, 50 + rank))
            dist.all_reduce(mine)
            if rank == 0:
                alone = loss_of(model, 60), loss_of(model.module, 61)  # while the others wait below
                stop.fill_(float(step > 14))
                say(f"step {step}: {mine.item():.6f}, {alone[0]:.6f}, {alone[1]:.6f}")
            dist.broadcast(stop, src=0)
        if stop:
            break
    keep("model", model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
