"""What a communicator between hosts tells who chooses its ways, and what carriers tell of what gradients took."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from tests.pytorch.groups import communicator, meeting_point, process_group  # noqa: E402
from tests.support.ranks import on_ranks, place  # noqa: E402

from ringside._core.enums import ReduceOp  # noqa: E402
from ringside.engine.algorithm import AlgorithmSpec  # noqa: E402
from ringside.engine.buffers import flatten  # noqa: E402
from ringside.engine.tuner.drift import EVERY_NOTED, LARGE_BYTES  # noqa: E402
from ringside.errors import ClosedError, MismatchError, UsageError  # noqa: E402
from ringside.monitor.step_clock import SyncTimes  # noqa: E402
from ringside.pytorch.communicator import between_hosts  # noqa: E402
from ringside.pytorch.ddp.reducers import NativeReducer, UserHookReducer  # noqa: E402
from ringside.pytorch.ddp.ringside_reducer import RingsideReducer  # noqa: E402
from ringside.schedule import by_name  # noqa: E402

from .training import ddp_ranks, group  # noqa: E402

pytestmark = pytest.mark.native


WAY = "recursive_doubling"  # of which small ones can be made ready


class Chooser:
    """Stands for a selector: always the same way; notes what it is told."""

    def __init__(self, tries: bool, settled: bool = True) -> None:
        self.tried, self.is_settled = tries, settled
        self.told: list[tuple[Any, ...]] = []
        self.version, self.calls, self.startup_s = 1, {7: 0}, 1.5
        self.trial_at = {7: 1.0} if tries else {}
        self.history = ["first", "second"]
        self.listeners: list[Any] = []
        self.starts = 0

    def start(self) -> None:
        self.starts += 1

    def choose(self, size_bytes: int, dtype: int, op: int) -> AlgorithmSpec:
        self.told.append(("choose", size_bytes, dtype, op))
        return AlgorithmSpec.parse(WAY)

    def is_trial_due(self, size_bytes: int, dtype: int, op: int) -> bool:
        return self.tried and op != ReduceOp.max

    def begin_trial(self, elements: int, reduction: Any, choice: AlgorithmSpec) -> bool:
        self.told.append(("begin", elements, str(choice), reduction.dtype))
        return self.tried

    def after(self, size_bytes: int, choice: AlgorithmSpec, seconds: float, *, dtype: int) -> None:
        self.told.append(("after", size_bytes, str(choice), dtype, 0 < seconds < 60))

    def note(self, size_bytes: int, choice: AlgorithmSpec, seconds: float, dtype: int) -> None:
        self.told.append(("note", size_bytes, str(choice), dtype, 0 < seconds < 60))

    def settled(self, size_bytes: int) -> bool:
        return self.is_settled

    def size_class(self, size_bytes: int) -> int:
        return 7

    def explain(self, size_bytes: int) -> str:
        return f"a table for {size_bytes}"

    def heard(self) -> list[tuple[Any, ...]]:
        told, self.told = self.told, []
        return told


def chooses(path: str, tries: bool, settled: bool) -> dict[str, Any]:
    """All-reduce with a chooser: twice the same small one, a large one, buckets begun before others are finished."""
    found: dict[str, Any] = {}
    chooser = Chooser(tries, settled)
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(between_hosts, "Tuner", lambda across, key, wire: found.update(key=key) or chooser)
        comm = stack.enter_context(communicator(path, [0, 1], algorithm=None))
        found["began"] = (found.pop("key")["wire_dtype"], chooser.starts, len(chooser.listeners))
        sums = [comm.all_reduce(torch.full((8,), 1.0 + comm.rank)).tolist() for _ in range(2 * EVERY_NOTED)]
        found["sums"] = sums == [[3.0] * 8] * len(sums)
        found["small"] = chooser.heard()
        found["calls"] = chooser.calls[7]
        chooser.version = 2
        comm.all_reduce(torch.ones(8))
        found["again"] = [word for word, *_ in chooser.heard()]
        comm.all_reduce(torch.ones(8), algorithm="ring")  # it was asked for: nobody is told
        comm.all_reduce(torch.ones(8), algorithm="ring")
        comm.all_reduce(torch.ones(4), "avg", weights=1.0)
        found["asked for"] = [word for word, *_ in chooser.heard()]
        comm.all_reduce(torch.ones(8), "max")
        comm.all_reduce(torch.ones(8), "max")
        found["not tried"] = [word for word, *_ in chooser.heard()]
        comm.all_reduce(torch.ones(LARGE_BYTES // 4))
        comm.all_reduce(torch.ones(LARGE_BYTES // 4))
        found["large"] = [word for word, *_ in chooser.heard()]
        buckets = [torch.full((16,), float(number + comm.rank)) for number in range(3)]
        finish = [
            comm.buckets.start_storage(flatten(bucket), None, scale=0.5, stamp_ns=time.monotonic_ns())
            for bucket in buckets
        ]
        found["left"] = [one is not None for one in finish]
        totals = comm.log.totals()
        found["done"] = totals.collectives
        for one in finish:
            if one is not None:
                one.wait()
                one.wait()  # once is enough
        found["buckets"] = [bucket.tolist() for bucket in buckets] == [[0.5 + number] * 16 for number in range(3)]
        found["told"] = chooser.heard()
        found["log"] = (totals.collectives, totals.payload_bytes, dict(totals.by_name), totals.sync_ns > 0)
        found["words"] = (comm.explain(64), comm.settled(64), comm.startup_s, comm.revisions, comm.inside is None)
    return found


SMALL = [("choose", 32, 0, 0), ("begin", 8, WAY, 0), ("after", 32, WAY, 0, True)]


def test_who_chooses_is_told_of_every_size_and_of_one_in_some_of_those_that_are_ready() -> None:
    with meeting_point() as path:
        for found in on_ranks(2, chooses, path, False, True):
            assert found["began"] == ("float32", 1, 1), "it measures once, and of its changes the run is told"
            assert found["sums"]
            assert found["small"] == [*SMALL, ("choose", 32, 0, 0), ("note", 32, WAY, 0, True)]
            assert found["calls"] == 2 * EVERY_NOTED - 1
            assert found["again"] == ["choose", "begin", "after", "choose"]
            assert found["asked for"] == ["choose", "begin", "after", "choose"]  # the weighted one
            assert found["large"] == ["choose", "begin", "after"] * 2
            assert found["left"] == [False] * 3, "over ranks it is done when it is started"
            assert found["done"] == 3
            assert found["buckets"]
            assert found["told"] == [("choose", 64, 0, 0), ("begin", 16, WAY, 0), ("after", 64, WAY, 0, True)] * 3
            assert found["log"] == (3, 192, {WAY: 3}, True)
            assert found["words"] == ("a table for 64", True, 1.5, ("first", "second"), True)


def test_a_way_that_is_tried_is_chosen_anew_each_time_and_has_the_links_for_itself() -> None:
    with meeting_point() as path:
        for found in on_ranks(2, chooses, path, True, False):
            assert found["small"] == SMALL * (2 * EVERY_NOTED)
            assert found["not tried"] == ["choose", "begin", "after", "choose"], "the second one is kept ready"
            assert found["left"] == [False] * 3
            assert found["done"] == 3
            assert found["buckets"]
            assert [word for word, *_ in found["told"]] == ["choose", "begin", "after"] * 3
            assert found["words"][1] is False


def alone(path: str) -> list[Any]:
    """What a communicator on one host says, and what may not be asked of one between hosts."""
    with process_group(path, 2):
        from ringside import communicator

        with communicator(timeout=30.0) as comm:
            found = [comm.explain(8), comm.settled(8), comm.revisions, comm.startup_s, comm.hops, repr(comm)]
            found += [comm.inside is comm.local, comm.interruptible() is None]
            bucket = torch.full((4,), 1.0 + comm.rank)
            comm.buckets.all_reduce_storage(flatten(bucket), None, scale=2.0, stamp_ns=time.monotonic_ns())
            found.append(bucket.tolist())
        found.append(repr(comm))
    return found


def test_on_one_host_nothing_is_chosen() -> None:
    with meeting_point() as path:
        for rank, found in enumerate(on_ranks(2, alone, path)):
            assert found[:5] == ["8 bytes: shared memory, all 2 ranks are on one host", True, (), 0.0, []]
            assert found[5] == f"<ringside.GroupCommunicator rank {rank} of 2>"
            assert found[6:] == [True, True, [6.0] * 4, f"<ringside.GroupCommunicator rank {rank} of 2, closed>"]


def says(path: str) -> list[Any]:
    with communicator(path, [0, 0, 1]) as comm:
        found = [comm.explain(8), comm.settled(8), comm.revisions, comm.startup_s, repr(comm), comm.inside]
        comm.all_reduce(torch.ones(4))
        comm.barrier()
        found.append(len(comm.hops) > 0)
        for kind in (np.float64, torch.float16):
            empty = comm.empty((2, 3), kind)
            found.append((tuple(empty.shape), str(empty.dtype), bool((empty == 0).all())))
        parts = comm.split(0 if comm.rank == 2 else 1, key=-comm.rank)
        assert parts is not None
        found += [parts.rank, parts.size, comm.split(None), comm.split(comm.rank).size]  # type: ignore[union-attr]
        found.append(comm.all_reduce(torch.ones(2), async_op=True).result().tolist())
        found.append(comm.all_reduce(torch.full((2,), 1.0 + comm.rank), "avg", weights=[1, 0, 3]).tolist())
        found.append(comm.all_reduce(torch.full((2,), 1.0 + comm.rank), "avg", weights=float(comm.rank)).tolist())
        for wrong in (
            lambda: comm.all_reduce(torch.ones(2), "sum", weights=1.0),
            lambda: comm.all_reduce(torch.ones(2), "avg", weights=1.0, scale=2.0),
            lambda: comm.all_reduce(torch.ones(2), "avg", weights=0.0),
            lambda: comm.all_reduce(torch.ones(2, dtype=torch.int32), scale=2.0),
            lambda: comm.all_reduce(torch.ones(2, dtype=torch.int32), "avg", weights=1.0),
        ):
            with pytest.raises(UsageError):
                wrong()
        with pytest.raises(MismatchError, match="different lists of weights"):
            comm.all_reduce(torch.ones(2), "avg", weights=[1.0, 1.0, 1.0 + comm.rank])
        parts.close()
    with pytest.raises(ClosedError):
        comm.all_reduce(torch.ones(4))
    return found


def test_between_hosts_a_communicator_says_how_and_splits_and_weighs() -> None:
    with meeting_point() as path:
        for rank, found in enumerate(on_ranks(3, says, path)):
            assert found[:4] == ["8 bytes: ring, as asked for", True, (), 0.0]
            assert found[4:7] == [f"<ringside.GroupCommunicator rank {rank} of 3 on 2 hosts>", None, True]
            assert found[7:9] == [((2, 3), "float64", True), ((2, 3), "torch.float16", True)]
            assert found[9:11] == [[1, 2], [0, 2], [0, 1]][rank]
            assert found[11:13] == [None, 1]
            assert found[13] == [3.0, 3.0]
            assert found[14] == [2.5, 2.5]
            assert found[15] == pytest.approx([8 / 3] * 2)


def reproducible(path: str) -> list[str]:
    with communicator(path, [0, 1], algorithm=None, reproducible=True) as comm:
        with pytest.raises(UsageError, match="given by name"):
            comm.all_reduce(torch.ones(2), algorithm=by_name("ring", 2))
        return [comm.explain(8), comm.explain(1 << 30)]


def test_the_reproducible_way_depends_on_the_size_alone() -> None:
    with meeting_point() as path:
        one, other = on_ranks(2, reproducible, path)
    assert one == other
    assert all(words.endswith(", the reproducible one for this size") for words in one)


# ------------------------------------------------------------------------------------------------ carriers


class Bucket:
    """What a carrier asks of a bucket of DDP's."""

    def __init__(self, tensor: torch.Tensor, index: int = 0, last: bool = True) -> None:
        self.tensor, self._index, self._last = tensor, index, last

    def buffer(self) -> torch.Tensor:
        return self.tensor

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last


def carried(carrier: Any, share: float | None = None, dtype: torch.dtype = torch.float32) -> list[list[float]]:
    """Carry two buckets of a backward."""
    own = 1.0 + place().rank
    buckets = [Bucket(torch.full((6,), own * (n + 1), dtype=dtype), n, n == 1) for n in range(2)]
    futures = [carrier.reduce(bucket, share) for bucket in buckets]
    carrier.wait()
    return [future.value().tolist() for future in futures]


def natively(port: int) -> list[Any]:
    with group(port):
        carrier = NativeReducer(dist.group.WORLD)
        found = [carried(carrier), carried(carrier, 0.25), not carrier.outcomes.spans, carrier.outcomes.ended > 0]
        times = carrier.pop_timings()()
        found += [times.collectives, times.payload_bytes, 0 < times.sync_seconds < 60, math.isnan(times.wait_seconds)]
        found += [not carrier.outcomes.spans, dict(carrier.counters)]
        hook = UserHookReducer(dist.group.WORLD, 3.0, scaled, carrier.counters)
        return [*found, carried(hook), dict(hook.counters), hook.defer_wait(), carrier.has_buckets]


def fails(state: float, bucket: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_exception(RuntimeError("the script's own"))
    return future


def with_a_hook_that_fails(port: int) -> list[str]:
    """Where DDP is told what went wrong in the script's own hook: by the bucket's future, and not at the end."""
    with group(port):
        carrier = UserHookReducer(dist.group.WORLD, 1.0, fails, Counter())
        carrier.will_wait = True
        future = carrier.reduce(cast(Any, Bucket(torch.ones(2))))
        with pytest.raises(RuntimeError) as caught:
            future.wait()
        carrier.outcomes.raise_first()
        return [str(caught.value).partition("\n")[0], str(carrier.outcomes.is_empty)]


def test_what_goes_wrong_in_a_hook_of_the_users_is_left_to_ddp() -> None:
    ((said, is_empty),) = ddp_ranks(1, with_a_hook_that_fails)
    assert "the script's own" in said
    assert is_empty == "True"


def scaled(state: float, bucket: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer().mul_(state))
    return future


def test_the_groups_own_collective_is_timed_and_counted() -> None:
    for rank, found in enumerate(ddp_ranks(2, natively)):
        assert found[:4] == [[[1.5] * 6, [3.0] * 6], [[0.75] * 6, [1.5] * 6], False, True]
        assert found[4:8] == [4, 4 * 24, True, True]
        assert found[8:10] == [True, {"gloo": 4}]
        mine = 3.0 * (1 + rank)
        assert found[10:] == [[[mine] * 6, [2 * mine] * 6], {"gloo": 4, "hook:scaled": 2}, False, False]


def last_by_the_group(path: str) -> list[Any]:
    """Between hosts a bucket of ours is open when the last one goes to the group: who ends it?"""
    with process_group(path, 2):
        from ringside import communicator

        comm = communicator(machine=f"host {place().rank}", algorithm="hosts/ring", timeout=30)
        carrier = RingsideReducer(comm, dist.group.WORLD)
        carrier.will_wait = True
        found = []
        for _ in range(2):
            ours, theirs = torch.full((1 << 18,), 1.0 + place().rank), torch.ones(6, dtype=torch.complex64)
            buckets: list[Any] = [Bucket(ours, 0, False), Bucket(theirs, 1, True)]
            futures = [carrier.reduce(bucket) for bucket in buckets]
            carrier.wait()
            found += [futures[0].done(), ours.unique().tolist()]
        carrier.close()
        return found


def test_an_open_bucket_is_ended_where_the_group_reduces_the_last() -> None:
    with meeting_point() as path:
        assert on_ranks(2, last_by_the_group, path) == [[True, [1.5]] * 2] * 2


def by_the_engine(path: str, hosts: list[int]) -> list[Any]:
    with process_group(path, len(hosts)):
        from ringside import communicator

        comm = communicator(machine=f"host {hosts[place().rank]}", algorithm="ring" if hosts[-1] else None, timeout=30)
        told: list[dict[str, int]] = []
        carrier = RingsideReducer(comm if hosts[-1] else comm.local, dist.group.WORLD)
        carrier.on_memory = told.append
        found = [carried(carrier), carried(carrier, 0.25), carrier.outcomes.ended > 0]
        if not hosts[-1]:
            carried(carrier, None, torch.complex64)
        times: SyncTimes = carrier.pop_timings()()
        found += [times.collectives, times.payload_bytes, times.sync_seconds > 0, sum(carrier.counters.values())]
        found.append(told)
        carrier.close()
        return found


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]])
def test_the_engine_carries_means_and_shares_and_says_what_it_took(hosts: list[int]) -> None:
    with meeting_point() as path:
        for found in on_ranks(2, by_the_engine, path, hosts):
            assert found[:3] == [[[1.5] * 6, [3.0] * 6], [[0.75] * 6, [1.5] * 6], True]
            more = 2 if hosts == [0, 0] else 0  # numbers that the engine does not know go to the group
            assert found[3:7] == [4 + more, 4 * 24 + more * 48, True, 4 + more]
            assert len(found[7]) == (hosts == [0, 0])


def beside_the_group(path: str) -> list[Any]:
    """What a synchronisation took, where the group reduced all of it, and where it reduced some."""
    of_group = SyncTimes(
        sync_seconds=1e3, wait_seconds=math.nan, payload_bytes=7, collectives=3, busy_seconds=500.0, latency_seconds=2.0
    )
    with process_group(path, 2), pytest.MonkeyPatch.context() as patch:
        from ringside import communicator

        carrier = RingsideReducer(communicator(timeout=30).local, dist.group.WORLD)
        patch.setattr(NativeReducer, "pop_timings", lambda self: lambda: of_group)
        carried(carrier, None, torch.complex64)
        alone = carrier.pop_timings()()
        carried(carrier)
        carried(carrier, None, torch.complex64)
        both: SyncTimes = carrier.pop_timings()()
        carrier.close()
        found = [alone is of_group, 1e3 < both.sync_seconds < 1060, 500 < both.busy_seconds < 560]
        return [*found, both.payload_bytes, both.collectives, 0 <= both.wait_seconds < 60, both.latency_seconds]


def test_what_the_engine_took_is_added_to_what_the_group_took_beside_it() -> None:
    with meeting_point() as path:
        for found in on_ranks(2, beside_the_group, path):
            assert found == [True, True, True, 2 * 24 + 7, 2 + 3, True, 2.0]
