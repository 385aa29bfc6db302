"""`RINGSIDE_AS_GLOO=1`: programs that ask for "gloo" get the engine, with Gloo's results, where all ranks have it."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import errno
import hashlib
import os
import platform
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
if not hasattr(torch.distributed.ProcessGroup, "_set_default_backend"):
    pytest.skip("refused in one line: torch 2.13 and newer were tested", allow_module_level=True)
import torch.distributed as dist  # noqa: E402
from tests.support.ranks import on_ranks, place  # noqa: E402
from tests.support.waiting import free_port  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402

import ringside  # noqa: E402
from ringside.autoload import ringside_backend  # noqa: E402
from ringside.engine.shm.meeting_place import ROOTS  # noqa: E402
from ringside.errors import ClosedError, DeadlineError  # noqa: E402
from ringside.pytorch.process_group.carrier import carried, carrier_of  # noqa: E402
from ringside.pytorch.process_group.creation import IS_BACKEND  # noqa: E402

from . import namespaces  # noqa: E402
from .groups import meeting_point, own_machines  # noqa: E402
from .process_groups import LIMIT_S, backend  # noqa: E402
from .training import Said  # noqa: E402

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(
        not hasattr(dist.AllreduceOptions, "asyncOp"), reason="refused in one line: torch 2.13 and newer were tested"
    ),
]


def served(path: str, lacking: tuple[int, ...], function: Any, *args: Any) -> Any:
    """Run `function(rank, *args)` in a default group made by the name "gloo"; ranks in `lacking` lack Ringside."""
    if place().rank not in lacking:
        ringside_backend.serve_gloo(c10d)
    with backend(path, "gloo", 30.0) as rank:
        return function(rank, *args)


def on_served(size: int, lacking: tuple[int, ...], function: Any, *args: Any) -> list[Any]:
    with meeting_point() as path:
        results: list[Any] = on_ranks(size, served, path, lacking, function, *args, limit_s=LIMIT_S)
        return results


def is_ours(group: Any = None) -> bool:
    return carrier_of(group or c10d._get_default_group()) is not None


def operations(rank: int) -> list[Any]:
    """What CPU groups are used for."""
    size = dist.get_world_size()
    group = dist.new_group(backend="gloo")
    found: list[Any] = [dist.get_backend(), dist.get_backend(group), dist.get_backend_config(group)]
    ints = torch.arange(4 * size, dtype=torch.int32).reshape(4, size) * (rank + 1)
    dist.all_reduce(ints, group=group)
    later = [torch.full((5,), float(rank + i)) for i in range(6)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in later]
    for work in works:
        work.wait()
    into = torch.empty(3 * size, dtype=torch.int64)
    dist.all_gather_into_tensor(into, torch.full((3,), rank), group=group)
    lists = [torch.empty(2) for _ in range(size)]
    dist.all_gather(lists, torch.full((2,), rank / 3))
    root = torch.full((7,), rank + 0.5)
    dist.broadcast(root, 1)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    told: list[Any] = ["words", 3] if rank == 0 else [None, None]
    dist.broadcast_object_list(told, 0)
    dist.barrier()
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=20))
    got = torch.zeros(3)
    if rank == 1:
        dist.send(torch.full((3,), 8.0), 0)
    elif rank == 0:
        dist.recv(got)
    return [*found, ints, *later, into, *lists, root, objects, told, got]


def equal(a: Any, b: Any) -> bool:
    return bool(torch.equal(a, b)) if isinstance(a, torch.Tensor) else bool(a == b)


@pytest.mark.parametrize("size", [2, 3])
def test_operations_of_cpu_groups_give_what_gloo_gives(size):
    ours, theirs = on_served(size, (), operations), on_served(size, tuple(range(size)), operations)
    for mine, stock in zip(ours, theirs, strict=True):
        assert all(equal(a, b) for a, b in zip(mine, stock, strict=True))


def kinds(rank: int) -> tuple[bool, dict[str, Any]]:
    x = torch.ones(3)
    dist.all_reduce(x)
    return is_ours(), carried() if is_ours() else {"sum": x.tolist()}


def test_the_engine_carries_it():
    assert on_served(2, (), kinds) == [(True, {"ringside": {"all_reduce": 1}})] * 2


def told_of(path: str, lacking: tuple[int, ...], late: tuple[int, ...]) -> tuple[Any, list[str]]:
    """Make two groups where some ranks lack Ringside, and some come late; return who carries, and what is said."""
    with Said() as said:
        if place().rank in late:
            time.sleep(1.0)  # the others have long found out by then
        return served(path, lacking, lambda rank: [dist.new_group(backend="gloo"), kinds(rank)][1]), said.lines


@pytest.mark.parametrize(("lacking", "late"), [((0,), ()), ((1,), ()), ((0, 2), ()), ((0, 2), (0,))])
def test_where_a_rank_lacks_us_all_stay_on_gloo_and_that_is_said_once(lacking, late):
    with meeting_point() as path:
        told = on_ranks(3, told_of, path, lacking, late, limit_s=LIMIT_S)
    assert [found for found, _ in told] == [(False, {"sum": [3.0] * 3})] * 3
    first = min({0, 1, 2} - set(lacking))
    assert len(told[first][1]) == 1
    for rank, (_, lines) in enumerate(told):
        # Also on a rank that has not seen yet that a lower one has us, too.
        assert len(lines) <= (rank not in lacking)
        why = [f"a group of the backend gloo stays on Gloo: rank {other} has no Ringside" for other in lacking]
        assert set(lines) <= set(why)


def left_alone(rank: int) -> list[Any]:
    """Make groups that are Gloo's own affair, and use them."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    checked = dist.new_group(backend="gloo")
    dist.set_debug_level(dist.DebugLevel.OFF)
    groups = [checked, [dist.new_group([each], backend="gloo") for each in range(2)][rank], dist.group.WORLD]
    sums = []
    for group in groups:
        dist.all_reduce(x := torch.ones(1), group=group)
        sums.append(x.item())
    return [*map(is_ours, groups), *sums]


def test_groups_under_torchs_detailed_checks_and_of_one_rank_are_left_to_gloo():
    assert on_served(2, (), left_alone) == [[False, False, True, 2.0, 1.0, 2.0]] * 2


def another_version(path: str, of: str) -> tuple[bool, list[str]]:
    """Rank 1 has another version; return who carries, and what is said of it."""
    others = mock.patch(of, "9.9") if place().rank == 1 else contextlib.nullcontext()
    with Said() as said, others:
        return served(path, (), kinds)[0], said.about("stays on Gloo")


@pytest.mark.parametrize("of", ["ringside.pytorch.process_group.as_gloo.__version__", "torch.__version__"])
def test_where_versions_differ_all_stay_on_gloo_and_the_rank_is_named(of):
    with meeting_point() as path:
        (first, (line,)), second = on_ranks(2, another_version, path, of, limit_s=LIMIT_S)
    assert (first, second) == (False, (False, []))
    name, has = ("torch", torch.__version__) if of.startswith("torch") else ("ringside", ringside.__version__)
    assert f"rank 1 on host {socket.gethostname()}: {name} 9.9, where rank 0 has {has}" in line


# ---------------------------------------------------------------------------- hosts that give no shared memory


def forbid(call: str) -> None:
    """Have the system refuse a call to this thread from now on, as a container's rules would."""
    if call == "large files":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        return
    number = {"pidfd_open": 434, "memfd_create": {"x86_64": 319, "aarch64": 279}[platform.machine()]}[call]
    # BPF: load the number of the call; if it is this one return EPERM, else allow it.
    rules = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | errno.EPERM), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(38, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS"
    assert prctl(22, 2, struct.pack("HxxxxxxP", len(rules), ctypes.addressof(program))) == 0, "PR_SET_SECCOMP"


def forbidden(path: str, call: str, ranks: tuple[int, ...]) -> tuple[list[Any], list[str]]:
    """Use groups of both names, where some ranks can share no memory; return what came of it, and what is said."""
    if place().rank in ranks:
        forbid(call)
    ringside_backend.serve_gloo(c10d)
    with Said() as said, backend(path, "gloo", 30.0) as rank:
        found: list[Any] = []
        for name in ("gloo", "ringside"):
            group, x = dist.new_group(backend=name), torch.full((40_000,), rank + 0.5)
            work = dist.all_reduce(x, group=group, async_op=True)
            work.wait()
            dist.barrier(group)
            found += [is_ours(group), set(x.tolist())]
    return found, said.about("Gloo")


@pytest.mark.parametrize(
    ("call", "ranks"), [("memfd_create", (0, 1)), ("pidfd_open", (0,)), ("large files", (1,))], ids=lambda v: str(v)
)
def test_where_a_rank_can_share_no_memory_all_stay_on_gloo(call, ranks):
    with meeting_point() as path:
        (found, (line,)), second = on_ranks(2, forbidden, path, call, ranks, limit_s=LIMIT_S)
    assert found == [False, {2.0}, True, {2.0}], "by the name ringside it is carried as between hosts"
    assert second == (found, [])
    assert f"rank {ranks[0]} on host {socket.gethostname()}: no shared memory (" in line


def in_namespace(port: int, shm: str, ranks: tuple[int, ...]) -> tuple[bool, list[float], list[str]]:
    """Use a group where /dev/shm is as said on some ranks, each in a namespace of its own."""
    rank = place().rank
    if rank in ranks:
        namespaces.enter_own()
        if shm == "absent":
            namespaces.mount_without_shm()
        elif shm == "tiny":
            namespaces.mount_small("/dev/shm", 64 << 10)
        for root in {"read-only": ("/dev/shm",), "as all directories": ROOTS}.get(shm, ()):
            namespaces.make_read_only(root)
    ringside_backend.serve_gloo(c10d)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    with Said() as said:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        ours = is_ours()
        x = torch.full((1_000_000,), rank + 0.5)
        dist.all_reduce(x)
        dist.destroy_process_group()
    return ours, [x.min().item(), x.max().item()], said.lines


@pytest.mark.parametrize(
    ("shm", "ranks"),
    [("tiny", (1,)), ("read-only", (0, 1)), ("absent", (0, 1)), ("as all directories", (0, 1))],
    ids=lambda v: str(v),
)
def test_dev_shm_is_not_needed(shm, ranks):
    if not namespaces.possible():
        pytest.skip("needs the privilege to make a mount namespace")
    results = on_ranks(2, in_namespace, free_port(), shm, ranks, limit_s=LIMIT_S)
    assert results == [(True, [2.0, 2.0], [])] * 2


def absent(path: str) -> tuple[str, Any]:
    """Rank 1 does not come."""
    ringside_backend.serve_gloo(c10d)
    if place().rank == 1:
        return "", None
    with pytest.raises(DeadlineError) as caught, backend(path, "gloo", 1.0):
        pass
    return str(caught.value), caught.value.ranks


def test_a_rank_that_does_not_come_is_named():
    with meeting_point() as path:
        (text, ranks), _ = on_ranks(2, absent, path, limit_s=LIMIT_S)
    assert text.startswith("Timed out waiting 1000ms: rank 1 did not make")
    assert tuple(ranks) == (1,)


def without_waiting(rank: int) -> list[Any]:
    """Make groups whose calls may wait for nobody, each rank late once."""
    heard: list[Any] = []
    for late in (0, 1):
        dist.barrier()
        if rank == late:
            time.sleep(0.3)
        group = dist.new_group(backend="gloo", timeout=datetime.timedelta(0))
        heard.append(is_ours(group))
        if rank == 0:
            with pytest.raises(RuntimeError, match="Timed out waiting 0ms"):
                dist.barrier(group)
    return heard


def test_a_timeout_of_0_is_for_calls_and_not_for_making_the_group():
    ours, theirs = on_served(2, (), without_waiting), on_served(2, (0, 1), without_waiting)
    assert (ours, theirs) == ([[True, True]] * 2, [[False, False]] * 2)


def lives(rank: int) -> list[Any]:
    """Groups made and destroyed while others live; one never used; a forked child."""
    kept, gone, unused = (dist.new_group(backend="gloo") for _ in range(3))
    x = torch.ones(2)
    dist.all_reduce(x, group=gone)
    assert carrier_of(unused) is not None
    dist.destroy_process_group(gone)
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(x, group=unused)
        except ClosedError:
            os._exit(7)
        os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    dist.all_reduce(x, group=kept)
    dist.destroy_process_group(unused)
    return [x.tolist(), status]


def test_groups_end_apart_from_others_and_a_fork_is_refused():
    assert on_served(2, (), lives) == [[[4.0, 4.0], 7]] * 2


def crossed(rank: int) -> list[float]:
    """Two groups whose first collectives are begun in another order on each rank."""
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    tensors = [torch.full((4,), float(rank + i)) for i in range(2)]
    order = (0, 1) if rank == 0 else (1, 0)
    works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]
    for work in works:
        work.wait()
    more = torch.ones(1)
    for group in groups:
        dist.all_reduce(more, group=group)
    return [tensors[0][0].item(), tensors[1][0].item(), more.item()]


def test_what_is_begun_asynchronously_waits_for_nobody():
    assert on_served(2, (), crossed) == [[1.0, 3.0, 4.0]] * 2


# -------------------------------------------------------------------------------------------------- several threads

THREADS, ROUNDS = 3, 12


def by_threads(group_of: Any, turn_of: Any) -> list[Any]:
    """On each thread begin operations, wait for them, the last one first; return digests of all results by thread.

    Args:
        group_of: Which group a thread uses, by its number.
        turn_of: Where a thread begins its collectives of a round: gets its number and the round's.
    """
    rank = dist.get_rank()

    def work(thread: int) -> list[str]:
        group, found = group_of(thread), []
        random = torch.Generator().manual_seed(1 + rank + 10 * thread)
        for turn in range(ROUNDS):
            numel = (7, 3000, 100_000)[(thread + turn) % 3]
            summed, own, root, sent = (torch.rand(numel, generator=random) for _ in range(4))
            lists, got = [torch.empty(numel) for _ in range(2)], torch.empty(numel)
            message = dist.isend if rank == turn % 2 else dist.irecv
            with turn_of(thread, turn):
                works = [
                    dist.all_reduce(summed, group=group, async_op=True),
                    dist.all_gather(lists, own, group=group, async_op=True),
                    dist.broadcast(root, thread % 2, group=group, async_op=True),
                ]
            works.append(message(sent if rank == turn % 2 else got, 1 - rank, group=group, tag=thread))
            for each in reversed(works):
                each.wait()
            results = [summed, *lists, root, sent if rank == turn % 2 else got]
            found += [hashlib.sha256(result.numpy().tobytes()).hexdigest() for result in results]
        return found

    with ThreadPoolExecutor(THREADS) as pool:
        return [digest for found in pool.map(work, range(THREADS)) for digest in found]


def a_group_each(rank: int) -> list[Any]:
    groups = [dist.new_group(backend="gloo") for _ in range(THREADS)]
    return by_threads(groups.__getitem__, lambda thread, turn: contextlib.nullcontext())


def one_group_in_turns(rank: int) -> list[Any]:
    """The threads see to the order: it is equal on all ranks, as Gloo demands."""
    group, last, changed = dist.new_group(backend="gloo"), [-1], threading.Condition()

    @contextlib.contextmanager
    def turn_of(thread: int, turn: int) -> Iterator[None]:
        with changed:
            changed.wait_for(lambda: last[0] == turn * THREADS + thread - 1, 60)
            yield
            last[0] += 1
            changed.notify_all()

    return by_threads(lambda thread: group, turn_of)


def between_hosts(rank: int) -> list[Any]:
    with own_machines():
        return [*a_group_each(rank), *one_group_in_turns(rank)]


@pytest.mark.parametrize("job", [a_group_each, one_group_in_turns, between_hosts])
def test_threads_get_what_gloo_gives(job):
    ours, theirs = on_served(2, (), job), on_served(2, (0, 1), job)
    for mine, stock in zip(ours, theirs, strict=True):
        assert len(mine) in (THREADS * ROUNDS * 5, 2 * THREADS * ROUNDS * 5)
        assert mine == stock


def begun_while_another_waits(rank: int) -> list[float]:
    """Rank 1 begins the first collective when rank 0 has begun the second, while a thread of it waits for the first."""
    group, told = dist.new_group(backend="gloo"), torch.zeros(1)
    first, second = torch.full((4,), rank + 1.0), torch.full((4,), rank + 5.0)
    if rank == 1:
        dist.recv(told, 0, group=group)
    work = dist.all_reduce(first, group=group, async_op=True)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(work.wait)
        if rank == 0:
            time.sleep(0.1)  # it waits, or is about to: either way what follows may not wait
        later = dist.all_gather_into_tensor(torch.empty(8), second, group=group, async_op=True)
        assert rank == 1 or not waits.done()
        if rank == 0:
            dist.send(told, 1, group=group)
        waits.result()
    later.wait()
    return [first[0].item(), *later.result()[0].tolist()] if is_ours(group) else []


def test_a_thread_begins_a_collective_while_another_waits():
    assert on_served(2, (), begun_while_another_waits) == [[3.0, *[5.0] * 4, *[6.0] * 4]] * 2


def waiting(rank: int) -> list[float]:
    """CPU seconds of a rank that waits for a late one: in a message, an all-reduce, a barrier; and of idle groups."""
    x, used = torch.ones(4), []
    dist.all_reduce(x)
    for wait in (lambda: dist.recv(x, 1) if rank == 0 else dist.send(x, 0), lambda: dist.all_reduce(x), dist.barrier):
        dist.barrier()
        before = time.process_time()
        if rank == 1:
            time.sleep(1.5)
        wait()
        used.append(time.process_time() - before)
    before = time.process_time()
    time.sleep(1.5)
    return [*used, time.process_time() - before]


def test_waiting_takes_no_core():
    ours, theirs = on_served(2, (), waiting)[0], on_served(2, (0, 1), waiting)[0]
    # A rank that spun would use all of the 1.5 s.
    assert all(mine < 10 * stock + 0.3 for mine, stock in zip(ours, theirs, strict=True)), (ours, theirs)


def trained(rank: int, folder: str) -> list[Any]:
    """DDP, FSDP2, DTensor, and a checkpoint of it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    make = lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))  # noqa: E731
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    replicated, sharded = DistributedDataParallel(make()), make()
    fully_shard(sharded, mesh=mesh)
    for model in (replicated, sharded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.full((2, 8), rank + 1.0)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    spread = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)])
    state = {"model": sharded.state_dict(), "spread": spread}
    dcp.save(state, checkpoint_id=folder + "/now")
    dcp.async_save(state, checkpoint_id=folder + "/later").result()
    back = {"spread": torch.distributed.tensor.zeros(4, 3, device_mesh=mesh, placements=[Shard(0)])}
    dcp.load(back, checkpoint_id=folder + "/later")
    return [
        *(p.detach() for p in replicated.parameters()),
        *(p.full_tensor().detach() for p in sharded.parameters()),
        back["spread"].full_tensor(),
    ]


def test_training_and_checkpoints_give_what_gloo_gives(tmp_path):
    ours = on_served(2, (), trained, str(tmp_path / "ours"))
    theirs = on_served(2, (0, 1), trained, str(tmp_path / "gloo"))
    for mine, stock in zip(ours, theirs, strict=True):
        assert all(equal(a, b) for a, b in zip(mine, stock, strict=True))


def saved_by_another_process(rank: int, folder: str, port: int, asks: str) -> list[Any]:
    """Save twice by a process that torch starts for it, which makes a group by the name "gloo"; see what it maps."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import _async_process_executor as executor
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    meets = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ.update(meets, RINGSIDE_AS_GLOO=asks)
    for turn in range(2):
        state = {"x": torch.arange(12.0) + turn}
        saving = dcp.async_save(
            state, checkpoint_id=f"{folder}/{turn}", async_checkpointer_type=AsyncCheckpointerType.PROCESS
        )
        saving.result()
    process = executor._CHECKPOINT_PROCESS
    maps = Path(f"/proc/{process._save_process.pid}/maps").read_text()
    dcp.load(back := {"x": torch.zeros(12)}, checkpoint_id=f"{folder}/1")
    return ["memfd:ringside" in maps, back["x"].tolist()]


@pytest.mark.thorough
def test_checkpoints_are_saved_by_a_process_of_their_own_as_on_gloo(tmp_path):
    for lacking, asks in (((), "1"), ((0, 1), "0")):
        folder = str(tmp_path / asks)
        told = on_served(2, lacking, saved_by_another_process, folder, free_port(), asks)
        assert told == [[asks == "1", [float(i + 1) for i in range(12)]]] * 2


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
CUDA = torch.device("cuda")


def on_gpus(rank: int) -> list[Any]:
    """Collectives of tensors on the one GPU that all ranks share, between those of the host's."""
    found = []
    for device in ("cpu", "cuda", "cpu", "cuda"):
        dist.all_reduce(x := torch.full((1000,), float(rank + 1), device=device))
        dist.broadcast(y := torch.full((3,), float(rank), device=device), 1)
        parts = [torch.empty(2, device=device) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, torch.full((2,), float(rank), device=device))
        found += [x.cpu(), y.cpu(), torch.cat(parts).cpu()]
    return [*found, carried() if is_ours() else {}]


@needs_gpu
def test_tensors_on_gpus_are_left_to_gloo():
    (*ours, counts), (*theirs, _) = on_served(2, (), on_gpus)[1], on_served(2, (0, 1), on_gpus)[1]
    assert all(equal(a, b) for a, b in zip(ours, theirs, strict=True))
    twice = {"all_gather": 2, "all_reduce": 2, "broadcast": 2}
    assert counts == {"gloo": twice, "ringside": twice}


def beside_nccl(rank: int) -> tuple[Any, ...]:
    """Use the CPU half of such a group, and see whose the other half is. (Two ranks of one GPU: NCCL refuses those.)"""
    both = dist.new_group(backend="cpu:gloo,cuda:nccl")
    dist.all_reduce(x := torch.arange(8), group=both)
    torch.cuda.set_device(0)
    try:
        dist.all_reduce(torch.ones(8, device=CUDA), group=both)
        said = "it works"
    except dist.DistBackendError as error:
        said = "NCCL" if "NCCL" in str(error) else str(error)
    return x.tolist(), is_ours(both), dist.get_backend_config(both), type(both._get_backend(CUDA)).__name__, said


@needs_gpu
def test_the_other_half_of_a_group_is_nccls():
    for sums, ours, config, other, said in on_served(2, (), beside_nccl):
        assert sums == [2 * i for i in range(8)]
        assert (ours, config, other) == (True, "cpu:gloo,cuda:nccl", "ProcessGroupNCCL")
        assert said in ("NCCL", "it works")


def divided(rank: int) -> tuple[bool, str, float]:
    part = dist.split_group(split_ranks=[[0, 1]])
    x = torch.ones(1)
    dist.all_reduce(x, group=part)
    return is_ours(part), dist.get_backend(part), x.item()


@pytest.mark.skipif(
    hasattr(dist.AllreduceOptions, "asyncOp") and (torch.__version__ < "2.15" or not IS_BACKEND),
    reason="torch splits CPU groups from 2.15 on",
)
def test_a_group_that_is_split_off_is_served_too():
    assert on_served(2, (), divided) == [(True, "gloo", 2.0)] * 2


ASKED = """
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
print(hasattr(c10d._new_process_group_helper, "__wrapped__") or "GLOO" in c10d.Backend._plugins)
"""


@pytest.mark.parametrize(("environ", "serves"), [({}, True), ({"RINGSIDE": "off"}, False)])
def test_the_variable_asks_for_it_and_off_leaves_torch_alone(environ, serves):
    asked = {**os.environ, "RINGSIDE_AS_GLOO": "1", **environ}
    done = subprocess.run([sys.executable, "-c", ASKED], env=asked, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(serves)]


def test_a_torch_that_makes_groups_otherwise_is_left_alone(monkeypatch, caplog):
    def otherwise(size: int) -> None: ...

    monkeypatch.setattr(c10d, "_new_process_group_helper", otherwise)
    monkeypatch.setattr(c10d.Backend, "_plugins", {})
    if IS_BACKEND:
        monkeypatch.setattr(c10d.Backend, "_ensure_backend_registered", lambda name: None)
    ringside_backend.serve_gloo(c10d)
    assert c10d._new_process_group_helper is otherwise
    assert c10d.Backend._plugins == {}
    assert '"gloo" stays Gloo' in caplog.text


@pytest.mark.parametrize("fails", ["_ensure_backend_registered", "register_backend"])
def test_a_torch_that_does_not_let_us_is_left_alone_and_can_be_imported(fails, caplog):
    def refuses(*_: Any, **__: Any) -> None:
        raise RuntimeError("not here")

    backend = types.SimpleNamespace(
        _ensure_backend_registered=lambda name: None,
        _plugins={"GLOO": types.SimpleNamespace(creator_fn=None)},
        backend_capability={"gloo": ["cpu"]},
        register_backend=lambda *_, **__: None,
    )
    setattr(backend, fails, refuses)
    ringside_backend.serve_gloo(types.SimpleNamespace(Backend=backend))
    (line,) = caplog.messages
    assert '"gloo" stays Gloo' in line
