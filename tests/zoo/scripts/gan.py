"""Two DDP models and two optimizers that train against each other; one step of the generator in two of the critic."""

import torch
import torch.distributed as dist
from kit import FEATURES, batches, begin, keep, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = begin()
    maker = DDP(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, FEATURES)), broadcast_buffers=False)
    critic = DDP(nn.Sequential(nn.Linear(FEATURES, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)), broadcast_buffers=False)
    slow = torch.optim.Adam(maker.parameters(), lr=2e-3, betas=(0.5, 0.999))
    fast = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    noise = torch.Generator().manual_seed(77 + rank)
    judge = nn.BCEWithLogitsLoss()
    for step, (real, _) in enumerate(batches(10, rank)):
        false = maker(torch.randn(len(real), 8, generator=noise))
        fast.zero_grad()
        right = judge(critic(real), torch.ones(len(real), 1))
        wrong = judge(critic(false.detach()), torch.zeros(len(real), 1))
        (right + wrong).backward()
        fast.step()
        if step % 2:
            slow.zero_grad()
            judge(critic(false), torch.ones(len(real), 1)).backward()
            slow.step()
    say(f"rank {rank}: critic {(right + wrong).item():.6f}")
    keep("maker", maker)
    keep("critic", critic)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
