"""The training script of `ringside demo --kill`: the demo's GPT, every step a transaction.

It says what happens on stdout, a line of JSON behind `MARK` each, and does not know who is going to be killed. Training
ends some steps after a rank has come back; all ranks see that in the same step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ringside.demo.corpus import Corpus
from ringside.demo.model import SIZES, ByteGPT
from ringside.demo.train import make_optimizer, make_parser
from ringside.engine.topology import usable_cores
from ringside.survive import Step, Training, training

MARK = "@survival "
AFTERWARDS = 20
"""Steps after everybody is back."""


class Windows(torch.utils.data.Dataset[Tensor]):
    """Neighbouring pieces of a text.

    Args:
        corpus: The text.
        context: Bytes per piece; one more is given, for the last prediction.
    """

    def __init__(self, corpus: Corpus, context: int) -> None:
        self._text, self._context = corpus.text, context

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, index: int) -> Tensor:
        """Return int64 [context + 1]."""
        start = index * self._context
        return torch.from_numpy(self._text[start : start + self._context + 1].astype("int64"))


class TrainingEnd:
    """When all ranks may stop: some steps after the membership is whole again.

    Args:
        ranks: How many there are.
        joined: Whether this process came later: it only ever saw the membership whole.
    """

    def __init__(self, ranks: int, joined: bool) -> None:
        self._ranks, self._broken, self._since = ranks, joined, 0

    def reached(self, step: Step) -> bool:
        """Take in a step; return whether it is the last."""
        whole = len(step.members) == self._ranks
        self._broken = self._broken or not whole
        self._since = self._since + 1 if self._broken and whole else 0
        return self._since > AFTERWARDS


def summed_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the sum over samples of their mean loss in nats per byte."""
    loss: Tensor = model(batch) * len(batch)
    return loss


def emit(**fields: Any) -> None:
    """Tell the parent, in one write: all ranks share a pipe."""
    line = MARK + json.dumps({"rank": int(os.environ["RANK"]), "at": time.monotonic(), **fields}) + "\n"
    os.write(sys.stdout.fileno(), line.encode())


def run(options: argparse.Namespace) -> None:
    """Train on this rank."""
    ranks, size = int(os.environ["WORLD_SIZE"]), SIZES[options.size]
    torch.set_num_threads(max(usable_cores() // ranks, 1))
    torch.manual_seed(options.seed)
    model = ByteGPT(size)
    dataset = Windows(Corpus(options.corpus, 0, 1, size.context), size.context)
    settings = {"batch_size": size.batch * ranks, "steps": options.steps, "seed": options.seed}
    with training(model, make_optimizer(model), dataset, loss_fn=summed_loss, **settings) as t:
        end, last = TrainingEnd(ranks, joined=t.joined), -1
        emit(event="up", joined=t.joined, pid=os.getpid())
        for step in t:
            last = step.number
            emit(event="step", step=step.number, loss=step.loss, members=step.members, generation=step.generation)
            if end.reached(step):
                break
        conclude(t, last)


def conclude(t: Training, last: int) -> None:
    """Say what the decision log says, which is the same for all, and what this rank's state is."""
    committed = t.committed(last + 1)
    first_samples = [decision.first for decision in committed]
    taken = sum(decision.samples for decision in committed)
    expected = sum(len(t.samples.of_step(step)) for step in range(last + 1))
    twice = len(first_samples) - len(set(first_samples))
    emit(event="end", step=last, samples=taken, lost=expected - taken, twice=twice, digest=f"{t.digest():016x}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train on this rank; return the exit status."""
    run(make_parser("ringside.demo.survive").parse_args(arguments))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
