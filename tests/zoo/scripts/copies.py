"""deepcopy of the DDP model before it trains and in the middle; the copies train, too, and keep the ranks alike."""

import copy

import torch
import torch.distributed as dist
from kit import Net, begin, keep, say, train
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = begin()
    model = DDP(Net())
    first = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 4, rank)
    best = copy.deepcopy(model)
    train(model, optimizer, 4, rank)
    for name, copied in {"first": first, "best": best}.items():
        train(copied, torch.optim.SGD(copied.parameters(), lr=0.1), 5, rank)
        keep(name, copied)
        say(f"rank {rank}: {name} is {type(copied).__name__}, its own {copied.module is not model.module}")
    again = copy.deepcopy(best)
    train(again, torch.optim.SGD(again.parameters(), lr=0.1), 2, rank)
    keep("again", again)
    keep("model", model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
