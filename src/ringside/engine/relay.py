"""A schedule over hosts with shared memory before and after its messages, each local rank carrying its lane of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ringside.engine.across import Across
from ringside.engine.exchange_run import Fold
from ringside.engine.flow import Course, Layout, Piece, Stream
from ringside.engine.message_plan import MessagePlan
from ringside.engine.told import Call, Doing
from ringside.engine.transports.transport import Bytes

Step = Callable[[Piece], None]


@dataclass(frozen=True)
class Relay:
    """What one rank does in a collective that goes through its host's shared memory.

    Args:
        plan: The host's part of the schedule.
        layout: The pieces of its chunks, and the orders in which they are filled and end.
        lanes: Where this rank's lane of each piece lies, by piece of `layout.pieces`.
        item_bytes: Size of an element, bytes.
        fold: The reduction of what arrives.
        last_fold: The same, after which a chunk is complete; None: no other.
        fill: Leaves what is to be sent of a piece in the ranks' lanes; None: it is there.
        end: What is to be done with a piece that is complete.
        kept: Chunks of which nothing arrives here: they are complete when they are filled.
        segment_bytes: Largest message, bytes, equal on all ranks; 0: as large as the exchange takes them.
    """

    plan: MessagePlan
    layout: Layout
    lanes: Sequence[Bytes]
    item_bytes: int
    fold: Fold
    last_fold: Fold | None
    fill: Step | None
    end: Step
    kept: Collection[int] = ()
    segment_bytes: int = 0

    def carry_out(self, across: Across, call: Call, *, at_once: bool) -> None:
        """Carry it out.

        Args:
            across: The ranks.
            call: What was called, equal on all ranks.
            at_once: Everything is filled before the first message, and ended after the last: it is little, and
                handing it to another thread would take longer. Each chunk is one piece then.

        Raises:
            SyncError: As `Across.all_reduce`.
        """
        across.finish_all()
        with across.explained(self.plan.name, Doing(call, f"hosts/{self.plan.name}")):
            if at_once:
                self._step_by_step(across, call)
            else:
                self._stream(across, call)

    def _step_by_step(self, across: Across, call: Call) -> None:
        if self.fill is not None:
            for piece in self.layout.fills:
                self.fill(piece)
        self._exchange(across, call, self.lanes, None)
        for piece in self.layout.ends:
            self.end(piece)

    def _stream(self, across: Across, call: Call) -> None:
        """Let messages go on a thread of their own, while this one works in shared memory, piece by piece."""
        most = across.exchange.segment_of(self.item_bytes, None)
        length = min(self.segment_bytes // self.item_bytes * self.item_bytes or most, most)
        cut = [[lane[at : at + length] for at in range(0, len(lane), length)] for lane in self.lanes]
        pieces = self.layout.pieces
        stream = Stream(Course(self.layout, [len(segments) for segments in cut], self.kept))
        chunks: list[list[Bytes]] = [[] for _ in range(self.plan.chunks)]
        for piece, segments in zip(pieces, cut, strict=True):
            chunks[piece.chunk] += segments

        def carry() -> None:
            try:
                self._exchange(across, call, chunks, stream)
            finally:
                stream.stop()

        work = across.start(carry)
        fill = self.fill
        stream.fill(None if fill is None else lambda at: fill(pieces[at]))
        stream.drain(lambda at: self.end(pieces[at]))
        work.wait()

    def _exchange(
        self, across: Across, call: Call, chunks: Sequence[Bytes] | Sequence[list[Bytes]], stream: Stream | None
    ) -> None:
        across.exchange.run(
            self.plan,
            chunks,
            self.item_bytes,
            self.fold,
            call,
            last_fold=self.last_fold,
            members=across.roster.lane(across.roster.local_rank),
            feed=stream,
        )
