"""Small models trained on real ranks, with stock DDP and with Ringside, to be compared bit for bit.

Functions that run on ranks take a free port first and train inside `group(port)`.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Outcome, on_ranks, outcomes_of, place
from tests.support.waiting import free_port
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringside
from ringside.pytorch import Attachment
from ringside.pytorch.recording import session

LIMIT_S = 90.0

# torch's store asks the name server what 127.0.0.1 is called; a machine without a good one waits 5 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def ddp_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(port, *args)` on `size` ranks and return what each returned."""
    return on_ranks(size, function, free_port(), *args, limit_s=LIMIT_S)


def ddp_outcomes(size: int, function: Callable[..., Any], *args: Any) -> list[Outcome]:
    """Run `function(port, *args)`, which may fail, and return what became of each rank."""
    return outcomes_of(size, function, free_port(), *args, limit_s=LIMIT_S)


OLD_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 5)
compares_models_first = pytest.mark.skipif(
    "init_sync" not in inspect.signature(DistributedDataParallel).parameters,
    reason="DDP of this torch refuses different models itself",
)


@contextlib.contextmanager
def group(port: int) -> Iterator[int]:
    """Inside, Gloo connects the ranks; yields the rank. Afterwards no session and no group is left."""
    here = place()
    if here.rank != 0:
        _await_listener(port)
    store = dist.TCPStore("127.0.0.1", port, here.size, here.rank == 0, timedelta(seconds=60), wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=store, rank=here.rank, world_size=here.size, timeout=timedelta(seconds=LIMIT_S / 2)
    )
    try:
        yield here.rank
    finally:
        if (current := session.current()) is not None:
            current.end()
        _groups.append(dist.group.WORLD)
        dist.destroy_process_group()


# Whoever lets go of a DDP after its group was destroyed ends the group's threads, and holds the interpreter's lock. One
# of these may want it: DDP's broadcast of buffers can be the last that knows a tensor. torch hangs then, without
# Ringside, too. So groups stay until the process ends.
_groups: list[Any] = []


def _await_listener(port: int) -> None:
    """Return when rank 0 listens; the store's own client would try again seconds later only."""
    deadline = time.monotonic() + LIMIT_S / 2
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S / 2).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "rank 0 does not listen"
            time.sleep(0.005)  # there is nothing to wait on before it does


@contextlib.contextmanager
def run_directory() -> Iterator[Path]:
    """Yield a directory for this rank that is removed afterwards."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path) / "run"


class Said(logging.Handler):
    """Collects what Ringside logs, for `with Said() as said: ...`; `said.lines` holds the texts."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Said:
        logging.getLogger("ringside").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("ringside").removeHandler(self)

    def about(self, words: str) -> list[str]:
        return [line for line in self.lines if words in line]


# ------------------------------------------------------------------------------------------------------- models


def mlp(width: int = 64, layers: int = 3, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), activation()]
    return nn.Sequential(*parts, nn.Linear(width, 8))


class Convolutional(nn.Module):
    """Convolutions with BatchNorm, whose buffers DDP broadcasts in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        )
        self.head = nn.Linear(4 * 4 * 4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.view(-1, 1, 8, 8)).flatten(1))


class Transformer(nn.Module):
    """An embedding, one transformer layer, and a head that shares the embedding's weights if asked to."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 32)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(x[:, :8].abs().mul(7).long() % 32))).flatten(1)


class Branches(nn.Module):
    """Two branches of which each call uses one (or both); the other's parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(64, 32)
        self.left, self.right = nn.Linear(32, 8), nn.Linear(32, 8)
        self.use = "left"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.trunk(x))
        sides = {"left": [self.left], "right": [self.right], "both": [self.left, self.right]}[self.use]
        return torch.stack([side(hidden) for side in sides]).sum(0)


def frozen() -> nn.Module:
    model = mlp()
    for parameter in list(model.parameters())[2:4]:
        parameter.requires_grad = False
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "convolutional": Convolutional,
    "transformer": lambda: Transformer(tied=False),
    "shared": lambda: Transformer(tied=True),
    "frozen": frozen,
    "linear": lambda: mlp(activation=nn.Identity),
    "branches": Branches,
}


# ------------------------------------------------------------------------------------------------------- training


def build(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Make a model by name, the same in every process."""
    torch.manual_seed(7)
    return MODELS[name]().to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return this rank's batch of one step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, 64, generator=generator).to(dtype)


@dataclass
class Trained:
    """What training gave: per step every gradient, then every parameter and buffer; who carried it,
    and a digest of the parameters."""

    gradients: list[list[torch.Tensor | None]] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    digest: str = ""

    def difference(self, other: Trained) -> str:
        """Return "" if both hold the same bits, else the first place where they differ."""
        for step, (mine, theirs) in enumerate(zip(self.gradients, other.gradients, strict=True)):
            for at, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                if not same_bits(a, b):
                    return f"gradient {at} in step {step}"
        return next((f"state {name}" for name in self.state if not same_bits(self.state[name], other.state[name])), "")

    def gap(self, other: Trained) -> float:
        """Return the largest absolute difference of a parameter or buffer."""
        return max(float((self.state[k].double() - other.state[k].double()).abs().max()) for k in self.state)


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Tell whether two tensors are equal to the last bit (or both missing)."""
    if a is None or b is None:
        return a is b
    raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


def digest(model: nn.Module) -> str:
    """Return a hash of all parameters."""
    sums = hashlib.sha256()
    for parameter in model.parameters():
        sums.update(parameter.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sums.hexdigest()


@dataclass(frozen=True)
class Plan:
    """How to train: a model by name, its dtype, options of DDP, and what happens in each step.

    Args:
        uses: For `branches`: what each rank uses in step k is `uses[rank % len][k % len]`.
        accumulate: Forward and backward passes per step, all but the last inside `no_sync`.
        options: Keyword arguments of DistributedDataParallel; `bucket_cap_mb` is small, so that there are several.
    """

    model: str = "mlp"
    dtype: torch.dtype = torch.float32
    steps: int = 4
    accumulate: int = 1
    uses: Sequence[Sequence[str]] = ()
    options: dict[str, Any] = field(default_factory=dict)


def train(plan: Plan, rank: int, attach: bool, **how: Any) -> Trained:
    """Train on this rank as planned, with Ringside or with stock DDP."""
    ddp = DistributedDataParallel(build(plan.model, plan.dtype), **{"bucket_cap_mb": 0.01, **plan.options})
    attachment = ringside.attach(ddp, **{"monitor": False, **how}) if attach else None
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    trained = Trained()
    for step in range(plan.steps):
        one_step(ddp, optimizer, plan, rank, step)
        trained.gradients.append([copy.deepcopy(p.grad) for p in ddp.parameters()])
        optimizer.step()
    trained.state = {name: value.detach().clone() for name, value in ddp.module.state_dict().items()}
    trained.digest = digest(ddp)
    if attachment is not None:
        trained.counters = attachment.counters
        attachment.detach()
    return trained


def one_step(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, plan: Plan, rank: int, step: int) -> None:
    optimizer.zero_grad()
    for part in range(plan.accumulate):
        if plan.uses:
            row = plan.uses[rank % len(plan.uses)]
            ddp.module.use = row[step % len(row)]
        with contextlib.ExitStack() as stack:
            if part + 1 < plan.accumulate:
                stack.enter_context(ddp.no_sync())
            output = ddp(batch(rank, step * 10 + part, plan.dtype))
            output.abs().square().mean().backward()


def small_attachment(**how: Any) -> tuple[DistributedDataParallel, Attachment, torch.optim.Optimizer]:
    """Return an attached MLP and its optimizer."""
    ddp = DistributedDataParallel(build("mlp"), bucket_cap_mb=0.01)
    return ddp, ringside.attach(ddp, **how), torch.optim.SGD(ddp.parameters(), lr=0.01)


def steps(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, rank: int, count: int) -> None:
    """Train `count` steps."""
    for step in range(count):
        one_step(ddp, optimizer, Plan(), rank, step)
        optimizer.step()
