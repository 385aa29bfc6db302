"""`communicator(group)` on processes that pretend to be on several hosts: every form, dtype and reduction."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.oracle import ALLOWED, digest
from tests.support.ranks import on_ranks, place

import ringside
from ringside._core import numpy_kernels as twins
from ringside.engine.algorithm import AlgorithmSpec
from ringside.errors import UnsupportedError, UsageError

from .groups import communicator, meeting_point

pytestmark = pytest.mark.native

TEAM = 5
LIMIT_S = 150.0
LAYOUTS = {
    "two hosts of two": [0, 0, 1, 1],
    "interleaved": [0, 1, 0, 1],
    "three and two": [0, 0, 0, 1, 1],
    "one rank each": [0, 1, 2, 3],
}
FORMS = (
    "ring",
    "direct",
    "tree*3",
    "two_tree",
    "ring@1,0,3,2",
    "hosts/ring",
    "hosts/tree",
    "hosts/one_shot",
    "hosts/recursive_doubling*2",
    "hosts/ring@1,0",
    "hosts/native",
    "leaders/tree*4",
    "leaders/parameter_server",
    "leaders/native",
    "native",
)
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


def forms_for(hosts: list[int]) -> list[str]:
    """The forms whose orders are orders of these ranks or hosts."""
    sizes = {"": len(hosts), "hosts": len(set(hosts))}
    fitting = [text for text in FORMS if "@" not in text]
    for text in set(FORMS) - set(fitting):
        if len(AlgorithmSpec.parse(text).order) == sizes[text.rpartition("/")[0]]:
            fitting.append(text)
    return sorted(fitting)


def tensor(dtype: str, count: int, rank: int, op: str = "sum") -> Any:
    """A rank's input: numbers of mixed signs and sizes; near 1 where they are to be multiplied."""
    rng = np.random.default_rng([count, rank, *dtype.encode()])
    if dtype == "bool":
        return torch.from_numpy(rng.integers(0, 2, count).astype(bool))
    if dtype not in UNIT:
        return torch.from_numpy(rng.integers(-100, 100, count)).to(getattr(torch, dtype))
    wide = (
        rng.uniform(0.5, 1.5, count) if op == "prod" else rng.standard_normal(count) * 2.0 ** rng.integers(-6, 6, count)
    )
    return torch.from_numpy(wide).to(getattr(torch, dtype))


def is_asked(comm: Any, turn: int) -> bool:
    """Whether it is this rank that compares a result with what it must be: all hold the same bits, as digests tell."""
    return bool(comm.rank == turn % comm.size)


def bits(x: Any) -> np.ndarray[Any, Any]:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.view(kind).numpy()


def wrong(x: Any, inputs: list[Any], dtype: str, op: str, scale: float = 1.0, roundings: float = 0) -> str:
    """Return "" where a result is what it must be: integers to the bit, floats within their roundings."""
    stored = [one.view(torch.int16).numpy().view(np.uint16) if dtype == "bfloat16" else one.numpy() for one in inputs]
    if dtype not in UNIT or op in ("min", "max"):
        want = twins.fold(stored, dtype, op, divisor=len(inputs))
        return "" if digest(want) == digest(bits(x)) else f"{x} instead of {want}"
    wide = np.stack([one.double().numpy() for one in inputs]) * scale
    want = wide.prod(0) if op == "prod" else wide.sum(0)
    size = np.abs(want) if op == "prod" else np.abs(wide).sum(0)
    if op == "avg":
        want, size = want / len(inputs), size / len(inputs)
    allowed = (roundings or len(inputs) + 3) * UNIT[dtype] * size + 1e-7 * (dtype == "float16")
    error = np.abs(x.double().numpy() - want)
    at = int(np.argmax(error - allowed)) if len(error) else 0
    return f"element {at}: {x[at]} instead of {want[at]}" if (error > allowed).any() else ""


def gloo_has(dtype: str, op: str) -> bool:
    bitwise = op in ("band", "bor", "bxor")
    return dtype not in ("int16", "bool") and not (bitwise and dtype in UNIT)


def every_form(path: str, hosts: list[int]) -> list[int] | None:
    size = len(hosts)
    if place().rank >= size:
        return None
    digests = []
    with communicator(path, hosts) as comm:
        rng = random.Random(3)
        for form in forms_for(hosts):
            cases = [("float32", "sum", count) for count in (0, 1, 1000, 70_001)]
            cases += [(dtype, op, 257) for dtype, op in rng.sample(ALLOWED, 6)]
            cases += [(dtype, "avg", 501) for dtype in rng.sample(sorted(UNIT), 2)]
            for dtype, op, count in cases:
                if "native" in form and not gloo_has(dtype, op):
                    continue
                scale = 0.3 if dtype in UNIT and op in ("sum", "avg") and count in (501, 1000) else 1.0
                x = tensor(dtype, count, comm.rank, op)
                assert comm.all_reduce(x, op, scale=scale, algorithm=form) is x
                if is_asked(comm, len(digests)):
                    fault = wrong(x, [tensor(dtype, count, rank, op) for rank in range(size)], dtype, op, scale)
                    assert not fault, f"{form}: {dtype} {op} of {count}, scale {scale}: {fault}"
                digests.append(digest(bits(x)))
    return digests


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_form(layout: str) -> None:
    hosts = LAYOUTS[layout]
    with meeting_point() as path:
        digests = on_ranks(TEAM, every_form, path, hosts, limit_s=LIMIT_S)[: len(hosts)]
    assert digests[0]
    assert all(one == digests[0] for one in digests), "ranks hold different bits"


def several_blocks(path: str, hosts: list[int]) -> list[int] | None:
    size = len(hosts)
    if place().rank >= size:
        return None
    found = []
    with communicator(path, hosts) as comm:
        for form, count in (("hosts/ring", 3_500_003), ("leaders/tree*4", 2_300_000), ("hosts/native", 1_200_001)):
            x = tensor("float32", count, comm.rank)
            comm.all_reduce(x, "avg", scale=2.0, algorithm=form)
            if is_asked(comm, len(found)):
                fault = wrong(x, [tensor("float32", count, rank) for rank in range(size)], "float32", "avg", 2.0)
                assert not fault, f"{form}: {fault}"
            found.append(digest(bits(x)))
        shared = comm.empty(2_000_000, torch.float32)
        shared[:] = float(comm.rank)
        comm.all_reduce(shared, algorithm="hosts/ring")
        assert (shared == sum(range(size))).all()
    return found


@pytest.mark.parametrize("layout", ["two hosts of two", "three and two"])
def test_a_large_tensor_goes_in_blocks(layout: str) -> None:
    hosts = LAYOUTS[layout]
    with meeting_point() as path:
        digests = on_ranks(TEAM, several_blocks, path, hosts, limit_s=LIMIT_S)[: len(hosts)]
    assert all(one == digests[0] for one in digests), "ranks hold different bits"


def streamed(path: str, hosts: list[int]) -> list[int]:
    """Among three and four hosts: several chunks a round, several segments a chunk, orders of their own."""
    size, found = len(hosts), []
    with communicator(path, hosts) as comm:
        for form in ("hosts/halving_doubling", "hosts/recursive_doubling", "leaders/two_tree"):
            x = tensor("float32", 1_300_001, comm.rank)
            comm.all_reduce(x, "avg", algorithm=form)
            if is_asked(comm, len(found)):
                inputs = [tensor("float32", 1_300_001, rank) for rank in range(size)]
                assert not wrong(x, inputs, "float32", "avg"), form
            found.append(digest(bits(x)))
    return found


@pytest.mark.parametrize("hosts", [[0, 0, 1, 2, 3], [0, 0, 1, 2, 2]])
def test_large_tensors_stream_between_several_hosts(hosts: list[int]) -> None:
    with meeting_point() as path:
        digests = on_ranks(TEAM, streamed, path, hosts, limit_s=LIMIT_S)
    assert all(one == digests[0] for one in digests), "ranks hold different bits"


# ------------------------------------------------------------------------------------------------ the wire's dtype


def over_a_narrow_wire(path: str, hosts: list[int], wire: str) -> list[int] | None:
    size, digests = len(hosts), []
    if place().rank >= size:
        return None
    with communicator(path, hosts, wire_dtype=wire) as comm:
        for form in ("ring", "tree", "direct", "halving_doubling", "hosts/ring", "hosts/tree", "leaders/ring*2"):
            choice = AlgorithmSpec.parse(form)
            vertices = size if choice.over == "ranks" else len(set(hosts))
            for op in ("sum", "avg"):
                x = tensor("float32", 9001, comm.rank)
                comm.all_reduce(x, op, algorithm=form)
                # As `ringside.engine.net.exchange.compression` states it: k rounds in which partial sums travel, and
                # one more at the end.
                units = (choice.schedule(vertices).rounds + 1) * UNIT[wire] / UNIT["float32"]
                if is_asked(comm, len(digests)):
                    inputs = [tensor("float32", 9001, rank) for rank in range(size)]
                    fault = wrong(x, inputs, "float32", op, roundings=units + size + 3)
                    assert not fault, f"{form} {op} over {wire}: {fault}"
                digests.append(digest(bits(x)))
            odd = torch.zeros(7)
            odd[:3] = torch.tensor([float("nan"), float("inf"), float("-inf")]) if comm.rank == 1 else 1.0
            odd[3] = float("inf") if comm.rank % 2 else float("-inf")
            comm.all_reduce(odd, algorithm=form)
            assert odd.isnan().tolist() == [True, False, False, True, False, False, False], f"{form}: {odd}"
            assert odd[1:3].tolist() == [float("inf"), float("-inf")]
            digests.append(digest(bits(odd[1:3].clone())))
            whole = torch.arange(200) % 100 + comm.rank  # what is not float32 travels as it is
            comm.all_reduce(whole, algorithm=form)
            assert (whole == size * (torch.arange(200) % 100) + sum(range(size))).all()
    return digests


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["two hosts of two", "three and two"])
def test_a_narrow_wire(layout: str, wire: str) -> None:
    hosts = LAYOUTS[layout]
    with meeting_point() as path:
        digests = on_ranks(TEAM, over_a_narrow_wire, path, hosts, wire, limit_s=LIMIT_S)[: len(hosts)]
    assert all(one == digests[0] for one in digests), "ranks hold different bits"


# ------------------------------------------------------------------------------------------------ in order


def in_the_background(path: str, hosts: list[int]) -> None:
    with communicator(path, hosts) as comm:
        tensors = [torch.full((size,), float(comm.rank)) for size in (1, 1000, 100_000, 3)]
        works = [comm.all_reduce(x, async_op=True, algorithm=f) for x, f in zip(tensors, FORMS, strict=False)]
        later = torch.ones(5)
        comm.all_reduce(later, algorithm="hosts/ring")  # after all that are under way
        assert all(work.is_completed() for work in works)
        assert (later == 4).all()
        for work, x in zip(works, tensors, strict=True):
            assert work.result() is x
            assert (x == 6).all()
        x = torch.ones(10)
        works = [comm.all_reduce(x, async_op=True, algorithm=("ring", "hosts/tree")[k % 2]) for k in range(6)]
        works[-1].wait()
        assert (x == 4.0**6).all(), "not carried out one after the other"
        work = comm.all_reduce(x, async_op=True)
    work.wait()  # closing finishes what is under way
    assert (x == 4.0**7).all()


def test_asynchronous_collectives_run_in_order() -> None:
    with meeting_point() as path:
        on_ranks(4, in_the_background, path, LAYOUTS["two hosts of two"])


# ------------------------------------------------------------------------------------------------ refused


def refused(path: str) -> None:
    with communicator(path, LAYOUTS["two hosts of two"]) as comm:
        with pytest.raises(
            UsageError, match=r"no algorithm 'rign' \(did you mean ring\?\); .*, each also as hosts/NAME"
        ):
            comm.all_reduce(torch.ones(3), algorithm="rign")
        for text in ("hosts/ring*x", "ring@a,b", "nowhere/ring", "hosts/"):
            with pytest.raises(UsageError, match="there is no algorithm"):
                comm.all_reduce(torch.ones(3), algorithm=text)
        with pytest.raises(UsageError, match="order"):
            comm.all_reduce(torch.ones(3), algorithm="ring@0,1,2")
        with pytest.raises(UnsupportedError, match="int16"):
            comm.all_reduce(torch.ones(3, dtype=torch.int16), algorithm="native")
        with pytest.raises(UsageError, match="'int3'; there are bfloat16, float16, int8 and fp8_e4m3"):
            ringside.communicator(wire_dtype="int3", machine="x")
        x = torch.ones(3)
        comm.all_reduce(x)
        assert (x == 4).all(), "what was refused broke the communicator"


def test_what_cannot_be_is_refused_and_nothing_breaks() -> None:
    with meeting_point() as path:
        on_ranks(4, refused, path)


def alone(path: str) -> None:
    with communicator(path, [0]):
        pass


def test_a_group_of_one_is_refused() -> None:
    with meeting_point() as path, pytest.raises(Exception, match="at least 2 ranks, not 1"):
        on_ranks(1, alone, path)
