"""Small all-reduces between hosts that were called before: carried out with nothing left to be found out.

At a few bytes every line that is not needed shows: a rank that has slept finds none of them in the cache.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

from ringside.engine.algorithm import Choice
from ringside.engine.buffers import Flat
from ringside.engine.dtypes import ITEM_BYTES
from ringside.engine.net.hierarchical import Across, Reduction
from ringside.engine.tuner.drift import EVERY_NOTED, LARGE_BYTES
from ringside.engine.tuner.selector import Selector


class Ready(NamedTuple):
    """A small all-reduce for which all is ready.

    Args:
        go: Carries it out on the elements at an address.
        size_bytes: Of the tensor.
        choice: How.
        selector: Who chose it and is told what it took; None: it was asked for.
        version: Of the selector's choices; it is of no more use when there are others.
        size_class: The selector's, of that size.
    """

    go: Callable[[int], None]
    size_bytes: int
    choice: Choice
    selector: Selector | None = None
    version: int = 0
    size_class: int = 0

    def carry_out(self, flat: Flat) -> bool:
        """Reduce a tensor; False: the selector has other choices by now, and nothing was done."""
        selector = self.selector
        if selector is None:
            self.go(flat.address)
        elif self.version != selector.version:
            return False
        else:
            calls = selector.calls[self.size_class] = selector.calls[self.size_class] + 1
            began = time.perf_counter()
            self.go(flat.address)
            if calls % EVERY_NOTED == 0:  # as the selector itself counts those that come another way
                selector.note(self.size_bytes, self.choice, time.perf_counter() - began, flat.dtype)
        flat.write_back()
        return True


def made_ready(across: Across, flat: Flat, what: Reduction, choice: Choice, selector: Selector | None) -> Ready | None:
    """Return what the next all-reduce of this kind may be carried out with at once; None: it may not.

    Args:
        across: Who carries it out.
        flat: The tensor of this one.
        what: The reduction.
        choice: How this one was carried out.
        selector: Who chose that, and chooses for the next one; None: it was asked for.
    """
    size_bytes = flat.numel * ITEM_BYTES[flat.dtype]
    if selector is not None:
        if size_bytes >= LARGE_BYTES or not selector.settled(size_bytes):
            return None
        choice = selector.choose(size_bytes, what.dtype, what.op)
    small = across.prepared(flat.numel, what, choice)
    if small is None:
        return None
    go = functools.partial(across.carry_out, small)
    if selector is None:
        return Ready(go, size_bytes, choice)
    return Ready(go, size_bytes, choice, selector, selector.version, selector.size_class(size_bytes))
