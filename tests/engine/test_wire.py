"""f32 on a narrow wire: rounded as the field rounds, in place, with its odd values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ringside._core import numpy_kernels as twins
from ringside.engine.dtypes import DTYPES
from ringside.engine.net.exchange.compression import WireCompression
from ringside.engine.net.exchange.exchange import Exchange
from ringside.engine.net.exchange.receive_buffers import HEADER_BYTES
from ringside.engine.net.exchange.signature import OWN_SCALE, WIRE_FLAGS
from ringside.engine.net.exchange.wire import make_wire
from ringside.engine.net.reduction import Reduction, signature_of
from ringside.errors import UsageError
from ringside.schedule import by_name

from .oracle import difference
from .transports.schedules import run_schedule
from .transports.vertices import on_threads

UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
ODD = [
    np.nan,
    -np.nan,
    np.inf,
    -np.inf,
    0.0,
    -0.0,
    1e-40,
    -1e-45,
    6e-8,
    65504.0,
    65519.9,
    65520.0,
    3.4e38,
    1.0,
    1 + 2**-9,
]


class ByNumpy(WireCompression):
    """What takes the core's place where there is none."""

    narrow = WireCompression.narrow_by_numpy
    widen = WireCompression.widen_by_numpy


either = pytest.mark.parametrize("make", [pytest.param(WireCompression, marks=pytest.mark.native), ByNumpy])


def numbers(count: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(count)
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    return np.concatenate([np.array(ODD, dtype=np.float32), bits.view(np.float32)])


@either
@pytest.mark.parametrize("dtype", UNIT)
def test_rounds_to_nearest_even(make: type[WireCompression], dtype: Any) -> None:
    """All bit patterns' kinds; sender and receiver hold the same afterwards."""
    x = numbers(20_000)
    with np.errstate(all="ignore"):
        narrow = twins.narrow(x, dtype)
    sent = x.copy()
    travels = make(dtype).narrow(sent.view(np.uint8))
    assert travels.nbytes == x.nbytes // 2
    assert not difference(travels.view(narrow.dtype), narrow, dtype)
    arrived = make(dtype).widen(travels).view(np.float32)
    assert not difference(arrived, twins.widen(narrow, dtype), "float32")
    assert not difference(sent, arrived, "float32"), "what the sender keeps is not what it sent"
    again = sent.copy()
    make(dtype).narrow(again.view(np.uint8))
    assert not difference(again, sent, "float32"), "rounding twice changes something"


@either
@pytest.mark.parametrize("dtype", UNIT)
def test_error_is_half_a_unit(make: type[WireCompression], dtype: Any) -> None:
    x = np.random.default_rng(3).uniform(1e-3, 6e4, 10_000).astype(np.float32)
    rounded = x.copy()
    make(dtype).narrow(rounded.view(np.uint8))
    assert (np.abs(rounded - x) <= UNIT[dtype] * np.abs(x)).all()


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("name", ["ring", "tree", "direct", "one_shot", "halving_doubling", "two_tree"])
def test_over_a_schedule(name: str, dtype: Any) -> None:
    """All ranks end with the same bits, within the stated error; half the bytes travel."""
    ranks, count = 4, 3000
    schedule, wire = by_name(name, ranks), WireCompression(dtype)
    inputs = [np.random.default_rng(r).standard_normal(count).astype(np.float32) for r in range(ranks)]

    def vertex(end: Any) -> tuple[Any, int]:
        exchange = Exchange(end, segment_bytes=512)
        x = inputs[end.rank].copy()
        run_schedule(exchange, schedule, x, wire=wire)
        wire.narrow(x.view(np.uint8))
        return x, sum(exchange.sent_bytes.values()) - HEADER_BYTES * len(exchange.sent_bytes)

    results = on_threads(ranks, vertex)
    wide = np.stack(inputs).astype(np.float64)
    bound = (schedule.rounds + 1) * UNIT[dtype] * np.abs(wide).sum(0) * 1.01
    moved = sum(len(schedule.round(k).src) for k in range(schedule.rounds)) * count / schedule.chunks
    for x, _ in results:
        assert x.tobytes() == results[0][0].tobytes(), "ranks hold different bits"
        assert (np.abs(x - wide.sum(0)) <= bound).all()
    assert abs(sum(sent for _, sent in results) - 2 * moved) <= 2 * ranks * schedule.rounds * schedule.chunks


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(UsageError, match="'int3'; there are bfloat16, float16, int8 and fp8_e4m3"):
        make_wire("int3")


def test_peers_are_told_how_elements_travel() -> None:
    """So that ranks that were set differently find out, and a switch that was not called itself knows."""
    float32 = DTYPES.index("float32")
    told = [signature_of(Reduction(float32, 0, wire=wire), 9) for wire in (None, *map(make_wire, WIRE_FLAGS))]
    assert [call.flags for call in told] == [0, 4, 8, 16, 32]
    assert [call.wire for call in told] == ["", *WIRE_FLAGS]
    weighted = signature_of(Reduction(float32, 0, scale=3.0, scales=(3.0, 5.0), wire=WireCompression("float16")), 9)
    assert weighted.flags == OWN_SCALE | WIRE_FLAGS["float16"]
    assert (weighted.extra, signature_of(Reduction(float32, 0, scale=3.0), 9).extra) == (1.0, 3.0)
