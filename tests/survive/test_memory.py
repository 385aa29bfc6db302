import gc
import itertools
import mmap
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ringside.engine.dtypes import dtype_code  # noqa: E402
from ringside.errors import RingsideError, UnsupportedError  # noqa: E402
from ringside.processes import start_time  # noqa: E402
from ringside.survive.all_reduce.gradients import AttemptRun, FlatGradient, add_up, slice_of  # noqa: E402
from ringside.survive.all_reduce.one_host import AttemptWord, HostLayout, HostSums, HostView  # noqa: E402
from ringside.survive.cluster.peers import Peer, PeerPlace, own_place  # noqa: E402
from ringside.survive.cluster.shared_memory import Address, OwnArena, read_only  # noqa: E402


def test_only_the_owner_can_write_and_nobody_can_cut_it_short():
    arena = OwnArena(8192)
    seen = read_only(arena.address)
    arena.bytes[5] = 7
    assert seen[5] == 7
    assert not seen.flags.writeable
    fd = os.open(f"/proc/self/fd/{arena.address.fd}", os.O_RDWR)
    for attempt in (
        lambda: mmap.mmap(fd, 8192),
        lambda: os.pwrite(fd, b"x", 0),
        lambda: os.ftruncate(fd, 0),
    ):
        with pytest.raises(PermissionError):
            attempt()
    os.close(fd)
    arena.bytes[6] = 8
    assert seen[6] == 8
    arena.close()
    del seen
    gc.collect()


def test_memory_that_is_not_what_was_announced_is_refused():
    arena = OwnArena(4096)
    other = os.memfd_create("ringside-unsealed")
    os.ftruncate(other, 4096)
    status = os.fstat(other)
    for address in (
        Address(os.getpid(), arena.address.fd, arena.address.inode + 1, 4096),
        Address(os.getpid(), arena.address.fd, arena.address.inode, 8192),
        Address(os.getpid(), other, status.st_ino, 4096),
        Address(os.getpid(), 99999, 1, 4096),
    ):
        with pytest.raises(RingsideError, match=r"gone|other memory"):
            read_only(address)
    os.close(other)
    arena.close()


def test_a_stopped_process_is_seen_put_to_death_and_not_mistaken_for_another():
    worker = (
        "from ringside.survive.cluster.peers import PeerMark; mark = PeerMark(); print('here', flush=True); input()"
    )
    child = subprocess.Popen([sys.executable, "-c", worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"here\n"
    machine = own_place().machine
    started = start_time(child.pid)
    peer = Peer(PeerPlace(machine, child.pid, started), machine)
    stranger = Peer(PeerPlace(machine, child.pid, started - 1), machine)
    elsewhere = Peer(PeerPlace("another", child.pid, started), machine)
    assert (peer.ended(), stranger.ended(), elsewhere.ended()) == (False, True, False)
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert [each.stopped() for each in (peer, stranger, elsewhere)] == [True, False, False]
    assert not elsewhere.put_to_death()
    assert stranger.put_to_death(), "it has ended already"
    assert not peer.ended()
    assert peer.put_to_death()
    assert peer.ended()
    assert child.wait(10) == -signal.SIGKILL
    child.stdin.close()
    child.stdout.close()
    for each in (peer, stranger, elsewhere):
        each.close()


def test_a_worker_of_another_user_is_none_of_this_job_whatever_it_shows(monkeypatch):
    worker = "from ringside.survive.cluster.peers import PeerMark; mark = PeerMark(); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        peer = Peer(PeerPlace(own_place().machine, child.pid, start_time(child.pid)), own_place().machine)
        with monkeypatch.context() as asking:
            asking.setattr(os, "geteuid", lambda: os.getuid() + 1)
            assert peer.put_to_death(), "it takes no part"
        assert child.poll() is None
        assert peer.put_to_death()
        assert child.wait(10) == -signal.SIGKILL
        peer.close()


def test_a_process_that_does_not_show_that_it_is_a_worker_is_left_alone(caplog):
    with subprocess.Popen(["sleep", "60"]) as other:
        peer = Peer(PeerPlace(own_place().machine, other.pid, start_time(other.pid)), own_place().machine)
        assert (peer.stopped(), peer.is_this_process) == (False, False)
        assert peer.put_to_death(), "it takes no part"
        assert other.poll() is None
        assert f"process {other.pid} is registered as a rank" in caplog.text
        peer.close()
        other.kill()
    silent = [0.0]
    away = Peer(PeerPlace("another", 1, 1), own_place().machine, lambda: silent[0])
    for seconds, ended in ((0.0, False), (2.0, False), (2.1, True)):
        silent[0] = seconds
        assert away.ended() == ended


def packed():
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3).double(), torch.nn.Linear(3, 2))
    return FlatGradient(list(model.parameters())), [p.shape for p in model.parameters()]


def test_gradients_of_several_dtypes_lie_side_by_side_and_do_not_overlap():
    packing, shapes = packed()
    views = packing.views(np.zeros(packing.size_bytes, dtype=np.uint8))
    assert [view.shape for view in views] == shapes
    for number, view in enumerate(views):
        view.fill_(number)
    assert [set(view.flatten().tolist()) for view in views] == [{float(number)} for number in range(6)]


def test_runs_of_one_dtype_begin_at_cache_lines_and_arenas_at_pages():
    packing, _ = packed()
    float32, float64 = dtype_code(torch.float32), dtype_code(torch.float64)
    # 7 * 5 + 5 and 3 * 2 + 2 elements of 4 bytes, 5 * 3 + 3 of 8.
    assert packing.runs == [AttemptRun(float32, 4, 0, 48), AttemptRun(float64, 8, 192, 18)]
    assert packing.size_bytes == 384
    assert [slice_of(1000, part, 3) for part in range(3)] == [(0, 320), (320, 640), (640, 1000)]
    for size, stride in ((0, 0), (1, 4096), (4096, 4096), (4097, 8192)):
        assert HostLayout(size, (), {}).stride == stride
    layout = HostLayout(64, packing.runs, {0: (5, 1), 2: (0,)})
    last, second, first = np.arange(3, dtype=np.uint8).reshape(3, 1)
    assert [int(one[0]) for one in layout.in_order({0: [last, second], 2: [first]})] == [2, 1, 0]
    view = HostView.of(np.arange(4 * 4096, dtype=np.uint32).view(np.uint8)[: 4 * 4096], 2, layout)
    assert [piece.view(np.uint32)[0] for piece in (*view.slots, view.sums)] == [1024, 2048, 3072]
    assert {len(piece) for piece in (*view.slots, view.sums)} == {64}
    assert len(view.words) == 64


def test_what_cannot_be_added_up_is_refused():
    with pytest.raises(UnsupportedError, match="host memory"):
        FlatGradient([torch.empty(3, device="meta")])
    with pytest.raises(UnsupportedError, match="complex64"):
        FlatGradient([torch.empty(3, dtype=torch.complex64)])


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_slices_cover_everything_once(parts):
    bounds = [slice_of(1000, part, parts) for part in range(parts)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == 1000
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))


def reduced(slots, step, gradients):
    """Run one all-reduce among HostSums of this process and return every rank's result."""
    packing, _ = packed()
    layout = HostLayout(packing.size_bytes, packing.runs, slots)
    ranks = {rank: HostSums(rank, layout) for rank in slots}
    for rank, one in ranks.items():
        for other in slots:
            if other != rank:
                one.meet(other, ranks[other].address)
        for of, slot in zip(slots[rank], one.slots, strict=True):
            for view, value in zip(packing.views(slot), gradients[of], strict=True):
                view.copy_(value)
        assert ranks[rank].silent(AttemptWord.READY, step) == sorted(slots)[sorted(slots).index(rank) :]
        one.write_word(AttemptWord.READY, step)
    for one in ranks.values():
        one.add_up()
        one.write_word(AttemptWord.SUMMED, step)
    results = [np.zeros(packing.size_bytes, dtype=np.uint8) for _ in ranks]
    for one, result in zip(ranks.values(), results, strict=True):
        assert one.silent(AttemptWord.SUMMED, step) == []
        one.collect(result)
    for one in ranks.values():
        one.close()
    return packing, results


@pytest.mark.parametrize(
    "slots",
    [{0: (0, 1, 2, 3)}, {0: (0, 1), 3: (2, 3)}, {1: (3,), 2: (), 5: (2, 0, 1)}, {0: (1,), 1: (0,), 2: (3,), 3: (2,)}],
)
def test_the_sum_has_the_same_bits_whoever_computed_what(slots):
    torch.manual_seed(3)
    _, shapes = packed()
    dtypes = [view.dtype for view in packed()[0].views(np.zeros(packed()[0].size_bytes, dtype=np.uint8))]
    gradients = [
        [torch.randn(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)] for _ in range(4)
    ]
    packing, results = reduced(slots, 9, gradients)
    for result in results:
        for at, view in enumerate(packing.views(result)):
            expected = gradients[0][at] + gradients[1][at] + gradients[2][at] + gradients[3][at]
            assert torch.equal(view, expected)


def test_sums_of_a_part_leave_the_rest_alone():
    packing, _ = packed()
    sources = [np.ones(packing.size_bytes, dtype=np.uint8) for _ in range(2)]
    target = np.zeros(packing.size_bytes, dtype=np.uint8)
    add_up(packing.runs, sources, target, 64, 128)
    assert not target[:64].any()
    assert not target[128:].any()
    assert target[64:128].any()


def test_a_slice_is_added_up_in_two_halves_of_whole_numbers():
    sums = HostSums(0, HostLayout(8192, [AttemptRun(dtype_code("float64"), 8, 0, 1024)], {0: (0, 1)}))
    for at, slot in enumerate(sums.slots):
        slot.view(np.float64)[:] = 10.0**at
    seen = []
    sums.add_up(lambda: seen.append(sums.views[0].sums.view(np.float64).tolist()))
    assert seen == [[11.0] * 512 + [0.0] * 512]
    total = np.zeros(8192, dtype=np.uint8)
    sums.collect(total)
    assert total.view(np.float64).tolist() == [11.0] * 1024
    sums.close()
