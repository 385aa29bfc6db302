"""A Lightning Trainer, synchronised and watched: only the callback is added, and Lightning also finds it without.

    torchrun --nproc-per-node 2 examples/integrations_lightning.py --steps 30

Without the lines with `ringside` the training is recorded, too: the package registers its callback at Lightning's
entry point (`RINGSIDE=off` prevents that). Every rank learns to recognise ten noisy patterns. It requires
`pip install lightning`.
"""

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ringside.integrations.lightning import RingsideCallback


class Patterns(lightning.LightningModule):
    """Tells which of ten patterns it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        """Take patterns, shape (samples, 16), and which they are; return the loss."""
        seen, which = batch
        return nn.functional.cross_entropy(self.net(seen), which)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def patterns(count: int) -> TensorDataset:
    """Return noisy patterns, shape (count, 16), and which they are."""
    torch.manual_seed(0)
    known, which = torch.randn(10, 16), torch.randint(10, (count,))
    return TensorDataset(known[which] + 0.3 * torch.randn(count, 16), which)


def main() -> None:
    """Train on the ranks that torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="training steps (default: 30)")
    steps = parser.parse_args().steps

    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=steps, accumulate_grad_batches=2,
        callbacks=[RingsideCallback()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Patterns(), DataLoader(patterns(steps * 64), batch_size=16))

    callbacks = trainer.callbacks  # type: ignore[attr-defined, unused-ignore]  # Lightning sets it elsewhere
    watching = [callback for callback in callbacks if getattr(callback, "attachment", None)]
    if trainer.is_global_zero and watching:
        attachment = watching[0].attachment
        print("gradients reduced by", ", ".join(f"{who}: {count}" for who, count in attachment.counters.items()))
        print("recorded in", attachment.session.path)


if __name__ == "__main__":
    main()
