"""Steps of real training timed by marks: on a pretended device that lags behind, and on a GPU where there is one."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringside  # noqa: E402
from ringside.monitor.run.directory import RunReader  # noqa: E402
from ringside.monitor.run.records import StepRecord  # noqa: E402
from ringside.pytorch.ddp import attached_model, cuda_events  # noqa: E402
from ringside.pytorch.ddp.cuda_events import events_of, marker_of  # noqa: E402

from .training import Said, build, ddp_ranks, group, small_attachment, steps  # noqa: E402

STEPS = 12
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class LateHost:
    """A marker of the host's clock, whose device comes to a mark when it has been asked three times for later ones."""

    def __init__(self, breaks_at: int = 0) -> None:
        self.asked, self.done = 0, 0.0
        self.breaks_at, self.set = breaks_at, 0

    def mark(self) -> float:
        self.set += 1
        if self.set == self.breaks_at:
            raise RuntimeError("the device is lost")
        return time.perf_counter()

    def reached(self, mark: float) -> bool:
        self.asked += mark > self.done
        if self.asked == 3:
            self.asked, self.done = 0, max(mark, self.done)
        return mark <= self.done

    def times(self, since: float, marks: Collection[float]) -> list[float]:
        return [mark - since for mark in marks]


def add_up(record: StepRecord) -> bool:
    parts = record.data_seconds + record.forward_seconds + record.backward_seconds
    parts += record.exposed_seconds + record.optimizer_seconds
    return parts == pytest.approx(record.step_seconds) and min(record.forward_seconds, record.backward_seconds) > 0


# ------------------------------------------------------------------------------------------------ pretended


def trains(port: int, path: str, breaks_at: int) -> dict[str, Any]:
    found: dict[str, Any] = {"threads": set(), "heard": [], "averaged": []}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attached_model, "marker_of", lambda model: LateHost(breaks_at))
        with group(port) as rank, Said() as said:
            ddp, attachment, optimizer = small_attachment(run_dir=path, engine="native")

            def hear(record: StepRecord) -> None:
                found["threads"].add(threading.current_thread().name)
                found["heard"].append(record.step)

            attachment.session.on_record(hear)
            weight = next(ddp.parameters())
            sync_ends = attachment.session.clock.sync_ends

            def seen(take: Callable[[], Any], ago: float = 0.0) -> None:
                found["averaged"].append(weight.grad.clone())
                sync_ends(take, ago)

            attachment.session.clock.sync_ends = seen
            steps(ddp, optimizer, rank, STEPS)
            attachment.session.end()
            found["said"] = said.about("dropped")
    return found


def test_steps_are_recorded_when_their_marks_are_reached(tmp_path: Path) -> None:
    ranks = ddp_ranks(2, trains, str(tmp_path / "run"), 0)
    for found in ranks:
        assert found["heard"] == list(range(STEPS))
        assert found["threads"] == {"ringside-monitor"}
        assert found["said"] == []
    records = list(RunReader(tmp_path / "run").poll())
    assert sorted((r.rank, r.step) for r in records) == [(rank, step) for rank in (0, 1) for step in range(STEPS)]
    assert all(add_up(record) for record in records)
    assert all(record.exposed_seconds > 0 for record in records)
    assert all(record.collectives > 1 for record in records if record.step > 4)  # DDP tells late


def pauses(port: int, path: str) -> int:
    """Train with steps that are no part of the run among the others; return how many steps a listener heard of."""
    heard: list[StepRecord] = []
    with pytest.MonkeyPatch.context() as patch, group(port) as rank:
        patch.setattr(attached_model, "marker_of", lambda model: LateHost())
        ddp, attachment, optimizer = small_attachment(run_dir=path, engine="native")
        attachment.session.on_record(heard.append)
        steps(ddp, optimizer, rank, 3)
        with attachment.session.pause():  # whose steps have the numbers of those after it
            steps(ddp, optimizer, rank, 4)
        steps(ddp, optimizer, rank, 1)
        attachment.session.end()
    return len(heard)


def test_steps_of_a_pause_are_timed_and_no_part_of_the_run(tmp_path: Path) -> None:
    assert ddp_ranks(2, pauses, str(tmp_path / "run")) == [8, 8]
    records = RunReader(tmp_path / "run").poll()
    assert sorted((r.rank, r.step) for r in records) == [(rank, step) for rank in (0, 1) for step in range(4)]


def test_a_synchronisation_ends_after_ddp_has_waited_for_it(tmp_path: Path) -> None:
    first, second = ddp_ranks(2, trains, str(tmp_path / "run"), 0)
    assert len(first["averaged"]) == STEPS
    for mine, theirs in zip(first["averaged"], second["averaged"], strict=True):
        assert torch.equal(mine, theirs)  # what a rank has before is its own


@pytest.mark.parametrize("breaks_at", [1, 8, 40])
def test_a_marker_that_raises_does_not_touch_training(tmp_path: Path, breaks_at: int) -> None:
    for found in ddp_ranks(2, trains, str(tmp_path / "run"), breaks_at):
        assert len(found["said"]) == 1
        assert "the device is lost" in found["said"][0]
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_model_on_the_cpu_sets_no_marks() -> None:
    assert marker_of(build("mlp")) is None
    assert marker_of(torch.nn.Linear(1, 1, device="meta")) is None


def test_marks_are_set_where_all_parameters_are_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_events, "events_of", lambda device: f"events of {device}")
    assert str(marker_of(torch.nn.Linear(1, 1))) == "events of cpu"
    assert marker_of(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, device="meta"))) is None
    assert marker_of(torch.nn.ReLU()) is None


MAPS = """\
7f00-7f01 r-xp 00000000 103:02 77  /usr/lib/python3/site-packages/nvidia/cuda_runtime/lib/{name}
7f02-7f03 r-xp 00000000 103:02 78  /usr/lib/libcudart_static.a
"""


@pytest.mark.parametrize("name", ["libcudart.so.12", "libcudart-9335f6a2.so.12", "libcudart.so.13.0.96"])
def test_the_runtime_that_torch_has_loaded_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_events, "CudaEvents", lambda device, runtime: (str(device), runtime))
    monkeypatch.setattr(cuda_events.ctypes, "CDLL", lambda path: path)
    loaded = [name, "libcudnn.so.9"]
    monkeypatch.setattr(cuda_events.Path, "read_text", lambda _: MAPS.format(name=loaded.pop(0)))
    device = torch.device("cuda")
    assert events_of(device) == ("cuda", f"/usr/lib/python3/site-packages/nvidia/cuda_runtime/lib/{name}")
    assert events_of(device) is None


# ------------------------------------------------------------------------------------------------ on a GPU


def on_gpu(**how: Any) -> tuple[Any, Any, Any]:
    ddp = DistributedDataParallel(build("mlp").cuda(), bucket_cap_mb=0.01)
    return ddp, ringside.attach(ddp, **how), torch.optim.SGD(ddp.parameters(), lr=0.01)


def busy(cycles: int) -> None:
    """Have the GPU do nothing for so many of its cycles."""
    torch.cuda._sleep(cycles)


def trains_on_gpu(port: int, path: str, backend: str) -> bool:
    """Train on the one GPU: alone over NCCL, or several processes whose Gloo goes through the host's memory."""
    with group(port) as rank:
        carrying = dist.new_group(backend=backend)
        ddp = DistributedDataParallel(build("mlp").cuda(), bucket_cap_mb=0.01, process_group=carrying)
        attachment = ringside.attach(ddp, run_dir=path)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            output = ddp(torch.randn(4, 64, device="cuda") + rank + step)
            busy(20_000_000)  # between forward and backward
            output.square().mean().backward()
            optimizer.step()
        torch.cuda.synchronize()
        attachment.session.end()
        return attachment.session.guard.tripped


@needs_gpu
@pytest.mark.parametrize(("size", "backend"), [(1, "nccl"), (2, "gloo"), (1, "ringside")])
def test_phases_are_the_gpus(tmp_path: Path, size: int, backend: str) -> None:
    assert ddp_ranks(size, trains_on_gpu, str(tmp_path / "run"), backend) == [False] * size
    records = [record for record in RunReader(tmp_path / "run").poll() if record.step]
    assert sorted((r.step, r.rank) for r in records) == [(s, r) for s in range(1, STEPS) for r in range(size)]
    assert all(add_up(record) for record in records)
    # The host has queued all that in no time: only the GPU's clock knows that backward was the longest part. (Processes
    # that share a GPU take turns there, any of which may fall into the forward pass.)
    backward, forward = ([getattr(one, f"{phase}_seconds") for one in records] for phase in ("backward", "forward"))
    assert statistics.median(backward) > statistics.median(forward)
    assert all(math.isnan(record.cpu_seconds) for record in records)


def captures(port: int, path: str) -> dict[str, Any]:
    """Capture graphs while the monitor's thread asks for marks without a pause."""
    with group(port):
        ddp, attachment, optimizer = on_gpu(run_dir=path)
        session, ended = attachment.session, threading.Event()

        def ask() -> None:
            while not ended.is_set():
                session._unreached.drain()

        asking = threading.Thread(target=ask)
        asking.start()
        layer, x = torch.nn.Linear(64, 64).cuda(), torch.randn(4, 64, device="cuda")
        replayed = []
        try:
            for _ in range(20):
                optimizer.zero_grad()
                ddp(x).square().mean().backward()
                optimizer.step()
                busy(20_000_000)  # marks that are not reached yet are what is asked for
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    layer(x)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=side):
                    y = layer(x)
                graph.replay()
                torch.cuda.synchronize()
                replayed.append(bool(torch.allclose(y, layer(x))))
        finally:
            ended.set()
            asking.join()
        return {"replayed": replayed, "blown": session.guard.tripped}


@needs_gpu
def test_graphs_can_be_captured_while_marks_are_asked_for(tmp_path: Path) -> None:
    (found,) = ddp_ranks(1, captures, str(tmp_path / "run"))
    assert found == {"replayed": [True] * 20, "blown": False}


@needs_gpu
def test_no_mark_is_set_in_a_capture() -> None:
    marker = marker_of(torch.nn.Linear(8, 8).cuda())
    assert marker is not None
    x = torch.zeros(8, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x += 1
        assert marker.mark() is None
    before, after = marker.mark(), marker.mark()
    torch.cuda.synchronize()
    assert marker.reached(before)
    assert marker.reached(after)
    assert marker.times(before, [after])[0] >= 0
