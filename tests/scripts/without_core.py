"""What works without the native core, and what is said of what does not."""

from __future__ import annotations

import ringside
from ringside.schedule import ring, verify

assert verify(ring(5)).ok
try:
    ringside.init()
except ringside.UnsupportedError as error:
    print(error)
