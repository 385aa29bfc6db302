"""Writes what two buffers hold together to two others, and compares."""

import numpy as np

from ringside import _core

SIZE = 5 * 64
raw = np.zeros((4, 64 + SIZE), np.uint8)
a, b, x, y = (row[-row.ctypes.data % 64 :][:SIZE] for row in raw)
a[:], b[:] = np.arange(SIZE) % 7, np.arange(SIZE) % 5
_core.native().stream_pair(*(row.ctypes.data for row in (a, b, x, y)), SIZE)
for out in (x, y):
    np.testing.assert_array_equal(out, a | b)
