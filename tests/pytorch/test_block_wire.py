"""float32 in blocks of 8-bit codes between real ranks: the same bits on all, what travels whole, and DDP's feedback."""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from tests.engine.oracle import digest  # noqa: E402
from tests.support.ranks import on_ranks, place  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringside  # noqa: E402
from ringside.pytorch.ddp.attached_model import own_hook  # noqa: E402

from .groups import communicator, meeting_point, own_machines  # noqa: E402
from .training import Said, ddp_outcomes, ddp_ranks, group  # noqa: E402

pytestmark = pytest.mark.native

HALF_STEP = {"int8": 1 / 127, "fp8_e4m3": 1 / 14}
"""Of the largest magnitude of a block, at most."""
LAYOUTS = {"two hosts of two": [0, 0, 1, 1], "three and two": [0, 0, 0, 1, 1]}
LARGE = 700_001  # goes over hosts in pieces


def contribution(rank: int, count: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([rank, count]).standard_normal(count).astype(np.float32))


def bits(x: torch.Tensor) -> int:
    return digest(x.view(torch.int32).numpy())


def sent_bytes(comm: Any) -> int:
    exchanges = map(comm.buckets.across.channels.exchange, (0, 1))
    return sum(sum(exchange.sent_bytes.values()) for exchange in exchanges)


def over_blocks(path: str, hosts: list[int], code: str) -> list[Any]:
    size, found = len(hosts), []
    if place().rank >= size:
        return []
    with Said() as said, communicator(path, hosts, wire_dtype=code) as comm:
        cases = [(form, 9001) for form in ("ring", "tree", "direct", "one_shot", "hosts/tree", "leaders/ring*2")]
        cases += [("hosts/ring", LARGE), ("hosts/recursive_doubling", LARGE)]
        for form, count in cases:
            inputs = [contribution(rank, count) for rank in range(size)]
            exact = torch.stack(inputs).double().sum(0)
            for op, by in (("sum", 1), ("avg", size)):
                x = inputs[comm.rank].clone()
                comm.all_reduce(x, op, algorithm=form)
                # Of all blocks the largest magnitude; up to `size` times a partial sum travels, and once the result.
                most = float(torch.stack(inputs).abs().sum(0).max())
                assert float((x * by - exact).abs().max()) <= (size + 1) * most * HALF_STEP[code] * 1.1, form
                found.append(bits(x))
        odd = contribution(comm.rank, 100)
        odd[70] = float("nan") if comm.rank == 1 else 1.0
        comm.all_reduce(odd, algorithm="hosts/ring")
        assert odd[70].isnan()
        assert odd[:10].isfinite().all()
        found.append(bits(odd.nan_to_num(7.0)))
        # What is no sum of float32 travels as it is, to the bit, which is said once.
        assert not said.about("travel as they are")
        whole = torch.arange(200) + comm.rank
        comm.all_reduce(whole, algorithm="hosts/ring")
        assert (whole == size * torch.arange(200) + sum(range(size))).all()
        for _ in range(2):
            most = contribution(comm.rank, 1000)
            comm.all_reduce(most, "max", algorithm="hosts/ring")
            assert (most == torch.stack([contribution(rank, 1000) for rank in range(size)]).amax(0)).all()
        assert len(said.about(f"wire_dtype='{code}' is for sums and means of float32")) == 1
        machine = f"host {hosts[comm.rank]}"
        with ringside.communicator(machine=machine, algorithm="ring", timeout=30.0) as whole_floats:
            sent = []
            for each in (comm, whole_floats):
                before = sent_bytes(each)
                each.all_reduce(contribution(comm.rank, LARGE), algorithm="hosts/ring")
                sent.append(sent_bytes(each) - before)
            assert sent[0] <= 0.27 * sent[1]
    return found


@pytest.mark.parametrize("code", HALF_STEP)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_ends_with_the_same_bits(layout: str, code: str) -> None:
    hosts = LAYOUTS[layout]
    with meeting_point() as path:
        digests = on_ranks(5, over_blocks, path, hosts, code, limit_s=150.0)[: len(hosts)]
    assert all(one == digests[0] for one in digests), "ranks hold different bits"


def reduced_in_order(port: int, machines: str, code: str) -> list[int]:
    """By every algorithm that may be."""
    found = []
    with group(port) as rank:
        options: dict[str, Any] = {"reproducible": True, "wire_dtype": code, "machine": machines[rank]}
        with ringside.communicator(timeout=40.0, **options) as comm:
            for name in (None, "direct", "one_shot", "parameter_server"):
                x = contribution(rank, 30_001)
                comm.all_reduce(x, "avg", algorithm=name)
                found.append(bits(x))
            with pytest.raises(ringside.UsageError, match="chain does not"):
                comm.all_reduce(x, algorithm="chain")
    return found


@pytest.mark.parametrize("code", [*HALF_STEP, "bfloat16"])
def test_reproducible_sums_are_rounded_alike_by_every_algorithm_on_every_placement(code: str) -> None:
    found = [ddp_ranks(4, reduced_in_order, machines, code) for machines in ("aabb", "abab", "abcd")]
    assert len({one for ranks in found for digests in ranks for one in digests}) == 1


def differs(port: int) -> None:
    with group(port) as rank:
        ringside.communicator(wire_dtype=("int8", "fp8_e4m3")[rank], machine=f"machine {rank}", timeout=20.0)


def test_ranks_that_disagree_are_told() -> None:
    for outcome in ddp_outcomes(2, differs):
        assert outcome.error == "MismatchError"
        assert "wire_dtype (RINGSIDE_WIRE_DTYPE)" in outcome.message


# ------------------------------------------------------------------------------------------------ gradients


def trained(port: int, feeds_back: str) -> dict[str, Any]:
    """Steps of two backwards each, the first in `no_sync`; what was kept, and what was said."""
    logging.getLogger("ringside").setLevel(logging.INFO)
    os.environ |= {"RINGSIDE_WIRE_DTYPE": "int8", "RINGSIDE_ERROR_FEEDBACK": feeds_back}
    found: dict[str, Any] = {}
    with own_machines(), group(port) as rank, Said() as said:
        torch.manual_seed(0)
        model = DistributedDataParallel(
            torch.nn.Sequential(*(torch.nn.Linear(30, 30) for _ in range(3))), bucket_cap_mb=0.004
        )
        attachment = ringside.attach(model, engine="ringside", monitor=False)
        hook: Any = own_hook(model)
        feedback = hook.reducer.feedback
        found["feeds back"] = feedback is not None
        kept = residuals(feedback)
        for step in range(12):
            x = torch.from_numpy(np.random.default_rng([rank, step]).standard_normal((4, 30)).astype(np.float32))
            model.zero_grad()
            with model.no_sync():
                model(x).sum().backward()
            assert all((a == b).all() for a, b in zip(kept, residuals(feedback), strict=True))
            model(x).sum().backward()
            kept = residuals(feedback)
        found["bits"] = [bits(p.grad) for p in model.parameters()]
        found["kept"] = float(sum(abs(r).sum() for r in kept))
        model.module.load_state_dict(model.module.state_dict())
        found["kept after loading"] = float(sum(abs(r).sum() for r in residuals(feedback)))
        found["said"] = said.about("begins at zero")
        attachment.detach()
    return found


def residuals(feedback: Any) -> list[np.ndarray[Any, Any]]:
    return [] if feedback is None else [kept.residual.copy() for kept in feedback.kept]


def test_what_is_rounded_away_of_gradients_is_kept_for_the_next_step() -> None:
    results = ddp_ranks(2, trained, "1")
    for found in results:
        assert found["feeds back"]
        assert found["bits"] == results[0]["bits"], "ranks hold different gradients"
        assert found["kept"] > 0
        assert found["kept after loading"] == 0
        assert len(found["said"]) == 2  # DDP has made its buckets anew, and a checkpoint was loaded
        assert "made its buckets anew" in found["said"][0]
        assert "parameters were loaded" in found["said"][1]


def test_feedback_can_be_switched_off() -> None:
    results = ddp_ranks(2, trained, "0")
    for found in results:
        assert not found["feeds back"]
        assert found["bits"] == results[0]["bits"]
        assert found["kept"] == 0
