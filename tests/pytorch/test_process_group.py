"""The process group: every collective, sync and async, beside Gloo to the bit, and nothing falls through."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from tests.support.ranks import on_ranks, place  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402

from ringside.errors import UsageError  # noqa: E402
from ringside.pytorch import carried  # noqa: E402
from ringside.pytorch.process_group.carrier import carrier_of  # noqa: E402
from ringside.pytorch.process_group.creation import IS_BACKEND  # noqa: E402

from .groups import meeting_point  # noqa: E402
from .process_groups import LIMIT_S, OF_TODAY, on_both, on_ours, under  # noqa: E402
from .training import same_bits  # noqa: E402

pytestmark = pytest.mark.native

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
Case = Callable[[int, int, bool], list[torch.Tensor]]


def ramp(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return numbers that differ by rank and are exact in every dtype."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + 3 * rank) % 11 + 1).view(shape).to(dtype)


def done(work: Any) -> None:
    """Wait for a work where there is one, by its future as well."""
    if work is not None:
        assert work.wait()
        if dist.get_backend() == "ringside":  # Gloo has futures of some collectives only
            work.get_future().wait()
            assert work.is_completed()


# ------------------------------------------------------------------------------------------------ every collective


def all_reduce(op: Any, dtype: torch.dtype, *shape: int) -> Case:
    def case(rank: int, size: int, later: bool) -> list[torch.Tensor]:
        x = ramp(rank, *shape, dtype=dtype)
        done(dist.all_reduce(x, op, async_op=later))
        return [x]

    return case


def transposed(rank: int, size: int, later: bool) -> list[torch.Tensor]:
    x = ramp(rank, 5, 4).t()
    if dist.get_backend() == "gloo":  # refuses strides
        x = x.contiguous()
    done(dist.all_reduce(x, async_op=later))
    done(dist.broadcast(x, 1, async_op=later))
    return [x.contiguous()]


def broadcast(rank: int, size: int, later: bool) -> list[torch.Tensor]:
    x, empty = ramp(rank, 3, 5, dtype=torch.complex64), torch.empty(0)
    done(dist.broadcast(x, size - 1, async_op=later))
    done(dist.broadcast(empty, 0, async_op=later))
    return [x, empty]


def reduce(rank: int, size: int, later: bool) -> list[torch.Tensor]:
    x = ramp(rank, 9)
    done(dist.reduce(x, 1, async_op=later))
    return [x] if rank == 1 else []  # Gloo leaves odds and ends elsewhere


def all_gather(rank: int, size: int, later: bool) -> list[torch.Tensor]:
    lists = [torch.zeros(2, 3, dtype=torch.int32) for _ in range(size)]
    done(dist.all_gather(lists, ramp(rank, 2, 3, dtype=torch.int32), async_op=later))
    single = torch.zeros(size * 4, 2)
    done(dist.all_gather_into_tensor(single, ramp(rank, 4, 2), async_op=later))
    place = single.clone()  # as FSDP does: the input is a part of the output
    done(dist.all_gather_into_tensor(place, place.view(size, 4, 2)[rank].mul_(rank + 1), async_op=later))
    return [*lists, single, place]


def reduce_scatter(rank: int, size: int, later: bool) -> list[torch.Tensor]:
    out, single = torch.zeros(4), torch.zeros(3, 2)
    done(dist.reduce_scatter(out, [ramp(rank + j, 4) for j in range(size)], async_op=later))
    done(dist.reduce_scatter_tensor(single, ramp(rank, size * 3, 2), AVG, async_op=later))
    return [out, single]


def gather_and_scatter(rank: int, size: int, later: bool) -> list[torch.Tensor]:
    rows = [torch.zeros(3) for _ in range(size)] if rank == 1 else None
    done(dist.gather(ramp(rank, 3), rows, 1, async_op=later))
    out = torch.zeros(2, dtype=torch.float64)
    given = [ramp(j, 2, dtype=torch.float64) for j in range(size)] if rank == 0 else None
    done(dist.scatter(out, given, 0, async_op=later))
    return [*(rows or []), out]


def all_to_all_single(rank: int, size: int, later: bool) -> list[torch.Tensor]:
    out = torch.zeros(size * 2, 3)
    done(dist.all_to_all_single(out, ramp(rank, size * 2, 3), async_op=later))
    gives, takes = [rank + j for j in range(size)], [j + rank for j in range(size)]
    uneven = torch.zeros(sum(takes), 3)
    done(dist.all_to_all_single(uneven, ramp(rank, sum(gives), 3), takes, gives, async_op=later))
    return [out, uneven]


def sparse(rank: int, size: int, later: bool) -> list[torch.Tensor]:
    indices = torch.tensor([[rank, 4, 4], [0, 1, 1]])
    x = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 3.0]), (8, 2))
    done(dist.all_reduce(x, async_op=later))
    return [x.to_dense()]


def coalesced(rank: int, size: int, later: bool) -> list[torch.Tensor]:
    xs = [ramp(rank, n) for n in (3, 5)]
    with dist._coalescing_manager(async_ops=later) as manager:
        for x in xs:
            dist.all_reduce(x)
    if later:
        manager.wait()
    return xs


def point_to_point(rank: int, size: int, later: bool) -> list[torch.Tensor]:
    out = torch.zeros(4)
    ops = [dist.P2POp(dist.isend, ramp(rank, 4), (rank + 1) % size), dist.P2POp(dist.irecv, out, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [out]


def objects(rank: int, size: int, later: bool) -> list[torch.Tensor]:
    everybody: list[Any] = [None] * size
    dist.all_gather_object(everybody, {"rank": rank, "text": "x" * (rank + 1)})
    first = [everybody[rank]]
    dist.broadcast_object_list(first, 0)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [[j] * j for j in range(size)] if rank == 0 else None, 0)
    rows: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(first, rows, 0)
    assert everybody[-1]["text"] == "x" * size
    return [torch.tensor([each["rank"] for each in everybody] + [first[0]["rank"], *mine[0], len(rows or [])])]


def sub_groups(rank: int, size: int, later: bool) -> list[torch.Tensor]:
    x = ramp(rank, 6)
    pair, alone = dist.new_group([0, 2]), [dist.new_group([r]) for r in range(size)]
    if rank in (0, 2):
        done(dist.all_reduce(x, group=pair, async_op=later))
    done(dist.all_reduce(x, group=alone[rank], async_op=later))
    dist.barrier()
    dist.monitored_barrier()
    for group in [pair] * (rank in (0, 2)) + [alone[rank]]:
        dist.destroy_process_group(group)
    return [x]


HALF, BRAIN = torch.float16, torch.bfloat16
CASES: dict[str, Case] = {
    **{f"all_reduce {dtype}": all_reduce(SUM, dtype, 7, 3) for dtype in (torch.float32, torch.float64, torch.int64)},
    **{
        f"all_reduce {dtype}": all_reduce(SUM, dtype, 33)
        for dtype in (torch.int8, torch.uint8, torch.int32, HALF, BRAIN)
    },
    **{
        f"all_reduce {op}": all_reduce(getattr(dist.ReduceOp, op), torch.int32, 9)
        for op in ("PRODUCT", "MIN", "MAX", "BOR")
    },
    "all_reduce complex": all_reduce(SUM, torch.complex64, 5),
    "all_reduce avg": all_reduce(AVG, torch.float32, 12),
    "all_reduce nothing": all_reduce(SUM, torch.float32, 0),
    "all_reduce scalar": all_reduce(SUM, torch.float32),
    "all_reduce large": all_reduce(SUM, torch.float32, 400_003),
    **{
        case.__name__: case
        for case in (
            transposed,
            broadcast,
            reduce,
            all_gather,
            reduce_scatter,
            gather_and_scatter,
            all_to_all_single,
            sparse,
            coalesced,
            point_to_point,
            objects,
            sub_groups,
        )
    },
}


def all_cases(rank: int) -> tuple[dict[str, list[torch.Tensor]], dict[str, Any]]:
    torch.sparse.check_sparse_tensor_invariants.disable()
    warnings.simplefilter("ignore", FutureWarning)  # names that torch 2.13 calls old are those of scripts
    results = {}
    for name, case in CASES.items():
        for later in (False, True):
            results[f"{name}{' later' * later}"] = case(rank, dist.get_world_size(), later)
    return results, carried() if dist.get_backend() == "ringside" else {}


@OF_TODAY
@pytest.mark.core
def test_every_collective_gives_the_bits_of_gloo_and_none_falls_through():
    ours, theirs = on_both(3, all_cases)
    for rank in range(3):
        for name, tensors in theirs[rank][0].items():
            mine = ours[rank][0][name]
            assert len(mine) == len(tensors), name
            for a, b in zip(mine, tensors, strict=True):
                assert same_bits(a, b), f"{name} on rank {rank}: {a} instead of {b}"
        engines = ours[rank][1]
        assert set(engines["gloo"]) == {"send", "recv", "monitored_barrier"}
        assert engines["ringside"]["all_reduce"] >= 2 * 19
        assert engines["ringside"]["all_reduce_coalesced"] == 2


def cases_on_two_hosts(rank: int) -> tuple[dict[str, list[torch.Tensor]], dict[str, Any]]:
    assert carrier_of(dist.group.WORLD).engine.communicator.roster.hosts == ((0, 1), (2,))
    return all_cases(rank)


def apart(path: str) -> tuple[dict[str, list[torch.Tensor]], dict[str, Any]]:
    """The same with the ranks 0 and 1 on one host, and rank 2 on another."""
    os.environ["RINGSIDE_MACHINE"] = f"host {place().rank // 2}"
    try:
        return under(path, "ringside", cases_on_two_hosts)
    finally:
        del os.environ["RINGSIDE_MACHINE"]


def test_every_collective_between_hosts_gives_what_it_gives_on_one():
    with meeting_point() as path:
        one = on_ranks(3, under, path, "ringside", all_cases, limit_s=LIMIT_S)
        two = on_ranks(3, apart, path, limit_s=LIMIT_S)
    for (inside, _), (between, engines) in zip(one, two, strict=True):
        for name, tensors in inside.items():
            assert all(same_bits(a, b) for a, b in zip(tensors, between[name], strict=True)), name
        assert "unseen" not in engines["gloo"]


# ------------------------------------------------------------------------------------------------ threads


def busy(group: Any, seed: int, wrong: list[str]) -> None:
    """Keep collectives of all sizes in flight on one group, and check every sum."""
    sizes = torch.randint(1, 20_000, (30,), generator=torch.Generator().manual_seed(seed)).tolist()
    flying: list[tuple[Any, torch.Tensor]] = []
    for turn, size in enumerate(sizes):
        x = torch.full((size,), float(turn))
        work = dist.all_reduce(x, group=group, async_op=turn % 3 > 0)
        flying.append((work, x))
        if turn % 4 == 3:
            for at, (each, tensor) in enumerate(flying, turn - 3):
                done(each)
                if not bool((tensor == 2.0 * at).all()):
                    wrong.append(f"group {seed}, turn {at}: {tensor}")
            flying.clear()


def stress(rank: int) -> list[str]:
    """Several groups in flight at once, a thread for each."""
    groups, wrong = [dist.new_group([0, 1]) for _ in range(3)], []
    threads = [threading.Thread(target=busy, args=(group, seed, wrong)) for seed, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    busy(dist.group.WORLD, 7, wrong)
    for thread in threads:
        thread.join()
    return wrong


def test_groups_of_several_threads_do_not_mix():
    assert on_ours(2, stress) == [[], []]


# ------------------------------------------------------------------------------------------------ more than Gloo


def beyond_gloo(rank: int) -> list[str]:
    """Return what is wrong with collectives that Gloo refuses."""
    size, wrong = dist.get_world_size(), []

    def expect(name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        if not same_bits(got, wanted):
            wrong.append(f"{name}: {got} instead of {wanted}")

    short = ramp(rank, 5, dtype=torch.int16)
    dist.all_reduce(short)
    expect("int16", short, sum(ramp(r, 5, dtype=torch.int16) for r in range(size)))
    truth = torch.tensor([rank == 1, False, True])
    dist.all_reduce(truth)  # Gloo's sum of True and True is a byte of 2
    expect("bool", truth, torch.tensor([True, False, True]))
    whole = ramp(rank, 5, dtype=torch.int32)
    dist.all_reduce(whole, AVG)
    expect("avg of integers", whole, sum(ramp(r, 5, dtype=torch.int32) for r in range(size)) // size)
    scaled = ramp(rank, 4)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    expect("premul", scaled, sum(ramp(r, 4) for r in range(size)) * 0.5)
    outs = [torch.zeros(j + 1, 2) for j in range(size)]
    dist.all_gather(outs, ramp(rank, rank + 1, 2))
    expect("uneven all_gather", torch.cat(outs), torch.cat([ramp(r, r + 1, 2) for r in range(size)]))
    into, opts = torch.zeros(size * 3 if rank == 1 else 0), c10d.GatherOptions()
    opts.rootRank = 1
    if not IS_BACKEND:  # `dist.gather_single`, which torch does not pass on to backends in Python
        dist.group.WORLD.gather_single(into, ramp(rank, 3), opts).wait()
        expect("gather into one", into, torch.cat([ramp(r, 3) for r in range(size)]) if rank == 1 else torch.zeros(0))
    part = torch.zeros(rank + 1)
    dist.reduce_scatter(part, [ramp(rank, j + 1) for j in range(size)])
    expect("uneven reduce_scatter", part, sum(ramp(r, rank + 1) for r in range(size)))
    back = [torch.zeros(j) for j in range(size)]
    dist.all_to_all(back, [ramp(rank, rank) for _ in range(size)])
    expect("all_to_all of a list", torch.cat(back), torch.cat([ramp(j, j) for j in range(size)]))
    most = ramp(rank, 4)
    dist.group.WORLD.allreduce(most, dist.ReduceOp.MAX).wait()
    dist.group.WORLD.broadcast([most]).wait()
    dist.group.WORLD.barrier().wait()
    expect("without options", most, torch.stack([ramp(r, 4) for r in range(size)]).max(0).values)
    eighth = ramp(rank, 3).to(torch.float8_e4m3fn)
    dist.broadcast(eighth, 0)
    expect("float8", eighth.float(), ramp(0, 3))
    eighths = [torch.zeros(2, dtype=torch.float8_e4m3fn) for _ in range(size)]
    dist.all_to_all(eighths, [ramp(rank, 2).to(torch.float8_e4m3fn) for _ in range(size)])
    expect("all_to_all of float8", torch.stack(eighths).float(), torch.stack([ramp(r, 2) for r in range(size)]))
    if not IS_BACKEND:  # torch's dispatcher gives a backend a copy of a conjugated tensor, Gloo as well
        turned = torch.complex(ramp(rank, 3), ramp(rank, 3)).conj()
        dist.distributed_c10d._get_default_group().allreduce([turned]).wait()
        expect("conjugated", turned.resolve_conj(), sum(torch.complex(ramp(r, 3), -ramp(r, 3)) for r in range(size)))
    return wrong


def test_what_gloo_refuses_and_we_do():
    assert on_ours(3, beyond_gloo) == [[], [], []]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "min of complex": (
        lambda: c10d._get_default_group().allreduce([torch.zeros(2, dtype=torch.complex64)], _min()),
        "complex",
    ),
    "avg of bool": (lambda: dist.all_reduce(torch.zeros(2, dtype=torch.bool), AVG), "avg of bool"),
    "wrong whole": (lambda: c10d._get_default_group().all_gather_single(torch.zeros(5), torch.zeros(2)), "2 times"),
    "short list": (lambda: dist.all_gather([torch.zeros(2)], torch.zeros(2)), "one for each of the 2 ranks"),
    "bad splits": (lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [1, 1], [2, 2]), "Split sizes"),
    "max of sparse": (lambda: dist.all_reduce(torch.zeros(3).to_sparse(), dist.ReduceOp.MAX), "sparse"),
    "broadcast of sparse": (lambda: dist.broadcast(torch.zeros(3).to_sparse(), 0), "to_dense"),
}
if IS_BACKEND:  # torch's dispatcher refuses it, in words of its own
    del REFUSED["broadcast of sparse"]


def _min() -> Any:
    options = c10d.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MIN
    return options


def refusals(rank: int) -> dict[str, str]:
    said = {}
    for name, (call, _) in REFUSED.items():
        with pytest.raises(UsageError) as caught:
            call()
        said[name] = str(caught.value)
    x = torch.ones(1)
    dist.all_reduce(x)  # nothing was sent, so the group still works
    assert x.item() == dist.get_world_size()
    return said


def test_what_cannot_be_is_refused_in_one_line_before_anything_is_sent():
    for said in on_ours(2, refusals):
        for name, (_, words) in REFUSED.items():
            assert words in said[name], name
            assert "\n" not in said[name]
