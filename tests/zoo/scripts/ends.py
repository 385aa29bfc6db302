"""How a script ends, after it has trained and saved: by a status, an exception, a signal, or without a word."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from kit import Net, begin, keep, train
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    how = sys.argv[1]
    rank, _ = begin()
    model = DDP(Net())
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 5, rank)
    keep("model", model)
    dist.barrier()
    if how == "tidy":
        dist.destroy_process_group()
    elif how == "status":
        sys.exit(3)
    elif how == "raises":
        raise ValueError("the metric is below its floor")
    elif how == "words":
        sys.exit("the metric is below its floor")
    elif how == "at-once":
        sys.stdout.flush()
        os._exit(0)
    elif how == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    # "plain": the group is not destroyed


if __name__ == "__main__":
    main()
