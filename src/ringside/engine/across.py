"""All-reduce among ranks on several hosts: a schedule over messages, shared memory inside a host.

Three ways (`ringside.engine.choice`): over all ranks as if every one were alone; over hosts, where the ranks of a host
first add up in shared memory so that each carries one slice between hosts, and share the result afterwards; over
leaders, the same with one carrier per host. Large tensors go over hosts in blocks, so that a block is added up inside
the host while the one before it is between hosts.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ringside.engine.background import Background, Work
from ringside.engine.choice import NATIVE, Choice
from ringside.engine.dtypes import DTYPES, ITEM_BYTES, OPS
from ringside.engine.exchange import Call, Disagreement, Exchange
from ringside.engine.local_lanes import LocalLanes
from ringside.engine.message_plan import plan_messages
from ringside.engine.reduction import AVG, SUM, fold, folder, memory
from ringside.engine.regions import Storage
from ringside.engine.roster import Roster
from ringside.engine.transports.transport import Bytes, Cause, LinkError
from ringside.engine.wire import Wire
from ringside.errors import ClosedError, DeadlineError, MismatchError, PeerLostError, SyncError
from ringside.schedule import Schedule, chunk_bounds

ALL_REDUCE = 1
_FLOAT32 = DTYPES.index("float32")


class Native(Protocol):
    """The process group's own all-reduce."""

    def all_reduce(self, data: Bytes, dtype: int, op: int, members: Sequence[int] | None) -> None:
        """Reduce in place over all ranks, or over the given ones (one per host)."""


class Across:
    """One rank's part in all-reduces between hosts. Not thread-safe: one collective at a time.

    Args:
        roster: Who is where.
        exchange: Messages to every rank of the group.
        local: Shared memory among the ranks of this host; None for a rank alone on its host.
        native: The group's own all-reduce.
        timeout_s: Longest wait, seconds; for messages only (the transport has its own).
        block_bytes: Tensors larger than this go over hosts in blocks of this size.
    """

    def __init__(
        self,
        roster: Roster,
        exchange: Exchange,
        local: LocalLanes | None,
        native: Native,
        *,
        timeout_s: float,
        block_bytes: int = 4 << 20,
    ) -> None:
        self.roster, self.exchange, self.local = roster, exchange, local
        self._native = native
        self._timeout_s = timeout_s
        self._block_bytes = block_bytes
        self._carrier: Background | None = None
        self._broken: SyncError | None = None

    def all_reduce(
        self,
        address: int,
        elements: int,
        dtype: int,
        op: int,
        choice: Choice,
        *,
        scale: float = 1.0,
        wire: Wire | None = None,
        storage: Storage | None = None,
    ) -> None:
        """Reduce the elements at an address over all ranks of the group, in place.

        Args:
            address: Of the first element.
            elements: Their number, equal on all ranks.
            dtype: Code of the element type.
            op: Code of the reduction; avg divides by the number of ranks.
            choice: How; equal on all ranks.
            scale: Multiplies each contribution first.
            wire: How float32 elements travel between ranks; None: as they are.
            storage: The shareable storage the tensor lies in, if the host's ranks may not have mapped it yet.

        Raises:
            PeerLostError, DeadlineError, MismatchError, ClosedError: The content is undefined and this is unusable.
        """
        if wire is not None and (dtype != _FLOAT32 or choice.algorithm == NATIVE):
            wire = None
        with self._explained(f"all_reduce by {choice}"):
            if choice.over == "ranks":
                if scale != 1.0:
                    fold([address], address, elements, dtype, SUM, scale=scale)
                self._carry(choice, None, address, elements, dtype, op, scale, wire)
                if op == AVG:
                    fold([address], address, elements, dtype, AVG, divisor=self.roster.size)
            else:
                self._over_hosts(choice, address, elements, dtype, op, scale, wire, storage)

    def run(self, schedule: Schedule, chunks: Sequence[Bytes | None], item_bytes: int, call: Call) -> None:
        """Carry out any schedule over all ranks on the given chunks; see `Exchange.run` and `all_reduce`."""
        plan = plan_messages(schedule, self.roster.rank)
        with self._explained(plan.name):
            self.exchange.run(plan, chunks, item_bytes, folder(call.dtype, call.op), call)

    def close(self, cause: Cause | None = None) -> None:
        """Leave; peers that need this rank hear why."""
        if self._broken is None:
            self._broken = ClosedError("the communicator is closed on this rank")
        self.exchange.transport.fail(cause or Cause("left", self.roster.rank))
        if self._carrier is not None:
            self._carrier.stop(1.0)

    # -------------------------------------------------------------------------------------------- over hosts

    def _over_hosts(
        self,
        choice: Choice,
        address: int,
        elements: int,
        dtype: int,
        op: int,
        scale: float,
        wire: Wire | None,
        storage: Storage | None,
    ) -> None:
        item = ITEM_BYTES[dtype]
        lanes = 1 if choice.over == "leaders" else self.roster.lanes
        block = max(self._block_bytes // item, 1)
        starts = range(0, max(elements, 1), block)
        waiting: list[tuple[int, list[int], Work | None]] = []

        def finish() -> None:
            at, bounds, work = waiting.pop(0)
            if work is not None:
                work.wait()
            self._share(at, bounds, dtype, storage)

        for start in starts:
            count = min(block, elements - start)
            at = address + start * item
            bounds = self._lane_bounds(count, lanes)
            self._gather_up(at, bounds, dtype, op, scale, storage)
            lane = self.roster.local_rank
            if lane >= lanes:
                work = None
            elif len(starts) == 1:
                work = None
                self._lane_pass(choice, at, bounds, dtype, op, scale, wire)
            else:
                work = self._in_background(
                    functools.partial(self._lane_pass, choice, at, bounds, dtype, op, scale, wire)
                )
            waiting.append((at, bounds, work))
            if len(waiting) > 1:
                finish()
        while waiting:
            finish()

    def _lane_bounds(self, count: int, lanes: int) -> list[int]:
        """Return the element offsets of the local ranks' slices, [local ranks + 1]; none for ranks beyond the lanes."""
        per = -(-count // lanes)
        return [min(count, per * min(lane, lanes)) for lane in range(self.roster.local_size + 1)]

    def _gather_up(
        self, at: int, bounds: list[int], dtype: int, op: int, scale: float, storage: Storage | None
    ) -> None:
        step = SUM if op == AVG else op
        if self.local is not None:
            self.local.reduce_lanes(at, bounds, dtype, step, scale, storage)
        elif scale != 1.0:
            fold([at], at, bounds[-1], dtype, SUM, scale=scale)

    def _share(self, at: int, bounds: list[int], dtype: int, storage: Storage | None) -> None:
        if self.local is not None:
            self.local.gather_lanes(at, bounds, dtype, storage)

    def _lane_pass(
        self, choice: Choice, at: int, bounds: list[int], dtype: int, op: int, scale: float, wire: Wire | None
    ) -> None:
        lane = self.roster.local_rank
        begin, count = bounds[lane], bounds[lane + 1] - bounds[lane]
        mine = at + begin * ITEM_BYTES[dtype]
        self._carry(choice, self.roster.lane(lane), mine, count, dtype, op, scale, wire)
        if op == AVG:
            fold([mine], mine, count, dtype, AVG, divisor=self.roster.size)

    def _in_background(self, job: Callable[[], None]) -> Work:
        if self._carrier is None:
            self._carrier = Background(f"ringside-carrier-{self.roster.rank}")
        return self._carrier.submit(job)

    # -------------------------------------------------------------------------------------------- messages

    def _carry(
        self,
        choice: Choice,
        members: Sequence[int] | None,
        address: int,
        elements: int,
        dtype: int,
        op: int,
        scale: float,
        wire: Wire | None,
    ) -> None:
        data = memory(address, elements * ITEM_BYTES[dtype])
        if choice.algorithm == NATIVE:
            self._native.all_reduce(data, dtype, SUM if op == AVG else op, members)
            return
        vertices = self.roster.size if members is None else len(members)
        me = self.roster.rank if members is None else self.roster.host
        plan = plan_messages(choice.schedule(vertices), me)
        if plan.ranks == 1 or elements == 0:
            return
        bounds = (chunk_bounds(elements, plan.chunks) * ITEM_BYTES[dtype]).tolist()
        chunks = [data[bounds[c] : bounds[c + 1]] for c in range(plan.chunks)]
        call = Call(ALL_REDUCE, dtype, op, elements, scale)
        self.exchange.run(plan, chunks, ITEM_BYTES[dtype], folder(dtype, op), call, members=members, wire=wire)
        if wire is not None:
            wire.round(data)

    # -------------------------------------------------------------------------------------------- failures

    @contextlib.contextmanager
    def _explained(self, what: str) -> Any:
        """Turn what goes wrong in a collective into the error that says who, and tell the other ranks."""
        if self._broken is not None:
            raise type(self._broken)(str(self._broken)) from self._broken
        try:
            yield
        except BaseException as error:
            cause = self._cause_of(error)
            first = self.exchange.transport.fail(cause)
            if self.local is not None:
                self.local.abandon()
            explained = self._error(what, first, error)
            self._broken = explained
            if explained is error or not isinstance(error, Exception):
                raise
            raise explained from error

    def _cause_of(self, error: BaseException) -> Cause:
        if isinstance(error, LinkError):
            return error.cause
        if isinstance(error, Disagreement | MismatchError):
            return Cause("disagreed", self.roster.rank)
        if isinstance(error, PeerLostError | DeadlineError) and self.local is not None:
            here = self.roster.hosts[self.roster.host]
            culprit = here[error.ranks[0]] if error.ranks else self.roster.rank
            return Cause("lost" if isinstance(error, PeerLostError) else "late", culprit)
        return Cause("left", self.roster.rank)

    def _error(self, what: str, cause: Cause, error: BaseException) -> SyncError:
        where = f"{what} on {self.roster.describe(self.roster.rank)}"
        who = self.roster.describe(cause.vertex) if cause.vertex < self.roster.size else "the reducer at the switch"
        if isinstance(error, Disagreement):
            return MismatchError(f"{where}: {self._differences(error)}", [error.peer])
        if isinstance(error, MismatchError):
            return error
        if cause.kind == "disagreed":
            text = f"{who} found that ranks called different things; see its message"
            return MismatchError(f"{where}: {text}", [cause.vertex])
        if cause.kind == "late":
            text = f"{who} did not send within {self._timeout_s:g} s, though its connection stands"
            return DeadlineError(f"{where}: {text}; look at what it does, or raise RINGSIDE_TIMEOUT_S", [cause.vertex])
        if cause.vertex == self.roster.rank:
            return error if isinstance(error, SyncError) else ClosedError(f"{where}: {type(error).__name__}: {error}")
        if cause.kind == "left":
            return PeerLostError(f"{where}: {who} gave up; restart from the last checkpoint", [cause.vertex])
        return PeerLostError(
            f"{where}: {who} died or cannot be reached; restart from the last checkpoint", [cause.vertex]
        )

    def _differences(self, error: Disagreement) -> str:
        (seq, plan, segment, call), (own_seq, own_plan, own_segment, own) = error.theirs, error.ours
        peer = self.roster.describe(error.peer) if error.peer < self.roster.size else "the reducer"
        if seq != own_seq:
            return f"{peer} is at collective {seq} on this link, this rank at {own_seq}"
        if call != own:
            return f"{peer} called {_words(call)}, this rank {_words(own)}"
        if segment != own_segment:
            return f"{peer} cuts messages of {segment} bytes, this rank of {own_segment}"
        return f"{peer} runs another schedule ({plan:08x}) than this rank ({own_plan:08x})"


def _words(call: Call) -> str:
    kind = {ALL_REDUCE: "all_reduce"}.get(call.kind, f"collective {call.kind}")
    extra = "" if call.extra in (0.0, 1.0) or math.isnan(call.extra) else f", {call.extra:g}"
    return f"{kind}({OPS[call.op]}, {DTYPES[call.dtype]}, {call.elements} elements{extra})"


__all__ = ["ALL_REDUCE", "Across", "Native"]
