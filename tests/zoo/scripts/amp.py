"""Mixed precision: autocast to bfloat16 with a GradScaler, which meets an overflow on one rank and skips that step."""

import torch
import torch.distributed as dist
from kit import Net, batches, begin, keep, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = begin()
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scales = []
    for step, (x, y) in enumerate(batches(9, rank)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        if step == 4 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    say(f"rank {rank}: scales {scales}")
    keep("model", model)
    torch.save(scaler.state_dict(), f"scaler.{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
