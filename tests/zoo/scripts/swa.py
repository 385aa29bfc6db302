"""Stochastic weight averaging by PyTorch's recipe: AveragedModel, SWALR, update_bn."""

import torch
import torch.distributed as dist
from kit import CLASSES, FEATURES, batches, begin, keep, say, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn


def main():
    rank, _ = begin()
    model = DDP(nn.Sequential(nn.Linear(FEATURES, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, CLASSES)))
    averaged = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    slow = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)

    def average(step):
        if step >= 4:
            averaged.update_parameters(model)
            slow.step()

    train(model, optimizer, 10, rank, after=average)
    update_bn([x for x, _ in batches(5, rank)], averaged)
    say(f"rank {rank}: {int(averaged.n_averaged)} averaged, lr {slow.get_last_lr()[0]:.4f}")
    keep("model", model)
    keep("averaged", averaged)
    torch.save(averaged, f"whole.{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
