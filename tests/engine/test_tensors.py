"""What becomes of a caller's tensor: where its elements are, when they are copied, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ringside.engine.buffers import Flat, flatten, flatten_to_move, flatten_to_read, result_for, tensor_of
from ringside.engine.dtypes import DTYPES, ITEM_BYTES, OPS, dtype_code, is_allowed, own_weight
from ringside.engine.request import bounds_of_one, checked_bounds, checked_op, equal_bounds
from ringside.errors import UnsupportedError, UsageError

Array = np.ndarray[Any, Any]
BYTES = DTYPES.index("uint8")


def address(x: Any) -> int:
    return int(x.data_ptr() if isinstance(x, torch.Tensor) else x.ctypes.data)


def misaligned() -> Array:
    """Six float64 that lie at no multiple of eight."""
    return np.zeros(7 * 8, np.uint8)[1 : 1 + 6 * 8].view(np.float64)


def frozen(x: Array) -> Array:
    x.flags.writeable = False
    return x


@pytest.mark.parametrize("dtype", DTYPES)
def test_contiguous_tensors_are_taken_where_they_are(dtype: str) -> None:
    xs: list[Any] = [torch.zeros((2, 3), dtype=getattr(torch, dtype))]
    if dtype != "bfloat16":
        xs.append(np.zeros((2, 3), dtype))
    for x in xs:
        for flat in (flatten(x), flatten_to_read(x), flatten_to_move(x)[0], flatten_to_move(x, writes=True)[0]):
            assert (flat.address, flat.numel, tuple(flat.shape)) == (address(x), 6, (2, 3))
            assert DTYPES[flat.dtype] == dtype
            assert flat.copy_back is None
        assert dtype_code(x.dtype) == DTYPES.index(dtype)
    assert ITEM_BYTES[DTYPES.index(dtype)] == xs[0].element_size()


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.arange(12.0).reshape(3, 4)[:, ::2],
        lambda: np.arange(6.0).reshape(2, 3).T,
        misaligned,
        lambda: torch.arange(12.0, dtype=torch.float64).reshape(3, 4)[:, ::2],
        lambda: torch.arange(6.0, dtype=torch.float64).reshape(2, 3).T,
    ],
)
def test_others_are_copied_and_the_result_is_written_back(make: Any) -> None:
    x = make()
    before = x.clone() if isinstance(x, torch.Tensor) else x.copy()
    flat = flatten(x)
    assert flat.address != address(x)
    assert flat.address % 8 == 0
    assert (flat.target == before).all()
    flat.target[...] = 7
    assert (x == before).all()
    flat.write_back()
    assert (x == 7).all()
    read = flatten_to_read(x)
    assert read.copy_back is None
    assert read.address == address(read.target)
    assert read.address % 8 == 0
    moved, tag = flatten_to_move(x, writes=True)
    assert (moved.dtype, tag) == (DTYPES.index("float64"), 0)
    assert moved.copy_back is not None


def test_an_array_that_may_not_be_written_is_refused_unless_it_is_only_read() -> None:
    for x in (frozen(np.ones(3)), frozen(np.ones((3, 4)))[:, ::2]):
        with pytest.raises(UsageError, match="read-only"):
            flatten(x)
        with pytest.raises(UsageError, match="read-only"):
            flatten_to_move(x, writes=True)
        assert flatten_to_read(x).numel == x.size
        assert flatten_to_move(x)[0].numel == x.size
    dates = frozen(np.zeros(3, "M8[s]"))
    with pytest.raises(UsageError, match="read-only"):
        flatten_to_move(dates, writes=True)
    assert flatten_to_move(dates)[0].numel == 24


class Strange:
    """Neither torch's nor NumPy's, though it has a dtype."""

    dtype = np.dtype("float32")
    shape = (1,)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        ([1.0], "list is neither a torch tensor nor a NumPy array"),
        (Strange(), "Strange is neither"),
        (torch.zeros(3, device="meta"), "a tensor on meta is not for shared memory"),
        (torch.zeros(3).to_sparse(), "layout torch.sparse_coo cannot be reduced"),
        (np.array([None]), "dtype object"),
    ],
)
def test_what_is_no_tensor_in_memory_is_refused(x: Any, words: str) -> None:
    for take in (flatten, flatten_to_read, flatten_to_move, lambda x: flatten_to_move(x, writes=True)):
        with pytest.raises(UnsupportedError, match=words):
            take(x)


def test_what_cannot_be_reduced_is_moved_as_bytes_and_its_dtype_is_told() -> None:
    xs: list[Any] = [np.zeros((2, 3), "c8"), np.zeros((2, 3), "u2"), np.zeros((2, 3), ">f4"), np.zeros((2, 3), "M8[s]")]
    tags = set()
    for x in (
        *xs,
        torch.zeros((2, 3), dtype=torch.complex64),
        torch.zeros((2, 3), dtype=torch.float64).to(torch.complex128),
    ):
        with pytest.raises(UnsupportedError, match="cannot be reduced"):
            flatten(x)
        item = x.dtype.itemsize if isinstance(x, np.ndarray) else x.element_size()
        for writes in (False, True):
            flat, tag = flatten_to_move(x, writes=writes)
            assert (flat.address, flat.numel, flat.dtype, flat.shape) == (address(x), 6 * item, BYTES, (2, 3))
            assert flat.copy_back is None
        assert tag != 0
        tags.add(tag)
    assert len(tags) == 6
    for x in (np.zeros((3, 4), "c8")[:, ::2], torch.zeros((3, 4), dtype=torch.complex64)[:, ::2]):
        flat, _ = flatten_to_move(x, writes=True)
        assert (flat.numel, flat.address == address(x)) == (48, False)
        flat.target[...] = 3
        flat.write_back()
        assert (x == 3).all()
        assert flatten_to_move(x)[0].copy_back is None
    turned = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert (flatten_to_move(turned)[0].target == torch.tensor([1 - 2j, 3 + 4j])).all()


def test_results_are_new_or_where_the_caller_wants_them() -> None:
    for x in (np.zeros((2, 3), np.float32), torch.zeros((2, 3))):
        flat = flatten(x)
        out, to = result_for(x, flat, (4, 3), None)
        assert (type(out), tuple(out.shape), out.dtype, to.address) == (type(x), (4, 3), x.dtype, address(out))
        given, to = result_for(x, flat, (4, 3), out)
        assert given is out
        assert (to.address, to.numel) == (address(out), 12)


def test_results_that_do_not_fit_are_refused() -> None:
    room = np.zeros(24, np.float32)
    x = room[8:16]
    flat = flatten(x)
    for out in (room[0:8], room[16:24]):
        assert result_for(x, flat, (8,), out)[0] is out, "side by side"
    for at in (1, 8, 15):
        with pytest.raises(UsageError, match="overlap"):
            result_for(x, flat, (8,), room[at : at + 8])
    for out in (np.zeros(7, np.float32), np.zeros(8), np.zeros(16, np.float32)[::2], np.zeros((2, 4), np.float32)):
        with pytest.raises(UsageError, match=r"out must be a contiguous tensor of shape \(8,\) and dtype float32"):
            result_for(x, flat, (8,), out)


def test_memory_is_seen_as_the_tensor_that_was_asked_for() -> None:
    raw = np.arange(24, dtype=np.uint8)
    array, tensor = tensor_of(raw, (2, 3), np.float32), tensor_of(raw, (2, 3), torch.float32)
    assert array.ctypes.data == tensor.data_ptr() == raw.ctypes.data
    assert (array.shape, tuple(tensor.shape), array.dtype, tensor.dtype) == ((2, 3), (2, 3), np.float32, torch.float32)
    none = tensor_of(raw[:0], (0, 3), torch.float32)
    assert (tuple(none.shape), none.dtype) == ((0, 3), torch.float32)
    assert tensor_of(raw[:0], (0, 3), "f4").shape == (0, 3)


# ------------------------------------------------------------------------------------------------ what goes with it


def test_reductions_are_for_the_dtypes_that_have_them() -> None:
    def flat(dtype: int) -> Flat:
        return Flat(0, 0, dtype, (), None)

    for dtype, name in enumerate(DTYPES):
        floating = "float" in name
        for code, op in enumerate(OPS):
            allowed = not (floating and op in ("band", "bor", "bxor")) and (name, op) != ("bool", "avg")
            assert is_allowed(dtype, code) == allowed
            for scaled in (False, True):
                if allowed and (not scaled or (floating and op in ("sum", "avg"))):
                    assert checked_op(flat(dtype), op, scaled=scaled) == code
                else:
                    with pytest.raises(UnsupportedError, match="scale and weights" if allowed else "is not defined"):
                        checked_op(flat(dtype), op, scaled=scaled)


def test_bounds_ascend_within_the_tensor() -> None:
    assert checked_bounds((0, 0, 3, 9), 3, 9) == [0, 0, 3, 9]
    assert checked_bounds(np.array([2, 5]), 1, 9) == [2, 5]
    for bounds, ranks in (((0, 9), 2), ((0, 5, 4), 2), ((-1, 5, 9), 2), ((0, 5, 10), 2), ((0, 1, 2, 3), 2)):
        with pytest.raises(UsageError, match="ascending element offsets between 0 and 9"):
            checked_bounds(bounds, ranks, 9)
    assert equal_bounds(3, 4) == [0, 3, 6, 9, 12]
    assert equal_bounds(0, 2) == [0, 0, 0]
    assert [bounds_of_one(rank, 3, 7) for rank in range(3)] == [[0, 7, 7, 7], [0, 0, 7, 7], [0, 0, 0, 7]]


def test_weights_are_one_s_own_or_one_per_rank() -> None:
    assert own_weight(2, 1, 3) == (2.0, 0)
    assert own_weight(0, 1, 3) == (0.0, 0)
    assert own_weight([0.25, 0.5, 0.0], 1, 3)[0] == 0.5  # they need not sum to 1
    weight, tag = own_weight([1, 2.5, 0], 1, 3)
    assert weight == 2.5
    assert tag != 0
    assert own_weight(np.array([1, 2.5, 0]), 2, 3) == (0.0, tag)
    assert own_weight([1, 2.5, 1], 1, 3) != (2.5, tag)
    for weights, words in (
        ([1, 2], "3 of them"),
        ([[1, 2, 3]], "3 of them"),
        ([1, -1, 3], "not negative"),
        (float("inf"), "finite"),
        ([1, float("nan"), 3], "finite"),
        ([0, 0, 0], "sum to 0"),
        ("many", "a number"),
    ):
        with pytest.raises(UsageError, match=words):
            own_weight(weights, 1, 3)
