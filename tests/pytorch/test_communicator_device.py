"""All-reduces where the tensors are: Gloo stands in for the group of a GPU, and tensors of the CPU for its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from bench.monitor.parallel_jobs import share_the_gpu  # noqa: E402
from tests.support.ranks import on_ranks, place  # noqa: E402

import ringside  # noqa: E402
from ringside.engine.net.exchange.device import DevicePeers  # noqa: E402
from ringside.engine.net.exchange.plan import plan_messages  # noqa: E402
from ringside.errors import SyncError, UnsupportedError, UsageError  # noqa: E402
from ringside.pytorch.communicator import gpu as communicator_device  # noqa: E402
from ringside.pytorch.communicator.gpu import OnDevice  # noqa: E402
from ringside.schedule import halving_doubling, ring  # noqa: E402

from .groups import communicator, meeting_point, process_group  # noqa: E402


def refused(device: OnDevice, x: Any, *args: Any, **how: Any) -> str:
    with pytest.raises((UsageError, UnsupportedError)) as raised:
        device.all_reduce(x, *args, **how)
    return str(raised.value)


def plan_of(device: OnDevice, x: Any) -> str:
    """Reduce where no algorithm is named; return by which schedule it went."""
    names: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        run = DevicePeers.run

        def noted(peers: DevicePeers, plan: Any, *args: Any) -> None:
            names.append(plan.schedule.name)
            run(peers, plan, *args)

        patch.setattr(DevicePeers, "run", noted)
        device.all_reduce(x)
    (name,) = names
    return name


def reduces(path: str, size: int) -> None:
    with process_group(path, size) as group:
        device, rank = OnDevice(group, None), dist.get_rank()
        for algorithm in (None, "native", "ring", "two_tree", "recursive_doubling", "tree*3", "ring@2,0,1", ring(3)):
            x = torch.arange(7.0).mul_(rank + 1).view(7, 1)
            assert device.all_reduce(x, algorithm=algorithm) is x
            assert torch.equal(x, torch.arange(7.0).mul_(6).view(7, 1)), algorithm
        strided = torch.ones(4, 6)[:, ::2]
        device.all_reduce(strided, "avg", algorithm="ring", scale=rank + 1.0)
        assert torch.equal(strided, torch.full((4, 3), 2.0))
        for dtype in (torch.int16, torch.bool):  # which Gloo's own does not add up
            most = torch.tensor([rank, 2 - rank]).to(dtype)
            device.all_reduce(most, "max", algorithm="halving_doubling")
            assert torch.equal(most, torch.tensor([2, 2]).to(dtype))
        whole = torch.tensor([-7, 8]) * (rank == 0)
        device.all_reduce(whole, "avg")
        assert whole.tolist() == [-2, 2]
        for algorithm in (None, "ring"):
            mean = torch.full((5,), float(rank))
            device.all_reduce(mean, "avg", weights=[1.0, 0.0, 3.0], algorithm=algorithm)
            assert torch.equal(mean, torch.full((5,), 1.5))
            leaf = torch.ones(3, requires_grad=True)
            work = device.all_reduce(leaf, async_op=True, algorithm=algorithm)
            assert work.is_completed()
            assert work.exception() is None
            assert work.result() is leaf
            assert torch.equal(leaf.detach(), torch.full((3,), 3.0))
        empty = torch.zeros(0)
        device.all_reduce(empty, algorithm="ring")
        assert plan_of(OnDevice(group, communicator_device.AlgorithmSpec.parse("ring")), torch.ones(3)) == "ring"


def test_every_way_gives_the_same() -> None:
    with meeting_point() as path:
        on_ranks(3, reduces, path, 3)


def refuses(path: str) -> None:
    with process_group(path, 2) as group:
        device, x = OnDevice(group, None), torch.ones(4)
        assert "shared memory" in refused(device, x, algorithm="hosts/ring")
        assert "there is no algorithm" in refused(device, x, algorithm="circle")
        assert "reduces at a switch" in refused(device, x, algorithm="in_network")
        assert "a schedule of 3 ranks among 2" in refused(device, x, algorithm=ring(3))
        assert "unknown reduction" in refused(device, x, "median")
        assert "no bxor of float32" in refused(device, x, "bxor")
        assert "dtype complex64" in refused(device, torch.ones(2, dtype=torch.complex64))
        assert "floating dtypes" in refused(device, torch.ones(2, dtype=torch.int32), scale=2.0)
        assert "op='avg'" in refused(device, x, "sum", weights=1.0)
        assert ".to_dense()" in refused(device, torch.eye(2).to_sparse())
        assert torch.equal(x, torch.ones(4))
        device.all_reduce(x, algorithm="ring")
        assert torch.equal(x, torch.full((4,), 2.0))


def test_what_cannot_be_is_refused_before_anything_is_sent() -> None:
    with meeting_point() as path:
        on_ranks(2, refuses, path)


def through_the_communicator(path: str, hosts: Sequence[int], algorithm: str | None) -> tuple[list[float], str]:
    """Complex numbers, which the engine does not take, are taken for a tensor on a GPU."""
    import ringside.pytorch.communicator.communicator as between
    import ringside.pytorch.communicator.one_host as inside

    def pretended(x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.dtype == torch.complex64

    taken: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (between, inside):
            patch.setattr(module, "on_device", pretended)
        real = OnDevice.all_reduce

        def noted(device: OnDevice, x: Any, *args: Any, **how: Any) -> Any:
            taken.append((args, how))
            return real(device, x.real.contiguous(), *args, **how)

        patch.setattr(OnDevice, "all_reduce", noted)
        with communicator(path, hosts, algorithm=algorithm) as comm:
            numbers = comm.all_reduce(torch.full((3,), comm.rank + 1.0, dtype=torch.complex64))
            plain = comm.all_reduce(torch.ones(3))
            assert torch.equal(plain, torch.full((3,), 2.0))
            assert len(taken) == 1
            with pytest.raises(UnsupportedError):
                comm.all_reduce(torch.ones(2, dtype=torch.complex128))
            return numbers.tolist(), str(taken[0][1].get("algorithm"))


@pytest.mark.native
@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]])
def test_tensors_on_gpus_go_where_they_are(hosts: list[int]) -> None:
    with meeting_point() as path:
        assert on_ranks(2, through_the_communicator, path, hosts, "ring") == [([3.0] * 3, "None")] * 2


def test_where_a_tensor_is() -> None:
    assert not communicator_device.on_device(torch.ones(2))
    assert not communicator_device.on_device([1.0])


# ------------------------------------------------------------------------------------------------ what is queued


class Coalescing:
    """A group whose backend takes several messages as one; it loses them all."""

    supports_coalescing = True

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def _get_backend(self, device: Any) -> Coalescing:
        return self

    def _start_coalescing(self, device: Any) -> None:
        self.calls.append("start")

    def send(self, tensors: list[Any], peer: int, tag: int) -> None:
        self.calls.append(("send", peer, tensors[0].numel()))

    def recv(self, tensors: list[Any], peer: int, tag: int) -> None:
        self.calls.append(("recv", peer, tensors[0].numel()))

    def _end_coalescing(self, device: Any) -> Coalescing:
        self.calls.append("end")
        return self

    def wait(self) -> None:
        self.calls.append("wait")


def test_a_round_goes_to_the_backend_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    group = Coalescing()
    peers = DevicePeers(group)  # type: ignore[arg-type]
    plan = plan_messages(halving_doubling(4), 1)
    peers.run(plan, list(torch.ones(8).split(2)), "sum")
    rounds = [k for k, call in enumerate(group.calls) if call == "start"]
    assert len(rounds) == 4
    first = group.calls[: rounds[1]]
    assert first[0] == "start"
    assert first[-2:] == ["end", "wait"]
    assert {call[0] for call in first[1:-2]} == {"send", "recv"}
    assert len({call[1] for call in first[1:-2]}) == 1  # each exchanges with one other: neither may wait for the other


def loses_a_rank(path: str) -> str:
    with process_group(path, 2) as group:
        device = OnDevice(group, None)
        if dist.get_rank() == 1:
            return ""
        with pytest.raises(SyncError) as raised:
            device.all_reduce(torch.ones(1 << 20), algorithm="ring")
        return str(raised.value)


def test_an_error_of_the_group_names_the_collective() -> None:
    with meeting_point() as path:
        assert on_ranks(2, loses_a_rank, path)[0].startswith("all_reduce by ring on cpu, rank 0 of 2: ")


def reduces_on_gpu(path: str, size: int) -> None:
    share_the_gpu(place().rank)
    with process_group(path, size):
        group = dist.new_group(backend="nccl")
        comm, rank = ringside.communicator(group), dist.get_rank()
        for algorithm in (None, "ring", "two_tree", "recursive_doubling", ring(size)):
            x = torch.arange(70_001.0, device="cuda").mul_(rank + 1)
            comm.all_reduce(x, algorithm=algorithm)
            assert torch.equal(x.cpu(), torch.arange(70_001.0).mul_(size * (size + 1) // 2)), algorithm
        mean = torch.full((5,), float(rank), device="cuda", dtype=torch.bfloat16)
        comm.all_reduce(mean, "avg", algorithm="ring")
        assert mean.tolist() == [(size - 1) / 2] * 5
        comm.close()
        dist.destroy_process_group(group)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("size", [2, 3])
def test_schedules_on_a_gpu_over_nccl(size: int) -> None:
    with meeting_point() as path:
        on_ranks(size, reduces_on_gpu, path, size)
