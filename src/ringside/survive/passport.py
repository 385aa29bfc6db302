"""What makes a worker one of ours: the code it runs, its model, its optimizer, how its samples are cut.

The first worker of a job writes it down once. Whoever comes later and differs is refused by name, before it has touched
anything.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sized
from pathlib import Path

import msgspec
import torch
from torch import nn

import ringside
from ringside.decoding import UNDECODABLE
from ringside.errors import MismatchError
from ringside.survive.samples import Samples


def passport_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, dataset: object, samples: Samples, seed: int
) -> dict[str, str]:
    """Return what this worker is, by name."""
    return {
        "the version of ringside": ringside.__version__,
        "the version of torch": str(torch.__version__),
        "the script": _script(),
        "the model": _hash(_shapes(model)),
        "the optimizer": f"{type(optimizer).__name__} with {len(optimizer.param_groups)} groups",
        "the data set": f"{len(dataset)} samples" if isinstance(dataset, Sized) else "no length",
        "an epoch": f"{samples.size} samples",
        "the batch": f"{samples.batch} samples",
        "the micro-batches": str(samples.micro_batches),
        "the seed": str(seed),
    }


def encode(passport: Mapping[str, str]) -> bytes:
    """Return it as bytes."""
    return msgspec.json.encode(passport)


def refuse_strangers(own: Mapping[str, str], standing: bytes, name: str) -> None:
    """Raise `MismatchError` unless this worker is what the job's first one wrote down.

    Args:
        own: This worker's.
        standing: What was written down first.
        name: Who this worker is, in words.
    """
    try:
        first = msgspec.json.decode(standing, type=dict[str, str])
    except UNDECODABLE:
        raise MismatchError(
            f"{name} is refused: another job uses this one's name in the store; give it another"
        ) from None
    different = [
        f"{what} ({own.get(what, 'nothing')} here, {first.get(what, 'nothing')} there)"
        for what in sorted({*own, *first})
        if own.get(what) != first.get(what)
    ]
    if different:
        raise MismatchError(
            f"{name} is refused, it differs from the job it wants to join in {'; '.join(different)}: start it with the "
            "same code and settings, or start a new job"
        )


def _script() -> str:
    """Return the name of the script that runs and a digest of its text."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None or not Path(path).is_file():
        return "none"
    return f"{Path(path).name} {_hash(Path(path).read_bytes())}"


def _shapes(model: nn.Module) -> bytes:
    lines = [
        f"{name} {tuple(t.shape)} {t.dtype} {t.requires_grad}" for name, t in model.state_dict(keep_vars=True).items()
    ]
    return "\n".join([type(model).__name__, *lines]).encode()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
