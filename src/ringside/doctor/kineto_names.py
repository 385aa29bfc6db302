"""What an event of a trace is, from its name: a collective on a device or in a thread, a launch, work, bookkeeping.

NCCL's kernels were called `ncclKernel_AllReduce_RING_LL_Sum_float(...)` up to 2.18 and are called
`ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)` since; RCCL calls most of its own `ncclDevKernel_Generic_4(...)`, from
which the collective cannot be told.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

COLLECTIVES = {
    "allreduce": "all_reduce",
    "allreducecoalesced": "all_reduce",
    "allgather": "all_gather",
    "allgatherbase": "all_gather",
    "allgatherintotensor": "all_gather",
    "allgatherintotensorcoalesced": "all_gather",
    "allgatherv": "all_gather",
    "allgathersingle": "all_gather",
    "reducescatter": "reduce_scatter",
    "reducescatterbase": "reduce_scatter",
    "reducescattertensor": "reduce_scatter",
    "reducescattertensorcoalesced": "reduce_scatter",
    "reducescattersingle": "reduce_scatter",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "broadcastoop": "broadcast",
    "alltoall": "all_to_all",
    "alltoallv": "all_to_all",
    "alltoallbase": "all_to_all",
    "alltoallsingle": "all_to_all",
    "sendrecv": "send_recv",
    "send": "send",
    "recv": "recv",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "generic": "collective",
}
GRADIENT = ("all_reduce", "reduce_scatter", "collective")
_KERNEL = re.compile(r"(?:nccl|rccl|mscclpp?|ucc|msccl)[A-Za-z]{0,64}Kernel_?([A-Za-z]+)?", re.IGNORECASE)
_ANNOTATION = re.compile(r"(?:nccl|gloo|mpi|ucc|xccl|ringside|rccl):([A-Za-z_]+)")
_SIZES = {
    "float": 4, "float32": 4, "int": 4, "int32": 4, "uint32": 4, "double": 8, "float64": 8, "long": 8, "int64": 8,
    "long int": 8, "uint64": 8, "c10::half": 2, "half": 2, "float16": 2, "c10::bfloat16": 2, "bfloat16": 2,
    "short": 2, "int16": 2, "char": 1, "int8": 1, "uint8": 1, "byte": 1, "signed char": 1, "unsigned char": 1,
    "bool": 1, "c10::float8_e4m3fn": 1, "c10::float8_e5m2": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "c10::complex<float>": 8, "c10::complex<double>": 16,
}  # fmt: skip


def collective(name: str) -> str:
    """Return the plain name of a collective (`all_reduce`, ...) from any spelling; lower case of it where unknown."""
    plain = name.lower().strip("_").replace("_", "")
    return COLLECTIVES.get(plain, name.lower().strip("_"))


def kernel(name: str) -> str:
    """Return which collective a device kernel carries out; empty where it is none (then it is work)."""
    if "Kernel" not in name and "kernel" not in name:
        return ""
    match = _KERNEL.search(name)
    if not match:
        return ""
    return collective(match[1] or "generic")


def annotation(name: str) -> str:
    """Return which collective an annotation such as `nccl:all_reduce` or `gloo:all_reduce` is of; empty where none."""
    match = _ANNOTATION.match(name)
    return collective(match[1]) if match else ""


def dtype_bytes(name: str) -> int:
    """Return the size of one element, from any of PyTorch's names of a type; 4 where it is not known."""
    return _SIZES.get(name.lower(), 4)


def elements(dims: object) -> int:
    """Return how many elements the shapes in an event's `Input Dims` have in all.

    Args:
        dims: Nested lists of sizes, as recorded; anything else counts as nothing.
    """
    if not isinstance(dims, Sequence) or isinstance(dims, str | bytes) or not dims:
        return 0
    if all(isinstance(size, int) for size in dims):
        product = 1
        for size in dims:
            product *= max(int(size), 0)
        return product
    return sum(elements(inner) for inner in dims)


def rank_list(ranks: object) -> tuple[int, ...]:
    """Return ranks recorded as a list, or as the text of one; what is left out by `...` is not there."""
    if isinstance(ranks, str):
        return tuple(int(text[:18]) for text in re.findall(r"\d+", ranks))
    if isinstance(ranks, Sequence):
        return tuple(rank for rank in ranks if isinstance(rank, int))
    return ()
