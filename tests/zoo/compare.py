"""Prints how the files of two runs differ, in a process in which Ringside cannot be imported.

    python compare.py STOCK OURS ULPS NAME...

Floats of 32 and 64 bits, and all else, are equal to the bit; halves differ by at most ULPS units in the last place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

for name in ("ringside", "ringside_autoload"):
    sys.modules[name] = None  # from here on `import ringside` raises ImportError

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

HALVES = (torch.float16, torch.bfloat16)


def differences(stock: Any, ours: Any, ulps: int, at: str = "") -> Iterator[str]:
    """Yield, in words, where two values differ."""
    if type(stock) is not type(ours):
        yield f"{at}: {type(stock).__name__} and {type(ours).__name__}"
    elif isinstance(stock, torch.Tensor):
        yield from _of_tensors(stock, ours, ulps, at)
    elif isinstance(stock, np.ndarray):
        yield from _of_tensors(torch.from_numpy(stock), torch.from_numpy(ours), ulps, at)
    elif isinstance(stock, Mapping):
        if list(stock) != list(ours):
            yield f"{at}: keys {list(stock)} and {list(ours)}"
        for key in stock.keys() & ours.keys():
            yield from differences(stock[key], ours[key], ulps, f"{at}[{key!r}]")
    elif isinstance(stock, (list, tuple)):
        if len(stock) != len(ours):
            yield f"{at}: {len(stock)} and {len(ours)} items"
        for index, (one, other) in enumerate(zip(stock, ours, strict=False)):
            yield from differences(one, other, ulps, f"{at}[{index}]")
    elif isinstance(stock, nn.Module):
        if sorted(stock.__dict__) != sorted(ours.__dict__):
            yield f"{at}: attributes differ by {sorted(stock.__dict__.keys() ^ ours.__dict__.keys())}"
        yield from differences(stock.state_dict(), ours.state_dict(), ulps, at)
    elif isinstance(stock, torch.optim.Optimizer):
        yield from differences(stock.state_dict(), ours.state_dict(), ulps, at)
    elif stock != ours:
        yield f"{at}: {stock!r} and {ours!r}"


def _of_tensors(stock: torch.Tensor, ours: torch.Tensor, ulps: int, at: str) -> Iterator[str]:
    if (stock.dtype, stock.shape, stock.stride()) != (ours.dtype, ours.shape, ours.stride()):
        yield f"{at}: {stock.dtype} {tuple(stock.shape)} and {ours.dtype} {tuple(ours.shape)}, or their strides"
    elif stock.dtype in HALVES:
        apart = (_ordered(stock) - _ordered(ours)).abs().max().item() if stock.numel() else 0
        if apart > ulps:
            yield f"{at}: {apart} units in the last place apart"
    elif stock.contiguous().numpy().tobytes() != ours.contiguous().numpy().tobytes():
        yield f"{at}: {(stock - ours).abs().max().item():g} apart"


def _ordered(halves: torch.Tensor) -> torch.Tensor:
    """Return integers that count the numbers of this type from zero on."""
    bits = halves.contiguous().view(torch.int16).to(torch.int32)
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def load(path: Path) -> Any:
    return np.load(path) if path.suffix == ".npy" else torch.load(path, weights_only=False)


def main(stock: str, ours: str, ulps: str, *names: str) -> None:
    sys.path.insert(0, str(Path(__file__).with_name("scripts")))
    # A DDP model that is loaded looks for its process group.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name in names:
        for words in differences(load(Path(stock, name)), load(Path(ours, name)), int(ulps)):
            print(f"{name}{words}")


if __name__ == "__main__":
    main(*sys.argv[1:])
