"""Rank 0's word: what the first rank decides, given to all byte for byte."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringside.engine.across import Across
from ringside.engine.dtypes import DTYPES
from ringside.engine.probing import PROBE
from ringside.engine.told import Call
from ringside.schedule import binomial_broadcast


class First:
    """This rank's part in what rank 0 tells everybody.

    Args:
        across: The group.

    Attributes:
        here: Whether this is rank 0.
    """

    def __init__(self, across: Across) -> None:
        self._across = across
        self.here = across.roster.rank == 0

    def tell(self, data: bytes) -> bytes:
        """Return what rank 0 gives; what others give counts for nothing. A collective."""
        size = np.array([len(data)], dtype=np.int64)
        self._broadcast(size.view(np.uint8))
        content = np.zeros(int(size[0]), dtype=np.uint8)
        if not len(content):
            return b""
        if self.here:
            content[:] = np.frombuffer(data, dtype=np.uint8)
        self._broadcast(content)
        return content.tobytes()

    def _broadcast(self, data: Any) -> None:
        call = Call(PROBE, DTYPES.index("uint8"), 0, len(data))
        self._across.run(binomial_broadcast(self._across.roster.size), [data], 1, call)
