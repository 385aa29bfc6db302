"""A plain DDP script, synchronised and watched by Ringside: the line with `ringside.attach` is the only one added.

    torchrun --nproc-per-node 2 examples/train_ddp.py --steps 60

Every rank learns to recognise digits of seven segments in noisy pictures.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringside

DIGITS = "1110111 0010010 1011101 1011011 0111010 1101011 1101111 1010010 1111111 1111011"
SEGMENTS = torch.tensor([[float(lit) for lit in digit] for digit in DIGITS.split()])


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy pictures, shape (size, 7), and the digits they show."""
    digits = torch.randint(10, (size,))
    return SEGMENTS[digits] + 0.3 * torch.randn(size, 7), digits


def main() -> None:
    """Train on the ranks that torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="training steps (default: 60)")
    parser.add_argument("--run-dir", help="where rank 0 records the run (default: a new directory under runs/)")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(7, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    ddp = DistributedDataParallel(model)
    attachment = ringside.attach(ddp, run_dir=options.run_dir)  # the one line
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)

    first = last = 0.0
    for step in range(options.steps):
        pictures, digits = batch(64)
        loss = nn.functional.cross_entropy(ddp(pictures), digits)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = loss.item()
        first = last if step == 0 else first
        ringside.log_step(loss=last)  # optional: the loss goes into the record, too

    if dist.get_rank() == 0:
        print(f"loss {first:.3f} -> {last:.3f}")
        print("gradients reduced by", ", ".join(f"{who}: {count}" for who, count in attachment.counters.items()))
        if attachment.session is not None:
            print("recorded in", attachment.session.path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
