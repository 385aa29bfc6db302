"""A small all-reduce between hosts that is called again and again: all but the work itself is done beforehand.

At a few bytes what counts is how much the processor has to do, on every rank, and how often somebody has to be woken.
So the elements are taken to a place of their own, for which everything is ready: the calls into shared memory, the
script of messages between hosts (`ringside.engine.exchange_script`), what peers are told.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ringside.engine.choice import NATIVE, Choice
from ringside.engine.dtypes import ITEM_BYTES
from ringside.engine.exchange_script import Script
from ringside.engine.flow import lane_bounds
from ringside.engine.message_plan import plan_messages
from ringside.engine.part import Part, Reduction, part_of, safe_mean, told_of
from ringside.engine.reduction import AVG, SUM, fold
from ringside.engine.tensors import address_of
from ringside.engine.told import Call, Doing

if TYPE_CHECKING:
    from ringside.engine.across import Across

MOST_BYTES = 64 << 10  # copying more to its place and back takes longer than what is saved

Step = Callable[[], object]


class Small:
    """All-reduces of one size, dtype and reduction by one choice. Not thread-safe.

    Args:
        across: Who carries them out.
        elements: Of the tensor, at most `MOST_BYTES`.
        what: The reduction; without own scales per rank, wire dtype and storage.
        choice: How: `native`, or a schedule that `Script` can carry out.
    """

    def __init__(self, across: Across, elements: int, what: Reduction, choice: Choice) -> None:
        roster, item = across.roster, ITEM_BYTES[what.dtype]
        self.way, self.doing = f"all_reduce by {choice}", Doing(told_of(what, elements), str(choice))
        self._place = np.zeros(elements * item, dtype=np.uint8)
        self._at = address_of(self._place)
        self._script: Script | None = None
        call = self.doing.call
        if choice.over == "ranks":
            self._first, self._rest = self._between(across, choice, None, 0, elements, what, call)
            return
        what = safe_mean(what, roster.size)
        lanes = 1 if choice.over == "leaders" else roster.lanes
        bounds = lane_bounds(elements, lanes, roster.local_size)
        begin, end = bounds[roster.local_rank : roster.local_rank + 2]
        between: tuple[list[Step], list[Step]] = [], []
        if begin < end:
            inside = Reduction(what.dtype, what.op, divisor=what.divisor)
            members = roster.lane(roster.local_rank)
            between = self._between(
                across, choice, members, begin, end - begin, inside, call._replace(elements=end - begin)
            )
        if across.local is not None:
            step = SUM if what.op == AVG else what.op
            add, spread = across.local.prepared(self._at, bounds, what.dtype, step, what.scale)
            self._first, self._rest = [], [add, *between[0], *between[1], spread]
        else:
            scaled = self._scaled(what.scale, 0, elements, what.dtype)
            self._first, self._rest = [*scaled, *between[0]], between[1]

    @staticmethod
    def fits(across: Across, elements: int, what: Reduction, choice: Choice) -> bool:
        """Tell whether an all-reduce can be carried out this way; arguments as for the constructor."""
        size_bytes = elements * ITEM_BYTES[what.dtype]
        if not 0 < size_bytes <= MOST_BYTES or what.scales or what.wire is not None:
            return False
        if choice.algorithm == NATIVE:
            return True
        vertices, me = len(across.roster.hosts), across.roster.host
        if choice.over == "ranks":
            vertices, me = across.roster.size, across.roster.rank
        return Script.fits(across.exchange, plan_messages(choice.schedule(vertices), me), size_bytes)

    def go(self, address: int) -> None:
        """Reduce the elements at an address, in place; on failure they are what they were."""
        self.begin(address)
        self.finish(address)

    def begin(self, address: int) -> None:
        """Take the elements, and begin as far as that waits for nobody."""
        ctypes.memmove(self._at, address, len(self._place))
        for step in self._first:
            step()

    def finish(self, address: int) -> None:
        """Do the rest of what was begun, and leave the result where the elements were."""
        for step in self._rest:
            step()
        ctypes.memmove(address, self._at, len(self._place))
        if self._script is not None:
            self._script.rest()

    def end(self) -> None:
        """Wait for what is still on its way: this is not used any more."""
        if self._script is not None:
            self._script.end()

    # -------------------------------------------------------------------------------------------- worked out

    def _between(
        self,
        across: Across,
        choice: Choice,
        members: Sequence[int] | None,
        begin: int,
        count: int,
        what: Reduction,
        call: Call,
    ) -> tuple[list[Step], list[Step]]:
        """Return what this rank does between hosts with `count` elements from `begin` on: at first, and then."""
        part = part_of(choice, members, what, call, across.roster)
        item = ITEM_BYTES[what.dtype]
        mine = self._place[begin * item : (begin + count) * item]
        first = self._scaled(part.first, begin, count, what.dtype)
        divided = self._divided(part, address_of(mine), count)
        if part.plan is None:
            native = _Native(across.native.prepare(mine, what.dtype, part.native_op, members))
            return [*first, native.begin], [native.finish, *divided]
        self._script = Script(across.exchange, part.plan, mine, item, part.fold, part.last_fold, part.call, members)
        return [*first, self._script.begin], [self._script.finish, *divided]

    def _scaled(self, scale: float, begin: int, count: int, dtype: int) -> list[Step]:
        if scale == 1.0:
            return []
        at = self._at + begin * ITEM_BYTES[dtype]
        return [functools.partial(fold, [at], at, count, dtype, SUM, scale=scale)]

    def _divided(self, part: Part, at: int, count: int) -> list[Step]:
        if not part.divisor:
            return []
        return [functools.partial(fold, [at], at, count, part.what.dtype, AVG, divisor=part.divisor)]


class _Native:
    """The group's own all-reduce in two parts, for a place that stays.

    Args:
        prepared: Begins it, and returns what waits for its end.
    """

    def __init__(self, prepared: Callable[[], Step]) -> None:
        self._prepared = prepared
        self._end: Step = _nothing

    def begin(self) -> None:
        self._end = self._prepared()

    def finish(self) -> None:
        end, self._end = self._end, _nothing
        end()


def _nothing() -> None:
    """Nothing is under way."""


__all__ = ["MOST_BYTES", "Small"]
