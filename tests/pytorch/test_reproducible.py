"""Reproducible mode: the same bits whatever the algorithm, the message size, the bucket layout or the ranks' hosts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ringside  # noqa: E402
from ringside.engine.algorithm import canonical_algorithms  # noqa: E402
from ringside.schedule import by_name, verify  # noqa: E402

from .training import ddp_outcomes, ddp_ranks, group  # noqa: E402

pytestmark = pytest.mark.native

RANKS = 4
ELEMENTS = 3001
CASES = [(dtype, op) for dtype in ("float32", "float64", "float16", "bfloat16") for op in ("sum", "avg")]
# Ranks per host, as names of the machine that each rank is on.
PLACEMENTS = {
    "one host": "aaaa",
    "two and two": "aabb",
    "alternating": "abab",
    "three and one": "aaab",
    "alone": "abcd",
}


def contribution(rank: int, dtype: str) -> torch.Tensor:
    """Return numbers of very different magnitudes, so that the order of additions shows."""
    noise = np.random.default_rng(rank)
    values = noise.standard_normal(ELEMENTS) * 10.0 ** noise.integers(-3, 4, ELEMENTS)
    return torch.tensor(values, dtype=torch.float64).to(getattr(torch, dtype))


def bits(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def reduced(port: int, machines: str) -> dict[tuple[str, str, str], bytes]:
    """All-reduce the whole by every algorithm that may be, and in parts, as buckets do: every dtype, sum and mean."""
    with group(port) as rank, ringside.communicator(reproducible=True, machine=machines[rank], timeout=20.0) as comm:
        found = {}
        for dtype, op in CASES:
            names: list[str | None] = [None, "direct", "one_shot"]
            if len(set(machines)) > 1:
                names.append("parameter_server")
                if dtype in ("float32", "float64"):
                    names += ["chain", "chain*5"]
            for name in names:
                x = contribution(rank, dtype)
                found[dtype, op, str(name)] = bits(comm.all_reduce(x, op, algorithm=name))
            for cuts in ([1000, 2001], [1, 7, 2500]):
                parts = [part.clone() for part in contribution(rank, dtype).tensor_split(cuts)]
                for part in parts:
                    comm.all_reduce(part, op)
                found[dtype, op, f"cut at {cuts}"] = bits(torch.cat(parts))
        return found


def left_fold(dtype: str, op: str) -> bytes:
    """((x0 + x1) + x2) + x3, halves folded in float32 and rounded once."""
    wide = [contribution(rank, dtype) for rank in range(RANKS)]
    if dtype in ("float16", "bfloat16"):
        wide = [x.float() for x in wide]
    total = wide[0]
    for x in wide[1:]:
        total = total + x
    return bits((total / RANKS if op == "avg" else total).to(getattr(torch, dtype)))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_same_bits_by_every_algorithm_on_every_placement(placement: str) -> None:
    expected = {(dtype, op): left_fold(dtype, op) for dtype, op in CASES}
    for rank, found in enumerate(ddp_ranks(RANKS, reduced, PLACEMENTS[placement])):
        assert {case[:2] for case in found} == set(CASES)
        for (dtype, op, way), result in found.items():
            assert result == expected[dtype, op], f"{dtype}, {op}, {way}, rank {rank}"


def test_the_expression_that_verify_prints_certifies_it() -> None:
    names = canonical_algorithms(RANKS)
    assert {"direct", "one_shot", "chain", "parameter_server"} <= set(names)
    assert "ring" not in names
    for name in names:
        audit = verify(by_name(name, RANKS))
        assert {audit.expression(chunk) for chunk in range(audit.chunks)} == {"(((x0+x1)+x2)+x3)"}


def refused(port: int, machines: str, how: dict[str, Any], algorithm: str | None) -> None:
    with group(port) as rank, ringside.communicator(machine=machines[rank], timeout=20.0, **how) as comm:
        comm.all_reduce(torch.ones(8, dtype=torch.float16), algorithm=algorithm)


@pytest.mark.parametrize(
    ("machines", "how", "algorithm", "words"),
    [
        ("aabb", {"reproducible": True}, "ring", "adds in rank order, and ring does not"),
        ("aabb", {"reproducible": True}, "hosts/direct", "adds in rank order, and hosts/direct does not"),
        ("aabb", {"reproducible": True}, "chain", "adds in rank order, and chain does not"),
        ("aaaa", {"reproducible": True}, "ring", "adds in rank order, and ring does not"),
    ],
)
def test_what_would_not_be_reproducible_is_refused(
    machines: str, how: dict[str, Any], algorithm: str | None, words: str
) -> None:
    for outcome in ddp_outcomes(RANKS, refused, machines, how, algorithm):
        assert outcome.error == "UsageError"
        assert words in outcome.message
