"""A plain PyTorch script whose steps are transactions: kill any of its workers, and no sample is lost or counted twice.

    ringside run --survive -n 2 examples/survive.py --steps 200

(or `torchrun --nproc-per-node 2 -m ringside.survive examples/survive.py --steps 200`). Only the loop differs: forward,
backward and the optimizer's step are inside `training`, which repeats them where a rank dies.
"""

import argparse

import torch
from torch import nn

import ringside

DIGITS = "1110111 0010010 1011101 1011011 0111010 1101011 1101111 1010010 1111111 1111011"
SEGMENTS = torch.tensor([[float(lit) for lit in digit] for digit in DIGITS.split()])


class Pictures(torch.utils.data.Dataset):
    """Noisy pictures of seven-segment digits; the noise is drawn anew in every epoch, the same whoever draws it."""

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return SEGMENTS[index % 10] + 0.3 * torch.randn(7), index % 10


def loss(model, batch):
    """Return the sum over a batch's samples."""
    pictures, digits = batch
    return nn.functional.cross_entropy(model(pictures), digits, reduction="sum")


def main() -> None:
    """Train on the ranks that torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: 200)")
    parser.add_argument("--checkpoints", help="directory; training resumes from the newest checkpoint in it")
    options = parser.parse_args()

    torch.manual_seed(0)  # all ranks make the same model
    model = nn.Sequential(nn.Linear(7, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    with ringside.survive.training(
        model,
        optimizer,
        Pictures(),
        loss_fn=loss,
        batch_size=64,
        steps=options.steps,
        checkpoint_dir=options.checkpoints,
    ) as t:
        for step in t:
            losses.append(step.loss)
        if t.rank == 0:
            committed = t.committed(t.step)
            if losses:  # a rank that came back after the last step has the final state, and saw no step
                print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
            print(f"{len(committed)} steps, {sum(decision.samples for decision in committed)} samples, each once")


if __name__ == "__main__":
    main()
