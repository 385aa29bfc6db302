"""Small jobs of every parallelism that compute by waiting as an accelerator's host does; one rank is slow.

A model's arithmetic is real and small; what an accelerator would take is slept. So many ranks fit on few cores, and the
slow one is slow by a known factor from a known step on. On a GPU its stream is kept busy for as long instead; several
ranks share one, over NCCL, which takes them for ranks of several hosts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ringside

WIDTH = 32
LAYERS = 4
MICRO_BATCHES = 4
MPS = "nvidia-cuda-mps-control"
MPS_FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
SHARING_NCCL = (2, 30)
"""From this version on NCCL takes several ranks on one GPU, where it is told to."""


@dataclass(frozen=True)
class Episode:
    """A rank that is slow for some steps.

    Args:
        rank: Which.
        first: From this step on ...
        until: ... up to this one, which it is not in any more.
        factor: It takes this many times as long.
    """

    rank: int
    first: int
    until: int
    factor: float


@dataclass
class Pace:
    """How long this rank waits in place of computing.

    Args:
        rank: This rank.
        seconds: Of a layer's forward pass; backward takes twice that.
        episodes: When it is slow.
        jitter: Standard deviation of what every piece takes, as a ratio.
        device: Where to.
    """

    rank: int
    seconds: float
    episodes: list[Episode]
    jitter: float = 0.02
    device: str = "cpu"
    step: int = 0

    def __post_init__(self) -> None:
        self._noise = random.Random(self.rank)
        if self.device == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            for _ in range(2):  # the first time its clock is still low
                began.record()
                torch.cuda._sleep(100_000_000)
                ended.record()
                torch.cuda.synchronize()
            self._cycles_per_second = 1e8 / (began.elapsed_time(ended) * 1e-3)

    def work(self, pieces: float = 1.0) -> None:
        """Take as long as some forward passes of a layer."""
        mine = (one for one in self.episodes if one.rank == self.rank and one.first <= self.step < one.until)
        factor = next((one.factor for one in mine), 1.0)
        seconds = self.seconds * pieces * factor * max(1.0 + self.jitter * self._noise.gauss(0.0, 1.0), 0.1)
        if self.device == "cuda":
            torch.cuda._sleep(int(seconds * self._cycles_per_second))
        else:
            time.sleep(seconds)


class _Backward(torch.autograd.Function):
    """Takes its time in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pace: Pace, pieces: float) -> torch.Tensor:
        ctx.pace, ctx.pieces = pace, pieces
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.pace.work(2.0 * ctx.pieces)
        return gradients[0], None, None


class Layer(nn.Module):
    """Two linear maps that take their time."""

    def __init__(self, pace: Pace, pieces: float = 1.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.to(pace.device)
        self.pace, self.pieces = pace, pieces

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, WIDTH] of [batch, WIDTH]."""
        self.pace.work(self.pieces)
        x = self.compute(x)
        return _Backward.apply(x, self.pace, self.pieces)  # type: ignore[no-untyped-call,no-any-return]

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """What there is to compute: [batch, WIDTH] of [batch, WIDTH]."""
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


Step = Callable[[], None]
"""One training step, up to the optimizer's update."""


def _sharded(
    pace: Pace, mesh: Any, *, tensor_parallel: bool = False, compiled: bool = False
) -> tuple[Step, list[nn.Parameter]]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    layers = [Layer(pace) for _ in range(LAYERS)]
    for layer in layers:
        if compiled:  # block by block, as torchtitan does: FSDP2's hooks stay outside of the graphs
            layer.compute = torch.compile(layer.compute, backend="aot_eager")  # type: ignore[method-assign]
        if tensor_parallel:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"] if tensor_parallel else mesh)
    model = nn.Sequential(*layers)
    fully_shard(model, mesh=mesh["dp"] if tensor_parallel else mesh)

    def step() -> None:
        model(torch.randn(8, WIDTH, device=pace.device)).sum().backward()

    return step, list(model.parameters())


def fsdp(pace: Pace) -> tuple[Step, list[nn.Parameter]]:
    """FSDP2 over all ranks."""
    return _sharded(pace, init_device_mesh(pace.device, (dist.get_world_size(),)))


def compiled_fsdp(pace: Pace) -> tuple[Step, list[nn.Parameter]]:
    """FSDP2 over all ranks, each layer's arithmetic compiled."""
    return _sharded(pace, init_device_mesh(pace.device, (dist.get_world_size(),)), compiled=True)


def hsdp(pace: Pace) -> tuple[Step, list[nn.Parameter]]:
    """FSDP2 over two hosts' worth of ranks, replicated."""
    half = dist.get_world_size() // 2
    return _sharded(pace, init_device_mesh(pace.device, (2, half), mesh_dim_names=("replicate", "shard")))


def tensor_and_data(pace: Pace) -> tuple[Step, list[nn.Parameter]]:
    """Tensor parallelism of two ranks by DTensor, and FSDP2."""
    mesh = init_device_mesh(pace.device, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    return _sharded(pace, mesh, tensor_parallel=True)


def _average(parameters: list[nn.Parameter], group: Any) -> None:
    flat = torch.cat([parameter.grad.reshape(-1) for parameter in parameters if parameter.grad is not None])
    dist.all_reduce(flat, group=group)


def _pipeline(
    pace: Pace, mesh: Any, *, interleaved: bool = False, tensor_group: Any = None, heavy: int = -1
) -> tuple[Step, list[nn.Parameter]]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    pp = mesh["pp"] if "dp" in mesh.mesh_dim_names else mesh
    group, stages = pp.get_group(), pp.size()
    chunks = 2 if interleaved else 1
    index = pp.get_local_rank()
    # Each micro-batch is a piece of the batch, and so are its times.
    share = 2.0 / MICRO_BATCHES / chunks * (2.0 if index == heavy else 1.0)

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer(pace, share)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x)
            if tensor_group is not None:
                dist.all_reduce(x.detach().clone(), group=tensor_group)
            return x

    mine = [Stage() for _ in range(chunks)]
    made = [
        PipelineStage(one, index + number * stages, stages * chunks, torch.device(pace.device), group=group)
        for number, one in enumerate(mine)
    ]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - target) ** 2).mean()

    schedule: Any = (
        ScheduleInterleaved1F1B(made, MICRO_BATCHES, loss_fn=loss)  # type: ignore[arg-type]
        if interleaved
        else Schedule1F1B(made[0], MICRO_BATCHES, loss_fn=loss)
    )
    parameters = [parameter for one in mine for parameter in one.parameters()]

    def step() -> None:
        batch = torch.randn(MICRO_BATCHES * 2, WIDTH, device=pace.device)
        if index == 0:
            schedule.step(batch, target=batch) if stages * chunks == 1 else schedule.step(batch)
        elif index == stages - 1:
            schedule.step(target=batch)
        else:
            schedule.step()
        if "dp" in mesh.mesh_dim_names:
            _average(parameters, mesh["dp"].get_group())

    return step, parameters


def pipeline_and_data(pace: Pace) -> tuple[Step, list[nn.Parameter]]:
    """A pipeline of two stages (1F1B), replicated."""
    mesh = init_device_mesh(pace.device, (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    return _pipeline(pace, mesh)


def interleaved_and_data(pace: Pace) -> tuple[Step, list[nn.Parameter]]:
    """A pipeline of two ranks with two stages each (interleaved 1F1B), replicated."""
    mesh = init_device_mesh(pace.device, (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    return _pipeline(pace, mesh, interleaved=True)


def heavy_stage(pace: Pace) -> tuple[Step, list[nn.Parameter]]:
    """A pipeline of two stages, the second of which has twice the work, replicated."""
    mesh = init_device_mesh(pace.device, (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))
    return _pipeline(pace, mesh, heavy=1)


def pipeline(pace: Pace) -> tuple[Step, list[nn.Parameter]]:
    """A pipeline alone, a stage on every rank: nobody has a peer."""
    return _pipeline(pace, init_device_mesh(pace.device, (dist.get_world_size(),), mesh_dim_names=("pp",)))


def three_dimensions(pace: Pace) -> tuple[Step, list[nn.Parameter]]:
    """Two stages, replicated, of tensor-parallel pairs."""
    mesh = init_device_mesh(pace.device, (2, dist.get_world_size() // 4, 2), mesh_dim_names=("pp", "dp", "tp"))
    return _pipeline(pace, mesh, tensor_group=mesh["tp"].get_group())


def experts(pace: Pace) -> tuple[Step, list[nn.Parameter]]:
    """Experts on all ranks: tokens go there and back by all-to-all, and the rest is replicated."""
    layers = [Layer(pace, 0.5) for _ in range(2 * LAYERS)]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            received = torch.empty_like(x)
            dist.all_to_all_single(received, x.contiguous())
            return received

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            received = torch.empty_like(gradients[0])
            dist.all_to_all_single(received, gradients[0].contiguous())
            return received

    def step() -> None:
        x = torch.randn(8 * dist.get_world_size(), WIDTH, device=pace.device)
        for dense, expert in zip(layers[::2], layers[1::2], strict=True):
            x = Exchange.apply(expert(Exchange.apply(dense(x))))  # type: ignore[no-untyped-call]
        x.sum().backward()
        _average(parameters, None)

    return step, parameters


def ddp(pace: Pace) -> tuple[Step, list[nn.Parameter]]:
    """DistributedDataParallel over all ranks, watched as every other group is."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(nn.Sequential(*(Layer(pace) for _ in range(LAYERS))))

    def step() -> None:
        model(torch.randn(8, WIDTH, device=pace.device)).sum().backward()

    return step, list(model.parameters())


@dataclass(frozen=True)
class Kind:
    """A kind of job.

    Args:
        make: Returns a step, and what the optimizer updates.
        ranks: On how many ranks.
        seconds: What a layer's forward pass takes: more where torch's own work on the host takes long.
    """

    make: Callable[[Pace], tuple[Step, list[nn.Parameter]]]
    ranks: int = 4
    seconds: float = 0.005


KINDS = {
    "fsdp": Kind(fsdp),
    "compiled_fsdp": Kind(compiled_fsdp),
    "hsdp": Kind(hsdp),
    "tp_dp": Kind(tensor_and_data, seconds=0.012),
    "pp_dp": Kind(pipeline_and_data, seconds=0.012),
    "interleaved_dp": Kind(interleaved_and_data, seconds=0.02),
    "pp_dp_tp": Kind(three_dimensions, ranks=8, seconds=0.02),
    "experts": Kind(experts),
    "ddp": Kind(ddp),
    "heavy_stage": Kind(heavy_stage),
    "pp": Kind(pipeline),
}
"""Jobs by name."""


@contextlib.contextmanager
def sharing() -> Iterator[bool]:
    """Within it CUDA's Multi-Process Service runs kernels of several processes beside each other; yields whether."""
    if not shutil.which(MPS):
        print("CUDA's MPS is not installed: ranks take turns on the GPU", file=sys.stderr)
        yield False
        return
    before = {name: os.environ.get(name) for name in MPS_FOLDERS}
    with tempfile.TemporaryDirectory() as folder:
        own = {**os.environ, **dict.fromkeys(MPS_FOLDERS, folder)}
        try:
            os.environ.update(own)
            try:
                subprocess.run([MPS, "-d"], check=True, timeout=20, stdout=subprocess.DEVNULL)
                starts = True
            except (OSError, subprocess.SubprocessError) as error:
                print(f"CUDA's MPS cannot be started ({error}): ranks take turns on the GPU", file=sys.stderr)
                starts = False
            yield starts
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # an error that led here is the one to show
                subprocess.run(
                    [MPS], env=own, input="quit\n", text=True, timeout=60,
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )  # fmt: skip


def nccl_version() -> tuple[int, ...]:
    """Return the version of the NCCL that is loaded; torch tells that of the one it was built with, or contains."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except OSError:
        return tuple(torch.cuda.nccl.version())[:3]  # type: ignore[no-untyped-call]
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


def share_the_gpu(rank: int) -> None:
    """Take the first GPU, and have NCCL take several ranks on it: by its own switch, or else as ranks of hosts."""
    if nccl_version() >= SHARING_NCCL:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    else:
        os.environ["NCCL_HOSTID"] = f"host of rank {rank}"
    torch.cuda.set_device(0)


def train(
    kind: str, backend: str, run_dir: str, steps: int, episodes: list[Episode], device: str = "cpu"
) -> dict[str, Any] | None:
    """Train, watched; on rank 0 return the summary's verdicts as they were detected.

    Args:
        kind: One of `KINDS`.
        backend: Of the process group.
        run_dir: Where rank 0 records.
        steps: How many.
        episodes: Who is slow when.
        device: Of the tensors: "cpu", or "cuda" for the first GPU, which all ranks share.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if device == "cuda":
        share_the_gpu(int(os.environ["RANK"]))
    dist.init_process_group(backend)
    watch = ringside.watch(run_dir=run_dir)
    pace = Pace(dist.get_rank(), KINDS[kind].seconds, episodes, device=device)
    step, parameters = KINDS[kind].make(pace)
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    began = time.monotonic()
    for pace.step in range(steps):
        step()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda" and pace.step % 10 == 9:
            torch.cuda.synchronize()  # as a script that logs its loss
    taken = time.monotonic() - began
    session = watch.session
    if session is not None:
        session.end()
    watch.off()
    dist.destroy_process_group()
    if session is None or int(os.environ["RANK"]) != 0:
        return None
    return {"step_seconds": taken / steps, "verdicts": session.verdicts}
