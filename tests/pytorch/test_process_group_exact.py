"""Every collective of the process group once, on two ranks of one host and of two: the numbers that must come out."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from tests.support.ranks import on_ranks, place  # noqa: E402

from ringside.fsdp import SharedAllGather, SharedReduceScatter  # noqa: E402
from ringside.pytorch.process_group.carrier import GroupCounters  # noqa: E402
from ringside.pytorch.shared_storage import storage_of  # noqa: E402

from .groups import meeting_point  # noqa: E402
from .process_groups import OF_TODAY, backend, on_ours  # noqa: E402

pytestmark = pytest.mark.native

RANKS = 2


def numbers(rank: int, count: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(count) + 10 * rank).to(dtype)


def refused(call: Any, *words: Any, **how: Any) -> str:
    """Return the first words of what a call is refused with."""
    with pytest.raises(Exception, match=r".") as raised:
        call(*words, **how)
    return f"{type(raised.value).__name__}: {raised.value}"


def collectives(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    factor = dist._make_nccl_premul_sum(0.5)
    both = [numbers(r) for r in range(RANKS)]
    total = both[0] + both[1]

    x = numbers(rank)
    dist.all_reduce(x)
    found["all_reduce"] = torch.equal(x, total)
    x = numbers(rank)
    dist.all_reduce(x, op=factor)
    found["with a factor"] = torch.equal(x, total / 2)
    x = numbers(rank, 6, torch.complex64) * 1j
    dist.all_reduce(x)
    found["complex"] = torch.equal(x, total * 1j)
    x = numbers(rank).reshape(2, 3).t()
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    found["strided"] = torch.equal(x, both[1].reshape(2, 3).t())
    large = torch.full((1 << 18,), 1.0 + rank)
    dist.all_reduce(large)
    found["large"] = bool((large == 3.0).all())
    x = numbers(rank)
    dist.broadcast(x, src=1)
    found["broadcast"] = torch.equal(x, both[1])
    x = numbers(rank)
    dist.reduce(x, dst=1)
    found["reduce"] = torch.equal(x, total if rank == 1 else both[0])
    found["reduce with a factor"] = refused(dist.reduce, numbers(rank), 1, op=factor).startswith("UsageError")

    whole = torch.empty(12)
    dist.all_gather_into_tensor(whole, numbers(rank))
    found["all_gather_single"] = torch.equal(whole, torch.cat(both))
    whole = torch.full((12,), -1.0)
    whole[6 * rank : 6 * rank + 6] = both[rank]
    dist.all_gather_into_tensor(whole, whole[6 * rank : 6 * rank + 6])
    found["in its own part"] = torch.equal(whole, torch.cat(both))
    for name, op, expected in (("sum", dist.ReduceOp.SUM, total), ("avg", dist.ReduceOp.AVG, total / 2),
                               ("factor", factor, total / 2)):  # fmt: skip
        part, x = torch.empty(3), numbers(rank)
        dist.reduce_scatter_tensor(part, x, op=op)
        found[f"reduce_scatter_single {name}"] = torch.equal(part, expected[3 * rank : 3 * rank + 3])
        found[f"its input {name}"] = torch.equal(x, both[rank])
        x = numbers(rank)
        dist.reduce_scatter_tensor(x[1:4], x, op=op)
        found[f"into its own input {name}"] = torch.equal(x[1:4], expected[3 * rank : 3 * rank + 3])

    rows, sizes = numbers(rank, 8).reshape(4, 2), ([1, 3], [3, 1])
    out = torch.empty(2 * (sizes[0][rank] + sizes[1][rank])).reshape(-1, 2)
    dist.all_to_all_single(out, rows, [sizes[0][rank], sizes[1][rank]], sizes[rank])
    parts = [numbers(r, 8).reshape(4, 2).split(sizes[r])[rank] for r in range(RANKS)]
    found["all_to_all_single"] = torch.equal(out, torch.cat(parts))
    out = torch.empty(6)
    dist.all_to_all_single(out, numbers(rank))
    found["in equal parts"] = torch.equal(out, torch.cat([one[3 * rank : 3 * rank + 3] for one in both]))
    x = numbers(rank)
    found["onto itself"] = "must not overlap" in refused(dist.all_to_all_single, x, x)
    # Before anything is sent, and so by one rank alone.
    found["onto itself, at once"] = rank == 1 or "must not overlap" in refused(
        dist.all_to_all_single, x, x, async_op=True
    )

    lists = [torch.empty(2 + r) for r in range(RANKS)]
    dist.all_gather(lists, numbers(rank, 2 + rank))
    found["all_gather"] = all(torch.equal(lists[r], numbers(r, 2 + r)) for r in range(RANKS))
    part = torch.empty(2 + rank)
    dist.reduce_scatter(part, [numbers(rank, 2 + r) for r in range(RANKS)], op=factor)
    found["reduce_scatter"] = torch.equal(part, (numbers(0, 2 + rank) + numbers(1, 2 + rank)) / 2)
    lists = [torch.empty(6) for _ in range(RANKS)]
    dist.gather(numbers(rank), lists if rank == 1 else None, dst=1)
    found["gather"] = rank == 0 or torch.equal(torch.stack(lists), torch.stack(both))
    x = torch.empty(6)
    dist.scatter(x, [one + 0.5 for one in both] if rank == 0 else None, src=0)
    found["scatter"] = torch.equal(x, both[rank] + 0.5)
    lists = [torch.empty(1 + r) for r in range(RANKS)]
    dist.all_to_all(lists, [numbers(rank, 1 + rank) for _ in range(RANKS)])
    found["all_to_all"] = all(torch.equal(lists[r], numbers(r, 1 + r)) for r in range(RANKS))

    def coalesced(call: Any, *pairs: Any) -> None:
        with dist._coalescing_manager(async_ops=True) as manager:
            for pair in pairs:
                call(*pair)
        manager.wait()

    outs = [torch.empty(4), torch.empty(6)]
    coalesced(dist.all_gather_into_tensor, (outs[0], numbers(rank, 2)), (outs[1], numbers(rank, 3)))
    found["all_gather_coalesced"] = [out.tolist() for out in outs] == [[0, 1, 10, 11], [0, 1, 2, 10, 11, 12]]
    outs = [torch.empty(1), torch.empty(2)]
    coalesced(dist.reduce_scatter_tensor, (outs[0], numbers(rank, 2)), (outs[1], numbers(rank, 4)))
    found["reduce_scatter_coalesced"] = [out.tolist() for out in outs] == [
        [[10.0], [10.0, 12.0]],
        [[12.0], [14.0, 16.0]],
    ][rank]

    entries = torch.sparse_coo_tensor([[0, 3 + rank]], [1.0 + rank, 5.0], (6,))
    dist.all_reduce(entries)
    found["sparse"] = entries.to_dense().tolist() == [3.0, 0.0, 0.0, 5.0, 5.0, 0.0]
    entries = torch.sparse_coo_tensor([[2], [1]] if rank else torch.empty(2, 0), torch.ones(rank), (3, 2))
    dist.all_reduce(entries, op=dist.ReduceOp.AVG)
    found["sparse mean"] = entries.to_dense().tolist() == [[0.0, 0.0], [0.0, 0.0], [0.0, 0.5]]
    found["sparse max"] = "UnsupportedError" in refused(dist.all_reduce, entries, op=dist.ReduceOp.MAX)
    hybrid = torch.sparse_coo_tensor([[rank]], torch.tensor([[1.0, 2.0]]), (2, 2))
    dist.all_reduce(hybrid)
    found["rows of a sparse one"] = hybrid.to_dense().tolist() == [[1.0, 2.0], [1.0, 2.0]]
    other = torch.sparse_coo_tensor([[0]], [1.0], (6 + rank,))
    found["sparse of other shapes"] = "rank 1 and rank 0 have sparse tensors of different" in refused(
        dist.all_reduce, other
    )

    wrong = [torch.empty(2 + (r == rank)) for r in range(RANKS)]
    found["another size"] = "where the tensor is" in refused(dist.all_gather, wrong, torch.empty(2))
    found["rows"] = "does not divide equally" in refused(dist.all_to_all_single, torch.empty(3), torch.empty(3))
    found["splits"] = "total dim 0 size: [1, 2]" in refused(
        dist.all_to_all_single, torch.empty(4), torch.empty(4), [1, 2], [1, 3]
    )
    return {name: value for name, value in found.items() if value is not True}


def test_every_collective_gives_these_numbers_on_one_host() -> None:
    assert on_ours(RANKS, collectives) == [{}] * RANKS


def between_hosts(path: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGSIDE_MACHINE", f"host {place().rank}")
        with backend(path) as rank:
            return collectives(rank)


# ------------------------------------------------------------------------------------------------ what is counted


class Inner:
    """Stands for the inner Gloo group: it numbers what it carries."""

    number = 3

    def _get_sequence_number_for_group(self) -> int:
        return self.number

    def carry(self, by: int, fails: bool = False) -> int:
        self.number += by
        if fails:
            raise RuntimeError("no")
        return by


def test_collectives_are_counted_once_by_who_carries_them() -> None:
    inner = Inner()
    counters = GroupCounters(inner)
    assert (counters.total(), counters.table()) == (0, {})
    for name in ("all_reduce", "barrier", "all_reduce"):
        counters.add(name, "ringside")
    assert counters.through_gloo("send", inner.carry, 2) == 2
    with pytest.raises(RuntimeError):
        counters.through_gloo("send", inner.carry, 1, True)
    expected = {"gloo": {"send": 2}, "ringside": {"all_reduce": 2, "barrier": 1}}
    assert (counters.total(), counters.table()) == (5, expected)
    inner.carry(1)  # past us
    assert counters.table()["gloo"] == {"send": 2, "unseen": 1}
    inner.carry(3)
    assert counters.table() == {"gloo": {"send": 2, "unseen": 4}, "ringside": expected["ringside"]}


# ------------------------------------------------------------------------------------------------ FSDP2's buffers


def buffers_of_fsdp(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    group = dist.group.WORLD
    gather, scatter = SharedAllGather(), SharedReduceScatter()
    place_of: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    whole = gather.allocate((2, 3), **place_of)
    whole[rank] = numbers(rank, 3)
    gather(whole, whole[rank], group)
    found["all_gather"] = whole.tolist() == [numbers(0, 3).tolist(), numbers(1, 3).tolist()]
    address = whole.data_ptr()
    other = gather.allocate((6,), **place_of)
    found["one that is held is not given again"] = other.data_ptr() != address
    del whole
    again = gather.allocate((3, 2), **place_of)
    found["one that is free is"] = again.data_ptr() == address
    found["of another dtype"] = (
        gather.allocate((6,), dtype=torch.float64, device=torch.device("cpu")).dtype == torch.float64
    )
    found["empty"] = gather.allocate((0, 4), **place_of).shape == (0, 4)
    found["elsewhere"] = gather.allocate((2,), dtype=torch.float32, device=torch.device("meta")).is_meta
    out = torch.empty(6)
    work = gather(out, numbers(rank, 3), group, async_op=True)  # of somebody else's
    work.wait()
    found["private"] = out.tolist() == [0, 1, 2, 10, 11, 12]

    places = set()
    for name, op, expected in (("sum", dist.ReduceOp.SUM, 1.0), ("avg", dist.ReduceOp.AVG, 0.5)):
        x = scatter.allocate((6,), **place_of)
        x.copy_(numbers(rank))
        places.add(x.data_ptr())
        found[f"shared {name}"] = storage_of(x) is not None
        part = torch.empty(3)
        scatter(part, x, group, op)
        total = (numbers(0) + numbers(1)) * expected
        found[f"reduce_scatter {name}"] = torch.equal(part, total[3 * rank : 3 * rank + 3])
        del x
    part, x = torch.empty(3), numbers(rank)
    scatter(part, x, group, dist.ReduceOp.SUM, async_op=True).wait()
    found["of a private one"] = torch.equal(part, (numbers(0) + numbers(1))[3 * rank : 3 * rank + 3])
    found["used again"] = len(places) == 1
    return {name: value for name, value in found.items() if value is not True}


@OF_TODAY
def test_fsdps_buffers_are_used_again_and_reduced_where_they_lie() -> None:
    assert on_ours(RANKS, buffers_of_fsdp) == [{}] * RANKS


def test_every_collective_gives_these_numbers_between_hosts() -> None:
    with meeting_point() as path:
        assert on_ranks(RANKS, between_hosts, path) == [{}] * RANKS
