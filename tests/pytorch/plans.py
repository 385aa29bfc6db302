"""What is trained with stock Gloo DDP and with Ringside: every option of DDP."""

from __future__ import annotations

import torch

from .training import Plan, group, train


def both(port: int, plan: Plan) -> tuple[str, float, dict[str, int], str]:
    """Train with Gloo and with Ringside; tell where they differ, by how much, who carried, and a digest."""
    with group(port) as rank:
        stock = train(plan, rank, attach=False)
        ours = train(plan, rank, attach=True)
        return stock.difference(ours), stock.gap(ours), ours.counters, ours.digest


def assert_ours(counters: dict[str, int]) -> None:
    """Nothing may have fallen through to the process group."""
    assert counters, "nobody carried anything"
    assert all(name.startswith("ringside/") for name in counters), counters


VIEW = {"gradient_as_bucket_view": True}


BRANCHES = Plan("branches", steps=5, options={"find_unused_parameters": True})


PLANS: dict[str, Plan] = {
    **{name: Plan(name) for name in ("mlp", "convolutional", "transformer", "shared", "frozen")},
    **{f"{name} as view": Plan(name, options=VIEW) for name in ("mlp", "convolutional", "shared", "frozen")},
    "f64": Plan(dtype=torch.float64),
    "one bucket": Plan(options={"bucket_cap_mb": 25}),
    "buffers not broadcast": Plan("convolutional", options={"broadcast_buffers": False}),
    "accumulation": Plan(accumulate=3),
    "accumulation as view": Plan(accumulate=3, options=VIEW),
    "static graph": Plan(options={"static_graph": True}),
    "static graph as view": Plan("shared", options={"static_graph": True, **VIEW}),
    "static graph, unused branch": Plan("branches", options={"static_graph": True}),
    "complex, which DDP lays out as real": Plan("linear", dtype=torch.complex64),
    "unused differs between steps": Plan(**{**vars(BRANCHES), "uses": [["left", "right", "both"]]}),
    "unused differs between ranks": Plan(**{**vars(BRANCHES), "uses": [["left"], ["right"]]}),
    "unused, as view": Plan(
        "branches", steps=5, uses=[["left", "both"], ["right"]], options={"find_unused_parameters": True, **VIEW}
    ),
    "whole first bucket unused": Plan(
        "branches", uses=[["left"]], options={"find_unused_parameters": True, "bucket_cap_mb": 0.0005}
    ),
    "find_unused, none is": Plan(options={"find_unused_parameters": True}),
}
