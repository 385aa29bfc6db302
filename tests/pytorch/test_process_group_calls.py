"""All that a call can say: both signatures of every method, and every dtype with every reduction, beside Gloo."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from ringside.engine import HostCommunicator  # noqa: E402
from ringside.errors import DeadlineError, UsageError  # noqa: E402
from ringside.pytorch.communicator.communicator import GroupCommunicator  # noqa: E402
from ringside.pytorch.process_group.arguments import normalize  # noqa: E402
from ringside.pytorch.process_group.carrier import carrier_of  # noqa: E402
from ringside.pytorch.process_group.collectives import (  # noqa: E402
    MOST_RANKS,
    MOST_READ_BYTES,
    TABLE,
    all_gather,
    broadcast,
    is_one_shot,
)

from .process_groups import OF_TODAY, on_both, on_ours  # noqa: E402

pytestmark = pytest.mark.native

Tensors = list[torch.Tensor]
MAX = dist.ReduceOp.MAX


# ------------------------------------------------------------------------------------------------ signatures


def forms(rank: int) -> list[Tensors]:
    """Call every method of a process group without options, by position and by name."""
    group: Any = dist.group.WORLD  # torch's stubs know some of the forms only
    size, limit = dist.get_world_size(), datetime.timedelta(seconds=60)
    x = torch.arange(4.0) + rank
    got: list[Tensors] = []

    def done(work: Any, *tensors: torch.Tensor) -> None:
        assert work.wait()
        got.append([tensor.clone() for tensor in tensors])

    done(group.allreduce(x), x)
    done(group.allreduce([x], MAX, limit), x)
    done(group.allreduce(tensor=x + rank, op=MAX, timeout=limit))
    done(group.broadcast(x, 1), x)
    done(group.broadcast(tensor=x, root=0, timeout=None), x)
    done(group.reduce(x, 0, MAX), *([x] if rank == 0 else []))
    done(group.reduce(x, root=0), *([x] if rank == 0 else []))
    x = torch.arange(4.0) + rank  # Gloo leaves odds and ends on the other ranks
    rows = [torch.zeros(4) for _ in range(size)]
    done(group.allgather(rows, x), *rows)
    done(group.allgather(output_tensors=[rows], input_tensors=[x * 2]), *rows)
    done(group.gather(rows if rank == 1 else [], x, 1), *(rows if rank == 1 else []))
    done(group.scatter(x, [row * 3 for row in rows] if rank == 0 else [], 0), x)
    done(group.reduce_scatter(x, rows, MAX), x)
    done(group.reduce_scatter(output=x, input=[x * (j + rank) for j in range(size)]), x)
    out = torch.zeros(4 * size)
    done(group.alltoall_base(out, torch.cat(rows), [], []), out)
    done(group.alltoall_base(out, torch.cat(rows), [4] * size, [4] * size, limit), out)
    done(group._allgather_base(out, input=x), out)
    done(group._reduce_scatter_base(x, out), x)
    done(group.allreduce_coalesced([x, out]), x, out)
    done(group.barrier(limit))
    return got


@OF_TODAY
def test_both_signatures_of_every_method_do_as_with_gloo():
    ours, theirs = on_both(2, forms)
    for mine, gloo in zip(ours, theirs, strict=True):
        assert [[each.tolist() for each in step] for step in mine] == [
            [each.tolist() for each in step] for step in gloo
        ]


def test_an_argument_that_no_method_has_is_refused():
    with pytest.raises(TypeError, match="'opt'"):
        normalize(TABLE[broadcast][0], (torch.zeros(1),), {"opt": 1})
    tensors = normalize(TABLE[all_gather][0], ([torch.zeros(1)], torch.zeros(1)), {})[:2]
    assert [type(each) for each in tensors] == [list, list]


def at_once_or_later(x: torch.Tensor, group: Any, later: bool) -> None:
    work = dist.all_reduce(x, group=group, async_op=later)
    if later:
        work.wait()


def short_limits(rank: int) -> list[str]:
    """Give one call a timeout, then the whole group one, that rank 1 does not keep; nothing is broken by it."""
    group, heard, x = dist.new_group([0, 1]), [], torch.ones(3)
    engine = carrier_of(group).engine
    options = dist.AllreduceOptions()
    options.timeout, options.asyncOp = datetime.timedelta(milliseconds=20), False
    late = [lambda: group.allreduce([x], options), lambda: group.allreduce(x, timeout=options.timeout).wait()]
    for way in late:
        if rank == 0:
            with pytest.raises(DeadlineError, match="all_reduce on rank 0: Timed out waiting 20ms") as caught:
                way()
            heard.append(str(caught.value))
        dist.barrier()
        if rank == 1:
            dist.all_reduce(torch.ones(3), group=group)
        dist.barrier()
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(milliseconds=30), group)
    for later in (False, True):
        if rank == 0:
            with pytest.raises(DeadlineError, match="Timed out waiting 30ms"):
                at_once_or_later(x, group, later)
        dist.barrier()
        if rank == 1:
            engine.run(lambda: engine.inside.all_reduce(torch.ones(3), algorithm="one_shot"))
        dist.barrier()
    group.set_timeout(datetime.timedelta(seconds=30))
    dist.all_reduce(x, group=group)
    heard.append(str(x.sum().item()))
    return heard


@OF_TODAY
def test_a_call_and_a_living_group_can_be_given_a_shorter_timeout():
    first, second = on_ours(2, short_limits)
    assert len(first) == 3
    assert first[-1] == second[-1] == "18.0"  # each of the four was carried out when rank 1 came, and the fifth too


def test_small_tensors_of_few_ranks_of_one_host_go_in_one_shot() -> None:
    def goes(size_bytes: int, ranks: int = 8, kind: type = HostCommunicator) -> bool:
        comm = Mock(spec=kind, size=ranks, inline_bytes=40_000)
        return is_one_shot(comm, size_bytes)

    assert goes(MOST_READ_BYTES // 8)
    assert not goes(MOST_READ_BYTES // 8 + 1), "all ranks read all of it"
    assert goes(40_000, ranks=2)
    assert not goes(40_001, ranks=2)
    assert not goes(4, ranks=MOST_RANKS + 1)
    assert not goes(4, ranks=2, kind=GroupCommunicator), "of several hosts"


# ------------------------------------------------------------------------------------------------ dtypes x reductions

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool]
DTYPES += [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64]
DTYPES += [torch.float8_e4m3fn, torch.complex32]
REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
NUMBERS = {*DTYPES[:6], *DTYPES[7:12], torch.complex32}


def numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    x = (torch.arange(count) * 7 + 3 * rank) % 5 + 1
    return x.float().to(dtype) if dtype.is_floating_point else (x % 2 if dtype == torch.bool else x).to(dtype)


def reductions(rank: int, size: int, dtype: torch.dtype, op: Any) -> Iterator[tuple[str, Callable[[], Tensors]]]:
    def all_reduce() -> Tensors:
        dist.all_reduce(x := numbers(rank, 7, dtype), op)
        return [x]

    def reduce() -> Tensors:
        dist.reduce(x := numbers(rank, 7, dtype), 0, op)
        return [x] if rank == 0 else []

    def reduce_scatter() -> Tensors:
        out = torch.empty(3, dtype=dtype)
        dist.reduce_scatter(out, [numbers(rank + j, 3, dtype) for j in range(size)], op)
        return [out]

    def reduce_scatter_tensor() -> Tensors:
        dist.reduce_scatter_tensor(out := torch.empty(3, dtype=dtype), numbers(rank, 3 * size, dtype), op)
        return [out]

    def all_reduce_coalesced() -> Tensors:
        xs = [numbers(rank, 7, dtype), numbers(rank, 0, dtype), numbers(rank, 5, dtype)]
        dist.all_reduce_coalesced(xs, op)
        return xs

    for case in (all_reduce, reduce, reduce_scatter, reduce_scatter_tensor, all_reduce_coalesced):
        yield case.__name__, case


def moves(rank: int, size: int, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Tensors]]]:
    def empty(count: int, *_: Any) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    def broadcast() -> Tensors:
        dist.broadcast(x := numbers(rank, 7, dtype), 1)
        return [x]

    def all_gather() -> Tensors:
        dist.all_gather(rows := [empty(7) for _ in range(size)], numbers(rank, 7, dtype))
        return rows

    def all_gather_into_tensor() -> Tensors:
        dist.all_gather_into_tensor(out := empty(7 * size), numbers(rank, 7, dtype))
        return [out]

    def gather() -> Tensors:
        dist.gather(numbers(rank, 7, dtype), rows := [empty(7) for _ in range(size)] if rank == 0 else None, 0)
        return rows or []

    def scatter() -> Tensors:
        given = [numbers(j, 7, dtype) for j in range(size)] if rank == 0 else None
        dist.scatter(out := empty(7), given, 0)
        return [out]

    def all_to_all_single() -> Tensors:
        dist.all_to_all_single(out := empty(4 * size), numbers(rank, 4 * size, dtype))
        return [out]

    for case in (broadcast, all_gather, all_gather_into_tensor, gather, scatter, all_to_all_single):
        yield case.__name__, case


def matrix(rank: int) -> dict[str, list[list[int]] | None]:
    """Return for every case the bytes of its results; None where it was refused."""
    warnings.simplefilter("ignore")
    size = dist.get_world_size()
    results: dict[str, list[list[int]] | None] = {}
    refusal = UsageError if dist.get_backend() == "ringside" else RuntimeError
    for dtype in DTYPES:
        cases = dict(moves(rank, size, dtype))
        for op in REDUCTIONS:
            reduced = reductions(rank, size, dtype, getattr(dist.ReduceOp, op))
            cases |= {f"{name} {op}": case for name, case in reduced}
        for name, case in cases.items():
            try:
                results[f"{name} {dtype}"] = [x.clone().view(torch.uint8).tolist() for x in case()]
            except (refusal, ValueError):  # torch itself refuses some of complex numbers
                results[f"{name} {dtype}"] = None
    return results


@OF_TODAY
@pytest.mark.core
def test_every_dtype_and_reduction_that_gloo_has_is_there_to_the_bit():
    ours, theirs = on_both(2, matrix)
    for mine, gloo in zip(ours, theirs, strict=True):
        missing = [name for name, bits in gloo.items() if bits is not None and mine[name] is None]
        assert not missing
        different = [name for name, bits in gloo.items() if bits is not None and mine[name] != bits]
        assert all("SUM torch.bool" in name for name in different)  # Gloo adds True and True up to a byte of 2
        for dtype in DTYPES:
            assert mine[f"broadcast {dtype}"] is not None
            assert dtype not in NUMBERS or mine[f"reduce_scatter_tensor AVG {dtype}"] is not None
