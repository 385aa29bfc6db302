"""Names, sizes, intervals and chances: the small pure parts beneath the reader of traces."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringside.decoding import converted, plain_count, plain_ranks
from ringside.doctor.kineto import collector as names
from ringside.doctor.kineto import intervals
from ringside.doctor.kineto.straggler import binomial_tail

PIECES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=12)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "all_reduce"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", "send_recv"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevComm*)", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "reduce_scatter"),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t", "broadcast"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "collective"),
        ("ncclKernel_Generic", "collective"),
        ("void at::native::vectorized_elementwise_kernel<4>(int)", ""),
        ("ampere_sgemm_128x64_tn", ""),
    ],
)
def test_kernels(name, kind):
    assert names.kernel_collective(name) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [("nccl:all_reduce", "all_reduce"), ("gloo:all_reduce", "all_reduce"), ("nccl:_all_gather_base", "all_gather"),
     ("nccl:_reduce_scatter_base", "reduce_scatter"), ("nccl:all_to_all", "all_to_all"),
     ("Optimizer.step#SGD.step", ""), ("nccl:reduce_scatter_tensor_coalesced", "reduce_scatter")],
)  # fmt: skip
def test_annotations(name, kind):
    assert names.annotated_collective(name) == kind


def test_shapes_types_and_ranks():
    assert names.count_elements([[530442]]) == 530442
    assert names.count_elements([[[2, 3], [4]], [], []]) == 10
    assert names.count_elements("no shape") == 0
    assert [names.dtype_bytes(name) for name in ("Float", "c10::BFloat16", "Half", "double", "?")] == [4, 2, 2, 8, 4]
    assert plain_ranks("[0, 1, 12]") == plain_ranks([0, 1, 12]) == (0, 1, 12)
    assert plain_ranks(None) == ()
    assert plain_ranks([0, "1", 2.5, 3]) == (0, 3)
    assert plain_ranks("9" * 30) == (10**18 - 1,)
    counts = [plain_count(value) for value in (0, "7", (1 << 20) - 1, 1 << 20, -1, "1e3", None, "0" * 8)]
    assert counts == [0, 7, (1 << 20) - 1, -1, -1, -1, -1, -1]
    assert (converted("3", int, None), converted("x", int, None), converted([[]], list[int], ())) == (3, None, ())


def covered(pieces: list[tuple[int, int]]) -> set[int]:
    return {second for start, length in pieces for second in range(start, start + length)}


def array(pieces: list[tuple[int, int]]) -> np.ndarray:
    return np.array([[start, start + length] for start, length in pieces], dtype=np.float64).reshape(-1, 2)


@given(PIECES, PIECES)
def test_intervals_are_sets_of_seconds(a, b):
    one, two = intervals.union(array(a)), intervals.union(array(b))
    everything = np.array([[0.0, 50.0], [3.0, 9.0]])
    for found, truth in (
        (one, covered(a)),
        (intervals.intersect(one, two), covered(a) & covered(b)),
        (intervals.subtract(one, two), covered(a) - covered(b)),
    ):
        inside = intervals.within(found, everything)
        assert inside == pytest.approx([len(truth), len(truth & set(range(3, 9)))])
    assert (one[1:, 0] > one[:-1, 1]).all()


def test_chance_is_the_binomial_tail():
    assert binomial_tail(0, 9, 0.3) == pytest.approx(1.0)
    assert binomial_tail(9, 9, 0.5) == pytest.approx(0.5**9)
    assert binomial_tail(2, 3, 0.25) == pytest.approx(3 * 0.25**2 * 0.75 + 0.25**3)
    assert math.isclose(binomial_tail(1, 2, 0.5), 0.75)
