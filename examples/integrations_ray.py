"""Ray Train's usual loop: `watched(...)` around it is the only line that changes.

    python examples/integrations_ray.py --steps 30

Two workers of a local cluster learn to recognise ten noisy patterns. It requires `pip install 'ray[train]'`.
"""

import argparse
from typing import Any

import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

import ringside
from ringside.integrations.ray import watched


def train(options: dict[str, Any]) -> None:
    """Train on one worker; Ray has made the process group."""
    torch.manual_seed(0)
    known = torch.randn(10, 16)
    model = prepare_model(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(options["steps"]):
        which = torch.randint(10, (16,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(known[which] + 0.3 * torch.randn(16, 16)), which)
        loss.backward()
        optimizer.step()
        ringside.log_step(loss=loss.item())  # optional: the loss goes into the record, too


def main() -> None:
    """Start two workers and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="training steps (default: 30)")
    parser.add_argument("--run-dir", help="where rank 0's worker records the run (default: a new one under runs/)")
    options = parser.parse_args()
    loop = watched(train, run_dir=options.run_dir)  # the one line
    trainer = TorchTrainer(
        loop, train_loop_config={"steps": options.steps}, scaling_config=ScalingConfig(num_workers=2)
    )
    trainer.fit()


if __name__ == "__main__":
    main()
