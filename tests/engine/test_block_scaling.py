"""f32 in blocks of 8-bit codes: the stated error, the same bits on all ranks, and what is fed back."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringside import _core
from ringside._core import numpy_kernels as twins
from ringside._core.enums import DType, ReduceOp
from ringside.engine.algorithm import AlgorithmSpec
from ringside.engine.buffers import address_of
from ringside.engine.net.exchange.block_scaling import BlockScaling, ErrorFeedback
from ringside.engine.net.exchange.exchange import Exchange
from ringside.engine.net.exchange.receive_buffers import HEADER_BYTES
from ringside.engine.net.reduction import Reduction
from ringside.schedule import by_name, chunk_bounds

from .threaded import on_threads as on_hosts
from .transports.schedules import run_schedule
from .transports.vertices import on_threads

Array = np.ndarray[Any, Any]
CODES = ("int8", "fp8_e4m3")
HALF_STEP = {"int8": 1 / 127, "fp8_e4m3": 1 / 14}
"""Of the largest magnitude of the block, at most."""
BLOCK = twins.CODE_BLOCK
codes = pytest.mark.parametrize("code", CODES)


class ByNumpy(BlockScaling):
    """What takes the core's place where there is none."""

    encode = BlockScaling.encode_by_numpy
    widen = BlockScaling.widen_by_numpy


either = pytest.mark.parametrize("make", [pytest.param(BlockScaling, marks=pytest.mark.native), ByNumpy])


def blocks_of(x: Array) -> Array:
    """The elements by block, filled up with zeros: [blocks, 32]."""
    whole = np.zeros(-(-len(x) // BLOCK) * BLOCK, dtype=x.dtype)
    whole[: len(x)] = x
    return whole.reshape(-1, BLOCK)


def every_kind(count: int) -> list[Array]:
    """All bits there are, magnitudes of every size, and gradients."""
    rng = np.random.default_rng(count)
    some = rng.standard_normal(count)
    return [
        rng.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32),
        (some * 10.0 ** rng.integers(-44, 38, count)).astype(np.float32),
        (some * 1e-3).astype(np.float32),
        np.zeros(count, dtype=np.float32),
    ]


@pytest.mark.native
@codes
@pytest.mark.parametrize("isa", ["", "baseline"])
def test_kernels_do_what_their_twins_do(code: str, isa: str) -> None:
    for count in (1, 31, 32, 33, 1000, 10_007):
        for x in every_kind(count):
            message, data, worth = np.empty(count + -(-count // BLOCK), np.uint8), x.copy(), np.empty_like(x)
            kept = np.full(count, 1e-5, dtype=np.float32)
            at = address_of(message)
            _core.native().encode_blocks(address_of(data), at, at + count, count, code != "int8", address_of(kept), isa)
            _core.native().decode_blocks(at, at + count, address_of(worth), count, code != "int8", isa)
            with np.errstate(all="ignore"):
                told = x + np.float32(1e-5)
                encoded, scales = twins.encode_blocks(told, code)
                rounded = twins.decode_blocks(encoded, scales, code)
                left = np.where(np.isnan(rounded), 0, told - rounded)
            assert (message == np.concatenate([encoded, scales])).all()
            for found in (data, worth):
                np.testing.assert_array_equal(found, rounded)
            np.testing.assert_array_equal(kept, left)


def test_codes_of_fp8_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    x = np.concatenate([np.linspace(-448, 448, 20_001), np.geomspace(2**-13, 448, 4000)]).astype(np.float32)
    x = np.concatenate([blocks_of(x), np.full((len(blocks_of(x)), BLOCK), 448, np.float32)], axis=1).reshape(-1)
    encoded, scales = twins.encode_blocks(x, "fp8_e4m3")  # every block has a 448 beside it, or is worth the same
    expected = torch.from_numpy(x).to(torch.float8_e4m3fn).float().numpy()
    full = scales == 127
    assert full.sum() > len(full) / 2
    rounded = twins.decode_blocks(encoded, scales, "fp8_e4m3")
    np.testing.assert_array_equal(blocks_of(rounded)[full], blocks_of(expected)[full])


finite = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**126), max_value=2.0**126)


@either
@codes
@given(values=st.lists(finite, min_size=1, max_size=100))
def test_error_is_half_a_step_of_the_block(make: type[BlockScaling], code: Any, values: list[float]) -> None:
    """And encoding what is rounded already gives it again."""
    x = np.array(values, dtype=np.float32)
    rounded = x.copy()
    message = make(code).narrow(rounded.view(np.uint8))
    assert len(message) == make(code).wire_bytes(len(x))
    np.testing.assert_array_equal(make(code).widen(message).view(np.float32), rounded)
    most = np.abs(blocks_of(x)).max(axis=1, keepdims=True).astype(np.float64)
    error = np.abs(blocks_of(rounded).astype(np.float64) - blocks_of(x))
    assert (error <= np.maximum(most * HALF_STEP[code], 2.0**-126)).all()
    again = rounded.copy()
    make(code).narrow(again.view(np.uint8))
    np.testing.assert_array_equal(again, rounded)


@either
@codes
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 3.4e38])
def test_what_is_not_finite_stays_visible(make: type[BlockScaling], code: Any, odd: float) -> None:
    """In its block and no other, and nothing of it is fed back."""
    x = np.ones(100, dtype=np.float32)
    x[40] = odd
    kept = np.full(100, 0.25, dtype=np.float32)
    make(code).encode(x.view(np.uint8), kept)
    assert np.isnan(x).tolist() == [32 <= index < 64 for index in range(100)]
    assert (kept[32:64] == 0).all()
    assert np.isfinite(kept).all()


@pytest.mark.native
def test_where_there_is_the_core_numpy_has_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(BlockScaling, "encode_by_numpy")
    monkeypatch.delattr(BlockScaling, "widen_by_numpy")
    wire, x = BlockScaling("int8"), np.ones(40, dtype=np.float32)
    assert wire.widen(wire.narrow(x.view(np.uint8))).view(np.float32).tolist() == [1] * 40


@codes
@given(size_bytes=st.integers(8, 1 << 20))
def test_what_is_said_to_fit_a_message_fits(code: Any, size_bytes: int) -> None:
    """Cut evenly, a message has up to half as much more, and so has its place."""
    wire = BlockScaling(code)
    elements = wire.elements_in(size_bytes)
    assert elements >= 1
    assert wire.wire_bytes(elements) <= size_bytes
    assert wire.wire_bytes(-(-3 * elements // 2)) <= size_bytes + size_bytes // 2


# ------------------------------------------------------------------------------------------------ over schedules

NAMES = ["ring", "tree", "direct", "one_shot", "halving_doubling", "two_tree", "recursive_doubling"]


def reduced(name: str, inputs: list[Array], wires: list[Any], segment_bytes: int = 1 << 18) -> list[tuple[Array, int]]:
    """All-reduce over threads; return each rank's result and the bytes it sent, without headers."""
    schedule = by_name(name, len(inputs))

    def vertex(end: Any) -> tuple[Array, int]:
        exchange, x, wire = Exchange(end, segment_bytes=segment_bytes), inputs[end.rank].copy(), wires[end.rank]
        if isinstance(wire, ErrorFeedback):
            wire.address = address_of(x.view(np.uint8))
        run_schedule(exchange, schedule, x, wire=wire)
        return x, sum(exchange.sent_bytes.values()) - HEADER_BYTES * len(exchange.sent_bytes)

    return on_threads(len(inputs), vertex)


@codes
@given(
    name=st.sampled_from(NAMES),
    ranks=st.integers(2, 5),
    seed=st.integers(0, 1 << 16),
    spread=st.integers(0, 6),
    count=st.integers(1, 700),
)
def test_over_a_schedule(code: Any, name: str, ranks: int, seed: int, spread: int, count: int) -> None:
    """All ranks end with the same bits, within rounds x half a step of a block's scale."""
    rng = np.random.default_rng(seed)
    inputs = [
        (rng.standard_normal(count) * 10.0 ** rng.integers(-spread, spread + 1, count)).astype(np.float32)
        for _ in range(ranks)
    ]
    results = reduced(name, inputs, [BlockScaling(code)] * ranks)
    for x, _ in results:
        assert x.tobytes() == results[0][0].tobytes(), "ranks hold different bits"
    # A chunk's blocks begin with it. Sums that are sent in one round are of different ranks: the largest magnitudes of
    # their blocks are together no larger than those of all ranks' blocks, and what was rounded before.
    schedule, wide = by_name(name, ranks), np.stack(inputs).astype(np.float64)
    bounds = chunk_bounds(count, schedule.chunks)
    for begin, end in itertools.pairwise(bounds.tolist()):
        most = sum(blocks_of(np.abs(own[begin:end])).max(axis=1, keepdims=True) for own in wide)
        allowed = most * ((1 + HALF_STEP[code]) ** (schedule.rounds + 1) - 1) + most * ranks * 2.0**-23
        error = blocks_of(np.abs(results[0][0][begin:end] - wide[:, begin:end].sum(0)))
        assert (error <= allowed).all(), f"{name}: {(error / np.maximum(allowed, 1e-30)).max():.2f} of what is allowed"


@codes
@pytest.mark.parametrize("name", NAMES)
def test_bytes_with_scales(name: str, code: Any) -> None:
    ranks, count = 4, 40_000
    inputs = [np.random.default_rng(r).standard_normal(count).astype(np.float32) for r in range(ranks)]
    schedule = by_name(name, ranks)
    moved = sum(len(schedule.round(k).src) for k in range(schedule.rounds)) * count * 4 / schedule.chunks
    sent = sum(sent for _, sent in reduced(name, inputs, [BlockScaling(code)] * ranks, 8192))
    assert 0.25 * moved < sent <= 0.26 * moved


@codes
@pytest.mark.parametrize("name", NAMES)
def test_what_is_fed_back(name: str, code: Any) -> None:
    """The same bits on all ranks, one of which feeds nothing back; on the average of steps, the sum."""
    ranks, count, steps = 4, 1000, 60
    inputs = [np.random.default_rng(r).standard_normal(count).astype(np.float32) for r in range(ranks)]
    exact, total, plain_total = np.stack(inputs).astype(np.float64).sum(0), np.zeros(count), np.zeros(count)
    wires: list[Any] = [ErrorFeedback(BlockScaling(code), 0, count) for _ in range(ranks)]
    for _ in range(steps):
        results = reduced(name, inputs, wires)
        assert {x.tobytes() for x, _ in results} == {results[0][0].tobytes()}, "ranks hold different bits"
        total += results[0][0]
    left = np.sum([wire.residual for wire in wires], axis=0, dtype=np.float64)
    results = reduced(name, inputs, [BlockScaling(code), *wires[1:]])
    assert {x.tobytes() for x, _ in results} == {results[0][0].tobytes()}, "ranks hold different bits"
    plain_total = steps * reduced(name, inputs, [BlockScaling(code)] * ranks)[0][0].astype(np.float64)
    drift, plain = np.abs(total - steps * exact).mean(), np.abs(plain_total - steps * exact).mean()
    if name in ("one_shot", "recursive_doubling"):  # what all round alike, they round without feedback
        assert drift < plain
        return
    assert drift < plain / 8
    # What was not told in all steps is what was kept after the last of them.
    np.testing.assert_allclose(steps * exact - total, left, atol=1e-3)


@codes
def test_messages_of_every_size_carry_the_same_blocks(code: Any) -> None:
    inputs = [np.random.default_rng(r).standard_normal(3000).astype(np.float32) for r in range(3)]
    wires = [BlockScaling(code, rounds_own=True)] * 3
    found = {x.tobytes() for size in (100, 512, 1 << 18) for x, _ in reduced("one_shot", inputs, wires, size)}
    assert len(found) == 1


def test_a_step_that_overflows_does_not_spoil_those_after_it() -> None:
    inputs = [np.ones(100, dtype=np.float32) for _ in range(3)]
    wires: list[Any] = [ErrorFeedback(BlockScaling("int8"), 0, 100) for _ in range(3)]
    odd = [x.copy() for x in inputs]
    odd[1][5] = np.inf
    x = reduced("ring", odd, wires)[0][0]
    assert np.isnan(x[5])
    assert np.isfinite(x[40:]).all()
    assert (reduced("ring", inputs, wires)[0][0] == 3).all()


def test_a_rehearsal_leaves_what_is_kept_as_it_is() -> None:
    def rehearsed(across: Any) -> bool:
        x = np.ones(1 << 18, dtype=np.float32)
        feedback = ErrorFeedback(BlockScaling("int8"), address_of(x), len(x))
        feedback.residual[:] = kept = np.linspace(0, 1, len(x), dtype=np.float32)
        reduction = Reduction(int(DType.float32), ReduceOp.sum, wire=feedback)
        for choice in ("ring", "hosts/ring", "hosts/tree", "leaders/ring"):
            across.rehearse(len(x), reduction, AlgorithmSpec.parse(choice))
        return bool((feedback.residual == kept).all() and (x == 1).all())

    assert on_hosts(2, rehearsed) == [True, True]
