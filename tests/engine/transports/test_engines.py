"""The suite of engines on real ranks: messages through torch, the interpreter in shared memory, the group's own."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tests.engine.oracle import digest
from tests.support.ranks import Team, communicator, hear, on_ranks, place

from ringside.engine.dtypes import DTYPES, OP_CODES
from ringside.engine.net.exchange.exchange import Exchange, ExchangeRequest
from ringside.engine.net.exchange.plan import plan_messages
from ringside.engine.net.exchange.run import ExchangeRun
from ringside.engine.net.exchange.signature import CollectiveSignature, SignatureMismatch
from ringside.engine.net.reduction import make_fold
from ringside.engine.transports.base import NOBODY, LinkError, LinkFailure
from ringside.errors import UnsupportedError
from ringside.schedule import Schedule, chunk_bounds, direct, tree

from .schedules import by_communicator, by_exchange, check_engine, is_close
from .vertices import peer_to_peer, store_file

SIZES = (2, 3, 4, 5)
Array = np.ndarray[Any, Any]


def through_torch(path: str) -> list[list[int]]:
    """For every size the first ranks; the others have nothing to do."""
    here, digests = place(), []
    for size in SIZES:
        if here.rank < size:
            transport = peer_to_peer(path, name=str(size), size=size)
            reduce = by_exchange(Exchange(transport, segment_bytes=1024), size)
            digests.append(check_engine(reduce, here.rank, size, every=5))
            transport.close()
        else:
            digests.append([])
    return digests


def test_messages_through_torch() -> None:
    with store_file() as path:
        results = on_ranks(max(SIZES), through_torch, path, limit_s=150)
    for at, size in enumerate(SIZES):
        assert results[0][at]
        assert all(digests[at] == results[0][at] for digests in results[:size]), f"{size} ranks hold different bits"


def calls_something_larger(path: str) -> list[str]:
    """Each rank in turn calls what goes in large messages, to all, while the others call a tree in small ones."""
    here, heard = place(), []
    for odd in range(here.size):
        transport = peer_to_peer(path, name=str(odd))
        exchange = Exchange(transport, segment_bytes=1 << 16)
        count = 4_000_000 if here.rank == odd else 400_000
        schedule = direct(here.size) if here.rank == odd else tree(here.size)
        x, code = np.ones(count, dtype=np.float32), DTYPES.index("float32")
        plan, size = plan_messages(schedule, here.rank), exchange.size_of(schedule, x.nbytes, x.itemsize, None)
        bounds = (chunk_bounds(count, schedule.chunks) * 4).tolist()
        chunks = [x.view(np.uint8)[a:b] for a, b in pairwise(bounds)]
        call, by = CollectiveSignature(0, code, 0, count), make_fold(code, OP_CODES["sum"])
        try:
            ExchangeRun(exchange, ExchangeRequest(plan, 4, by, call), chunks, ordered=True, size=size).run()
            heard.append("finished")
        except SignatureMismatch as error:
            heard.append(transport.fail(LinkFailure("disagreed", error.peer)).kind)
        except LinkError as error:
            heard.append(transport.fail(error.cause).kind)
        transport.close(patience_s=0.5)
    return heard


def test_who_sends_messages_too_long_for_small_places_is_told_apart() -> None:
    """Gloo ends the process of a rank where a message meets a place that is too short for it: none ever does."""
    with store_file() as path:
        assert on_ranks(4, calls_something_larger, path) == [["disagreed"] * 4] * 4


def on_a_device(path: str) -> list[list[int]]:
    """The device's own group is Gloo here; what is queued and reduced is the same as on a GPU with NCCL."""
    import torch
    import torch.distributed as dist

    from ringside.engine.net.exchange.device import DevicePeers

    here, digests = place(), []
    store = dist.PrefixStore(here.job, dist.FileStore(path, -1))
    dist.init_process_group("gloo", store=store, rank=here.rank, world_size=here.size)
    for size in SIZES:
        group = dist.new_group(list(range(here.size))[-size:])  # ranks of the group are not those of the job
        if dist.get_rank(group) < 0:
            digests.append([])
            continue
        peers = DevicePeers(group)

        def reduce(x: Array, dtype: str, op: str, s: Schedule, peers: DevicePeers = peers) -> None:
            flat = torch.from_numpy(x).view(getattr(torch, dtype))
            bounds = chunk_bounds(len(x), s.chunks).tolist()
            peers.run(plan_messages(s, peers.rank), [flat[b:e] for b, e in pairwise(bounds)], op)

        digests.append(check_engine(reduce, peers.rank, size, every=5))
    dist.destroy_process_group()
    return digests


def test_on_the_device_of_the_tensors() -> None:
    with store_file() as path:
        results = on_ranks(max(SIZES), on_a_device, path, limit_s=150)
    for at, size in enumerate(SIZES):
        assert results[-1][at]
        assert all(digests[at] == results[-1][at] for digests in results[-size:]), f"{size} ranks hold different bits"


def in_shared_memory() -> list[int]:
    with communicator(segment_bytes=4096) as comm:
        return check_engine(by_communicator(comm), comm.rank, comm.size, halves=False)


@pytest.mark.native
@pytest.mark.parametrize("size", [2, 4])
def test_shared_memory(size: int) -> None:
    digests = on_ranks(size, in_shared_memory)
    assert all(one == digests[0] for one in digests), "ranks hold different bits"


def native_over(store: Any, lost: Sequence[int] = (), **how: float) -> Any:
    """Return the group's own all-reduce of these ranks, to which some count as lost."""
    from torch.distributed import PrefixStore

    from ringside.engine.transports.gloo_all_reduce import GlooAllReduce

    here = place()
    names = PrefixStore(here.job, store)
    return GlooAllReduce(names, here.rank, here.size, timeout_s=30, has_lost=lambda rank, _: rank in lost, **how)


def by_the_groups_own(path: str) -> list[int]:
    """Gloo adds in an order of its own: integers to the bit, floats within their roundings."""
    import torch.distributed as dist

    native = native_over(dist.FileStore(path, -1))
    here, rng, digests = place(), random.Random(2), []
    for dtype in ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64"):
        for op in ("sum", "min", "max", "prod"):
            for count in (0, 1, 7, 1000):
                values = [
                    np.random.default_rng([count, r]).choice([-3, -2, -1, 1, 2, 3], count) for r in range(here.size)
                ]
                values = [np.abs(v) for v in values] if dtype == "uint8" else values
                x = as_dtype(values[here.rank], dtype)
                members = rng.choice([None, tuple(range(here.size))])
                native.prepare(x.view(np.uint8), DTYPES.index(dtype), OP_CODES[op], members)()
                want = {"sum": np.sum, "min": np.min, "max": np.max, "prod": np.prod}[op](np.stack(values), axis=0)
                assert not count or (x == as_dtype(want, dtype)).all(), f"{dtype} {op} of {count}"
                digests.append(digest(x))
        if dtype in ("float32", "float16", "bfloat16"):
            inputs = [as_dtype(np.random.default_rng(r).standard_normal(500), dtype) for r in range(here.size)]
            x = inputs[here.rank].copy()
            native.prepare(x.view(np.uint8), DTYPES.index(dtype), OP_CODES["sum"], None)()
            assert is_close(x, inputs, dtype, here.size)
            digests.append(digest(x))
    for dtype, op in (("int16", "sum"), ("bool", "bor"), ("float32", "bxor")):
        with pytest.raises(UnsupportedError, match=f"no {op} of {dtype}: name another algorithm"):
            native.check(DTYPES.index(dtype), OP_CODES[op])
    native.check(DTYPES.index("float32"), OP_CODES["avg"])
    return digests


def with_a_late_rank(path: str) -> float:
    """Rank 1 comes later than Gloo takes to make a group, at first and once there is one."""
    import torch.distributed as dist

    native, x = native_over(dist.FileStore(path, -1), joining_s=0.5), np.ones(5, np.float32)
    for _ in range(2):
        if place().rank == 1:
            time.sleep(1.5)
        native.prepare(x.view(np.uint8), DTYPES.index("float32"), OP_CODES["sum"], None)()
    return float(x[0])


def test_the_groups_own_waits_for_a_late_rank() -> None:
    with store_file() as path, Team(2) as team:
        team.start(with_a_late_rank, path)
        assert [outcome.value for outcome in team.finish()] == [4.0, 4.0]


def with_a_lost_rank(path: str) -> LinkFailure | None:
    """Rank 1 does not come, and counts as lost."""
    import torch.distributed as dist

    native, x = native_over(dist.FileStore(path, -1), lost=[1]), np.ones(5, np.float32)
    if place().rank == 1:
        hear()
        return None
    with pytest.raises(LinkError) as raised:
        native.prepare(x.view(np.uint8), DTYPES.index("float32"), OP_CODES["sum"], None)()
    return raised.value.cause


def test_the_groups_own_does_not_wait_for_a_lost_rank() -> None:
    with store_file() as path, Team(3) as team:
        team.start(with_a_lost_rank, path)
        for rank in (0, 2):
            assert team.finish_one(rank).value == LinkFailure("lost", NOBODY)
        team.tell(1, "go on")
        assert team.finish_one(1).ok


def with_a_rank_that_left(path: str) -> LinkFailure | None:
    """Rank 1 leaves in good order before the first one."""
    import torch.distributed as dist

    from ringside.engine.transports.gloo_all_reduce import GlooAllReduce

    transport, here = peer_to_peer(path), place()
    try:
        if here.rank == 1:
            transport.close(patience_s=0.2)
            hear()
            return None
        store = dist.PrefixStore("native", dist.FileStore(path, -1))
        native = GlooAllReduce(store, here.rank, here.size, timeout_s=50, has_lost=transport.has_lost)
        with pytest.raises(LinkError) as raised:
            native.prepare(np.ones(4, np.uint8), DTYPES.index("float32"), OP_CODES["sum"], None)()
        return transport.fail(raised.value.cause)
    finally:
        transport.close(patience_s=0.2)


def test_the_groups_own_does_not_wait_for_a_rank_that_left() -> None:
    with store_file() as path, Team(3) as team:
        began = time.monotonic()
        team.start(with_a_rank_that_left, path)
        for rank in (0, 2):
            outcome = team.finish_one(rank)
            assert outcome.value == LinkFailure("left", 1), outcome
            assert outcome.at - began < 25, "of 50"
        team.tell(1, "go on")
        assert team.finish_one(1).ok


def given_up_before(path: str) -> LinkFailure:
    import torch.distributed as dist

    native, x = native_over(dist.FileStore(path, -1)), np.ones(5, np.float32)
    native.abort()
    with pytest.raises(LinkError, match="given up") as raised:
        native.prepare(x.view(np.uint8), DTYPES.index("float32"), OP_CODES["sum"], None)()
    return raised.value.cause


def test_the_groups_own_begins_nothing_after_it_was_given_up() -> None:
    with store_file() as path:
        assert on_ranks(1, given_up_before, path) == [LinkFailure("lost", NOBODY)]


def as_dtype(values: Any, dtype: str) -> Any:
    from ringside._core import numpy_kernels as twins

    if dtype in ("float16", "bfloat16"):
        return twins.narrow(np.asarray(values, dtype=np.float32), dtype)
    return np.asarray(values).astype(dtype)


def test_the_groups_own() -> None:
    with store_file() as path:
        digests = on_ranks(5, by_the_groups_own, path)
    assert all(one == digests[0] for one in digests), "ranks hold different bits"
