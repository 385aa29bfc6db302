"""`model.join()`: ranks with fewer batches than others, and gradients divided by the ranks that go on."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.pytorch.groups import own_machines  # noqa: E402
from tests.pytorch.training import build, ddp_ranks, group, same_bits  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringside  # noqa: E402

pytestmark = pytest.mark.native


def uneven(rank: int, engine: str | None, initial: bool, dtype: torch.dtype) -> tuple[list[Any], dict[str, int]]:
    """Train on as many batches as the rank has, twice, and once more without `join`; return gradients and weights."""
    model = DistributedDataParallel(build("mlp", dtype), bucket_cap_mb=0.01)
    attachment = ringside.attach(model, engine=engine, monitor=False) if engine else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []

    def train(steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * rank + step)).to(dtype)
            model(x).square().mean().backward()
            optimizer.step()
            found.extend(p.grad.clone() for p in model.parameters())

    for more in (2, 1):
        with model.join(divide_by_initial_world_size=initial):
            train(1 + more * rank)
    train(2)
    found.extend(p.detach().clone() for p in model.parameters())
    return found, attachment.counters if attachment is not None else {}


def alike(port: int, engine: str, initial: bool, dtype: torch.dtype) -> tuple[bool, float, set[str]]:
    with group(port) as rank:
        stock, _ = uneven(rank, None, initial, dtype)
        found, counters = uneven(rank, engine, initial, dtype)
        same = len(stock) == len(found) and all(map(same_bits, stock, found))
        return same, max(float((a - b).abs().max()) for a, b in zip(stock, found, strict=True)), set(counters)


def alike_between(port: int, *case: Any) -> tuple[bool, float, set[str]]:
    with own_machines():
        return alike(port, *case)


@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("engine", ["ringside", "native"])
def test_gradients_are_divided_as_by_stock_ddp(engine: str, initial: bool) -> None:
    for same, _, counters in ddp_ranks(2, alike, engine, initial, torch.float32):
        assert same
        assert {name.split("/")[0] for name in counters} == {"gloo" if engine == "native" else "ringside"}


def test_of_three_ranks_too() -> None:
    for _, gap, _ in ddp_ranks(3, alike, "ringside", False, torch.float32):
        assert gap < 1e-6  # three numbers are not added in Gloo's order


def test_between_hosts_too() -> None:
    for same, _, counters in ddp_ranks(2, alike_between, "ringside", False, torch.float64):
        assert same
        assert counters
        assert all(name.startswith("ringside/") for name in counters)
