"""Accelerate's usual loop: `attach(...)` around what `prepare` returns is the only line that changes.

    torchrun --nproc-per-node 2 examples/integrations_accelerate.py --steps 30

Every rank learns to recognise ten noisy patterns. It requires `pip install accelerate`.
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ringside
from ringside.integrations.accelerate import attach, attachment_of


def patterns(count: int) -> TensorDataset:
    """Return noisy patterns, shape (count, 16), and which they are."""
    torch.manual_seed(0)
    known, which = torch.randn(10, 16), torch.randint(10, (count,))
    return TensorDataset(known[which] + 0.3 * torch.randn(count, 16), which)


def main() -> None:
    """Train on the ranks that torchrun (or `accelerate launch`) started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="training steps (default: 30)")
    steps = parser.parse_args().steps

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(patterns(steps * 16 * accelerator.num_processes), batch_size=16)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = attach(accelerator.prepare(model, optimizer, loader))  # the one line

    losses = []
    for seen, which in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(seen), which)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
        ringside.log_step(loss=losses[-1])  # optional: the loss goes into the record, too

    attachment = attachment_of(model)
    if accelerator.is_main_process and attachment is not None and attachment.session is not None:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        print("gradients reduced by", ", ".join(f"{who}: {count}" for who, count in attachment.counters.items()))
        print("recorded in", attachment.session.path)
    accelerator.end_training()


if __name__ == "__main__":
    main()
