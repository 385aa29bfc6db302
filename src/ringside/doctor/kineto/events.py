"""What is decoded of a Kineto event, and nothing else: the rest of its bytes is skipped without becoming objects."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ringside.decoding import UNDECODABLE


class TraceEvent(msgspec.Struct, gc=False):
    """One event of a trace; `ts` and `dur` in microseconds, as integers or with a fraction."""

    ph: str
    cat: str | None = None
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | float | str | None = None
    tid: int | float | str | None = None
    args: msgspec.Raw = msgspec.Raw(b"")


class CollectiveArguments(msgspec.Struct, gc=False):
    """What profilers record of a collective: since 2.3 on the device kernel as well, before only shapes and types."""

    name: Any = msgspec.field(name="Collective name", default=None)
    elements_in: Any = msgspec.field(name="In msg nelems", default=None)
    elements_out: Any = msgspec.field(name="Out msg nelems", default=None)
    dtype: Any = msgspec.field(name="dtype", default=None)
    group: Any = msgspec.field(name="Process Group Name", default=None)
    ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    seq: Any = msgspec.field(name="Seq", default=None)
    rank: Any = msgspec.field(name="Rank", default=None)
    group_size: Any = msgspec.field(name="Group size", default=None)
    dims: Any = msgspec.field(name="Input Dims", default=None)
    types: Any = msgspec.field(name="Input type", default=None)
    correlation: Any = None


class Correlation(msgspec.Struct, gc=False):
    """What ties a device's activity to the call that launched it."""

    correlation: int = -1


MOST_RANKS = 1 << 20

decode_collective = msgspec.json.Decoder(CollectiveArguments).decode
decode_correlations = msgspec.json.Decoder(list[Correlation], strict=False).decode


def collective_arguments(raw: msgspec.Raw) -> CollectiveArguments:
    """Return the arguments of a collective; empty ones where they are not what they should be."""
    try:
        return decode_collective(raw)
    except UNDECODABLE:
        return CollectiveArguments()


def correlations(raws: Sequence[msgspec.Raw]) -> list[int]:
    """Return the correlations of many events, decoded at one go; -1 for those without one."""
    try:
        return [
            each.correlation
            for each in decode_correlations(b"[" + b",".join(bytes(raw) or b"{}" for raw in raws) + b"]")
        ]
    except UNDECODABLE:
        half = len(raws) // 2
        return [*correlations(raws[:half]), *correlations(raws[half:])] if half else [-1] * len(raws)


def plain_count(value: object) -> int:
    """Return a rank or a number of ranks as it stands in an untrusted file; -1 for what cannot be one."""
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 8 and int(text) < MOST_RANKS else -1


# -------------------------------------------------------------------------------------------------
# What an event of a trace is, from its name: a collective on a device or in a thread, a launch, work, bookkeeping.
#
# NCCL's kernels were called `ncclKernel_AllReduce_RING_LL_Sum_float(...)` up to 2.18 and are called
# `ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)` since; RCCL calls most of its own `ncclDevKernel_Generic_4(...)`, from
# which the collective cannot be known.

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


def collective_name(name: str) -> str:
    """Return the plain name of a collective (`all_reduce`, ...) from any spelling; lower case of it where unknown."""
    plain = name.lower().strip("_").replace("_", "")
    return COLLECTIVES.get(plain, name.lower().strip("_"))


def kernel_collective(name: str) -> str:
    """Return which collective a device kernel carries out; empty where it is none (then it is work)."""
    if "Kernel" not in name and "kernel" not in name:
        return ""
    match = _KERNEL.search(name)
    if not match:
        return ""
    return collective_name(match[1] or "generic")


def annotated_collective(name: str) -> str:
    """Return which collective an annotation such as `nccl:all_reduce` or `gloo:all_reduce` is of; empty where none."""
    match = _ANNOTATION.match(name)
    return collective_name(match[1]) if match else ""


def dtype_bytes(name: str) -> int:
    """Return the size of one element, from any of PyTorch's names of a type; 4 where it is not known."""
    return _SIZES.get(name.lower(), 4)


def count_elements(dims: object) -> int:
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
    return sum(count_elements(inner) for inner in dims)


def rank_list(ranks: object) -> tuple[int, ...]:
    """Return ranks recorded as a list, or as the text of one; what is left out by `...` is not there."""
    if isinstance(ranks, str):
        return tuple(int(text[:18]) for text in re.findall(r"\d+", ranks))
    if isinstance(ranks, Sequence):
        return tuple(rank for rank in ranks if isinstance(rank, int))
    return ()
