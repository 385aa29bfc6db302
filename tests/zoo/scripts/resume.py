"""Rank 0 writes checkpoints; a model that is made anew, with other weights, goes on from one."""

import torch
import torch.distributed as dist
from kit import Net, begin, keep, say, train
from torch.nn.parallel import DistributedDataParallel as DDP


def make():
    model = DDP(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def main():
    rank, _ = begin()
    model, optimizer, scheduler = make()

    def save(step):
        scheduler.step()
        if step == 3:
            if rank == 0:
                parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
                torch.save({key: part.state_dict() for key, part in parts.items()}, "checkpoint.pt")
            dist.barrier()

    train(model, optimizer, 8, rank, after=save)
    keep("first", model)

    torch.manual_seed(5)
    model, optimizer, scheduler = make()
    state = torch.load("checkpoint.pt", map_location="cpu", weights_only=True)
    for key, part in {"model": model, "optimizer": optimizer, "scheduler": scheduler}.items():
        part.load_state_dict(state[key])
    train(model, optimizer, 5, rank, after=lambda step: scheduler.step())
    keep("second", model)
    say(f"rank {rank}: lr {scheduler.get_last_lr()[0]:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
