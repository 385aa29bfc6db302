"""torchrun's own restarts: rank 1 fails in the first attempt, and both go on from the checkpoint in the second."""

import os

import torch
import torch.distributed as dist
from kit import Net, begin, keep, say, train
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rank, _ = begin(seed=attempt)
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if attempt:
        model.load_state_dict(torch.load("checkpoint.pt", weights_only=True))

    def after(step):
        if step == 3 and not attempt:
            if rank == 0:
                torch.save(model.state_dict(), "checkpoint.pt")
            dist.barrier()
            if rank == 1:
                raise ValueError("a bad day")

    train(model, optimizer, 8, rank, after=after)
    say(f"rank {rank}: attempt {attempt}")
    keep("model", model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
