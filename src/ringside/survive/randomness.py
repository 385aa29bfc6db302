"""Random numbers keyed by (seed, step, micro-batch): whoever computes a micro-batch draws the same ones."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


def key_of(*numbers: int) -> int:
    """Return 32 bits that stand for a few whole numbers, at least 0, in order."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def seed_all(key: int) -> None:
    """Seed Python's, NumPy's and PyTorch's generators (of all devices) with 32 bits."""
    random.seed(key)
    np.random.seed(key)
    torch.manual_seed(key)


@contextlib.contextmanager
def drawing_from(*numbers: int) -> Iterator[None]:
    """Within it the global generators draw what (seed, step, micro-batch) says; afterwards they go on as before."""
    python, array = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        seed_all(key_of(*numbers))
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)
