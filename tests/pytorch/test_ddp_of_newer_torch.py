"""What DDP can be asked for since torch 2.15: buckets made anew in every backward, and a backward finished by hand."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringside  # noqa: E402

from .process_groups import on_ours  # noqa: E402

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(
        "lazy_bucket_allocation" not in inspect.signature(DistributedDataParallel).parameters,
        reason="DDP makes its buckets lazily from torch 2.15 on",
    ),
]


def trained(group: Any, is_lazy: bool, by_hand: bool, are_views: bool, engine: str) -> tuple[torch.Tensor, str]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
    options: dict[str, Any] = {"lazy_bucket_allocation": is_lazy, "gradient_as_bucket_view": are_views}
    model: Any = DistributedDataParallel(layers, process_group=group, bucket_cap_mb=0.3, **options)
    attachment = ringside.attach(model, engine=engine, monitor=False) if engine else None
    if by_hand:
        model.require_manual_backward_finalization = True
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        if by_hand:
            model.finalize_backward()
        optimizer.step()
    carrier = ""
    if attachment is not None:
        carrier = attachment.engine
        attachment.detach()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), carrier


def every_way(rank: int) -> list[str]:
    """Train in every combination on Gloo alone, over our group, and attached; return those that came to other bits."""
    gloo, different = dist.new_group(backend="gloo"), []
    for is_lazy, by_hand, are_views in itertools.product((False, True), repeat=3):
        usual, _ = trained(gloo, is_lazy, by_hand, are_views, "")
        for group, engine in ((None, ""), (gloo, "ringside"), (gloo, "native"), (None, "ringside")):
            found, carrier = trained(group, is_lazy, by_hand, are_views, engine)
            if not torch.equal(found, usual) or (engine == "ringside" and carrier != "ringside"):
                different.append(f"{is_lazy} {by_hand} {are_views} {group} {engine}")
    return different


def test_lazy_buckets_and_a_backward_finished_by_hand_come_to_the_same_bits():
    assert on_ours(2, every_way) == [[], []]
