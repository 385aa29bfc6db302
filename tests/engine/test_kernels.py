"""Every native kernel against its NumPy twin, bit for bit (a NaN counts as a NaN)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ringside import _core
from ringside._core import numpy_kernels as twins
from ringside.engine.dtypes import DTYPES, FLOATING, ITEM_BYTES, OPS, is_allowed

pytestmark = pytest.mark.native

ALLOWED = [(d, o) for d, o in itertools.product(DTYPES, OPS) if is_allowed(DTYPES.index(d), OPS.index(o))]
SETS = _core.native().instruction_sets() if _core.available() else []
# Around one vector, one accumulator block of every element size, and a tail.
COUNTS = (0, 1, 3, 7, 8, 17, 63, 511, 1024, 1029, 4099)


def stored(dtype: str) -> np.dtype:
    return twins.STORED_AS.get(dtype) or np.dtype(dtype)


def random_elements(rng: np.random.Generator, dtype: str, count: int) -> np.ndarray:
    """Random bits: every NaN, Inf, subnormal and both zeros come up; a part is ordinary numbers."""
    kind = stored(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, count).astype(bool)
    bits = rng.integers(0, 256, count * kind.itemsize, dtype=np.uint8).view(kind)
    if dtype not in FLOATING:
        return bits
    ordinary = rng.standard_normal(count).astype(np.float32)
    ordinary = twins.narrow(ordinary, dtype) if dtype in ("float16", "bfloat16") else ordinary.astype(kind)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38, -3e38, 1.0], np.float32)
    with np.errstate(over="ignore"):
        special = twins.narrow(special, dtype) if dtype in ("float16", "bfloat16") else special.astype(kind)
    which = rng.integers(0, 3, count)
    return np.choose(which, [bits, ordinary, rng.choice(special, count)]).astype(kind)


def place(elements: np.ndarray, offset: int) -> np.ndarray:
    """Copy elements to an address `offset` elements past a cache line, with guards around them."""
    item = elements.itemsize
    raw = np.full(elements.nbytes + 256 + offset * item, 0xA5, np.uint8)
    start = (-raw.ctypes.data) % 64 + 64 + offset * item
    room = raw[start : start + elements.nbytes].view(elements.dtype)
    room[:] = elements
    return room


def guards(room: np.ndarray) -> np.ndarray:
    """Return the bytes around what `place` returned."""
    raw = room.base
    start = room.ctypes.data - raw.ctypes.data
    return np.concatenate([raw[:start], raw[start + room.nbytes :]])


def is_nan(x: np.ndarray, dtype: str) -> np.ndarray:
    return np.isnan(twins.widen(x, dtype)) if dtype in FLOATING else np.zeros(x.shape, bool)


def assert_same(got: np.ndarray, want: np.ndarray, dtype: str) -> None:
    unsigned = np.dtype(f"u{got.itemsize}")
    nan = is_nan(want, dtype)
    np.testing.assert_array_equal(is_nan(got, dtype), nan)
    np.testing.assert_array_equal(got.view(unsigned)[~nan], want.view(unsigned)[~nan])


def native_fold(sources, targets, dtype: str, op: str, isa: str, scale=1.0, divisor=1.0, stream=False) -> None:
    _core.native().fold(
        [s.ctypes.data for s in sources],
        [t.ctypes.data for t in targets],
        sources[0].size,
        DTYPES.index(dtype),
        OPS.index(op),
        scale,
        divisor,
        stream,
        isa,
    )


def check(rng, dtype: str, op: str, isa: str, count: int, nsrc: int, ndst: int, stream: bool, scale: float) -> None:
    sources = [place(random_elements(rng, dtype, count), int(rng.integers(0, 9))) for _ in range(nsrc)]
    before = [s.copy() for s in sources]
    targets = [place(np.zeros(count, stored(dtype)), int(rng.integers(0, 9))) for _ in range(ndst)]
    native_fold(sources, targets, dtype, op, isa, scale, nsrc, stream)
    want = twins.fold(before, dtype, op, scale=scale, divisor=nsrc)
    for target in targets:
        assert_same(target, want, dtype)
        assert (guards(target) == 0xA5).all(), "a kernel wrote outside its target"
    for source, old in zip(sources, before, strict=True):
        assert source.tobytes() == old.tobytes()


# In `make test`: every dtype and reduction by the instructions that are used here.
@pytest.mark.parametrize("isa", [pytest.param(isa, marks=pytest.mark.core if isa == SETS[-1] else ()) for isa in SETS])
@pytest.mark.parametrize(("dtype", "op"), ALLOWED)
def test_a_kernel_is_its_twin(isa: str, dtype: str, op: str) -> None:
    rng = np.random.default_rng([DTYPES.index(dtype), OPS.index(op)])
    scales = [1.0, 0.5, 1 / 3, -1e30] if dtype in FLOATING and op in ("sum", "avg") else [1.0]
    for count, nsrc, scale in itertools.product(COUNTS, (1, 2, 3, 9), scales):
        ndst, stream = int(rng.integers(1, 4)), bool(rng.integers(0, 2))
        check(rng, dtype, op, isa, count, nsrc, ndst, stream, scale)
    for stream in (False, True):
        check(rng, dtype, op, isa, 1029, 2, 2, stream, scales[-1])


@pytest.mark.core
@pytest.mark.parametrize("isa", ["", *SETS])
def test_what_two_hold_is_written_to_both_places_in_whole_cache_lines(isa: str) -> None:
    """What `ringside bench` measures memory with."""
    size = 5 * 64
    a, b, x, y = (place(np.zeros(size + 64, np.uint8), 0) for _ in range(4))
    a[:], b[:] = np.arange(size + 64) % 7, np.arange(size + 64) % 5
    _core.native().stream_pair(*(row.ctypes.data for row in (a, b, x, y)), size + 63, isa)
    for out in (x, y):
        np.testing.assert_array_equal(out[:size], (a | b)[:size])
        assert not out[size:].any()


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize(("dtype", "op"), ALLOWED)
@pytest.mark.parametrize("stream", [False, True])
def test_a_kernel_works_in_place(isa: str, dtype: str, op: str, stream: bool) -> None:
    rng = np.random.default_rng(3)
    for nsrc in (1, 2, 5):
        rooms = [place(random_elements(rng, dtype, 1500), k) for k in range(nsrc)]
        want = twins.fold([room.copy() for room in rooms], dtype, op, divisor=nsrc)
        native_fold(rooms, rooms, dtype, op, isa, divisor=nsrc, stream=stream)
        for room in rooms:
            assert_same(room, want, dtype)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_is_widened_exactly_and_rounded_once(isa: str, dtype: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(stored(dtype))
    out = np.zeros_like(every)
    native_fold([every], [out], dtype, "max", isa)
    assert_same(out, every, dtype)
    for scale in (0.5, 3.0, 1 / 3, 2.0**-20, 1e4, 1 + 2.0**-11):  # arbitrary f32 values to round, ties among them
        native_fold([every], [out], dtype, "sum", isa, scale=scale)
        assert_same(out, twins.fold([every], dtype, "sum", scale=scale), dtype)


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", sorted(FLOATING))
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_every_source_may_have_its_own_scale(isa: str, dtype: str, op: str) -> None:
    rng = np.random.default_rng(9)
    for nsrc, ndst, stream in itertools.product((1, 2, 3, 7), (1, 2), (False, True)):
        scales = rng.choice([0.0, 1.0, 1 / 3, 17.0, -2.5], nsrc).tolist()
        rooms = [place(random_elements(rng, dtype, 1029), k) for k in range(nsrc)]
        targets = [place(np.zeros(1029, stored(dtype)), 3) for _ in range(ndst)]
        addresses = [[x.ctypes.data for x in some] for some in (rooms, targets)]
        codes = DTYPES.index(dtype), OPS.index(op)
        _core.native().fold(*addresses, 1029, *codes, 1.0, 7.5, stream, isa, scales)
        for target in targets:
            assert_same(target, twins.fold(rooms, dtype, op, scales=scales, divisor=7.5), dtype)
    with pytest.raises(ValueError, match="one scale per source"):
        _core.native().fold([0], [0], 0, *codes, scales=[1.0, 2.0])


def test_rounding_of_ties_is_to_even() -> None:
    """The twins themselves against numbers worked out by hand."""
    tie = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, 65519.0, 65520.0, 2.0**-25, 3 * 2.0**-25], np.float32)
    want = np.array([1.0, 1 + 2 * 2.0**-10, 65504.0, np.inf, 0.0, 2 * 2.0**-24], np.float16)
    with np.errstate(over="ignore"):
        assert_same(twins.narrow(tie, "float16"), want, "float16")
    brain = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38], np.float32)
    np.testing.assert_array_equal(twins.narrow(brain, "bfloat16"), np.array([0x3F80, 0x3F82, 0x7F80], np.uint16))


@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64"])
@pytest.mark.parametrize("divisor", [1, 3, 127, 128, 200, 256])
def test_an_average_of_integers_truncates_for_any_number_of_ranks(isa: str, dtype: str, divisor: int) -> None:
    info = np.iinfo(dtype)
    x = np.array([info.min, info.min + 1, 0, 1, 2, 7, info.max - 1, info.max], dtype)
    out = np.zeros_like(x)
    native_fold([x], [out], dtype, "avg", isa, divisor=divisor)
    assert out.tolist() == [int(abs(int(v)) // divisor) * (-1 if v < 0 else 1) for v in x]


def test_what_is_not_defined_has_no_kernel() -> None:
    native = _core.native()
    for dtype, op in itertools.product(DTYPES, OPS):
        assert native.can_fold(DTYPES.index(dtype), OPS.index(op)) == ((dtype, op) in ALLOWED)
    for dtype, op in ((-1, 0), (0, -1), (len(DTYPES), 0), (0, len(OPS))):
        assert not native.can_fold(dtype, op)
        with pytest.raises(ValueError, match="no kernel"):
            native.fold([0], [0], 0, dtype, op)
    with pytest.raises(ValueError, match="cannot run"):
        native.fold([0], [0], 0, 0, 0, isa="sse9")


def test_item_sizes_are_those_of_the_dtypes() -> None:
    assert [stored(dtype).itemsize for dtype in DTYPES] == list(ITEM_BYTES)
