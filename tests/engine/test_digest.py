"""The digest of bytes: the native kernel against its NumPy twin, and what it notices."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringside import _core
from ringside._core import numpy_kernels as twins


def random_bytes(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.native
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 8191, 8192, 8193, 40_001, 600_003])
def test_native_and_twin_agree_at_any_address(size: int) -> None:
    room = random_bytes(size + 3)
    for offset in (0, 1, 3):
        data = room[offset : offset + size]
        assert _core.native().digest(room.ctypes.data + offset, size, 5) == twins.digest(data.copy(), 5)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40_000), st.data())
def test_one_changed_bit_changes_the_digest(size: int, data: st.DataObject) -> None:
    before = random_bytes(size)
    bit = data.draw(st.integers(0, 8 * size - 1))
    after = before.copy()
    after[bit // 8] ^= 1 << bit % 8
    assert twins.digest(before) != twins.digest(after)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_signs_that_flip_together_do_not_cancel(dtype: type) -> None:
    """A sum of products alone would lose the highest bit of two words: 2 · 2^63 is nothing."""
    zeros = np.zeros(64, dtype)
    for pair in ([0, 1], [3, 60], [0, 2], [1, 3], [0, 1, 2, 3], list(range(64)), list(range(0, 64, 2))):
        flipped = zeros.copy()
        flipped[pair] = -0.0
        assert twins.digest(zeros.view(np.uint8)) != twins.digest(flipped.view(np.uint8))


def test_places_count() -> None:
    words = np.arange(5000, dtype=np.uint64)
    swapped = words.copy()
    swapped[[7, 4000]] = swapped[[4000, 7]]
    blocks = np.roll(words[:4096].reshape(4, 1024), 1, axis=0).reshape(-1)
    digests = {twins.digest(a.view(np.uint8)) for a in (words, swapped, words[::-1].copy(), words[:4096], blocks)}
    assert len(digests) == 5


@pytest.mark.native
def test_every_instruction_set_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import numpy as np;from ringside import _core; a = np.arange(99_999, dtype=np.uint32);"
        "print(_core.native().digest(a.ctypes.data, a.nbytes))"
    )
    expected = str(twins.digest(np.arange(99_999, dtype=np.uint32).view(np.uint8)))
    for name in _core.native().instruction_sets():
        monkeypatch.setenv("RINGSIDE_ISA", name)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.strip() == expected, name
