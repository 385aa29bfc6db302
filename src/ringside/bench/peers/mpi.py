"""Open MPI through mpi4py's buffer interface: `Allreduce(MPI.IN_PLACE, ...)`."""

from __future__ import annotations

from typing import Any

import mpi4py

# One thread calls MPI, and Open MPI is faster without the locks of MPI_THREAD_MULTIPLE.
mpi4py.rc.threads = False

from mpi4py import MPI  # noqa: E402

from ringside.bench.peers.contender import Contender  # noqa: E402
from ringside.errors import UnsupportedError  # noqa: E402

KINDS = {
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
    "int8": MPI.INT8_T,
    "uint8": MPI.UINT8_T,
    "int16": MPI.INT16_T,
    "int32": MPI.INT32_T,
    "int64": MPI.INT64_T,
}
OPS = {
    "sum": MPI.SUM,
    "prod": MPI.PROD,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "band": MPI.BAND,
    "bor": MPI.BOR,
    "bxor": MPI.BXOR,
}


def open_mpi(ranks: int, dtype: str, op: str) -> Contender:
    """Return Open MPI on the world that mpirun started."""
    world = MPI.COMM_WORLD
    if world.Get_size() != ranks:
        raise UnsupportedError(f"MPI sees {world.Get_size()} ranks instead of {ranks}")
    if op not in OPS or dtype not in KINDS:
        raise UnsupportedError(f"Open MPI has no {op} of {dtype}")
    kind, reduction, in_place = KINDS[dtype], OPS[op], MPI.IN_PLACE
    all_reduce = world.Allreduce

    def wrap(array: Any) -> list[Any]:
        return [array, kind]

    def call(buffer: list[Any]) -> None:
        all_reduce(in_place, buffer, reduction)

    return Contender("mpi", "private", wrap, call)
