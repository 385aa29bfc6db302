"""Ranks that called different collectives under the same number: another operation, size or dtype, or another order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ringside.doctor.flight_recorder.dump import RecordedCall
from ringside.doctor.flight_recorder.groups import GroupView

SAME_SIZES = frozenset(
    {
        "all_reduce",
        "allreduce",
        "allreduce_coalesced",
        "all_reduce_barrier",
        "_all_gather_base",
        "all_gather_single",
        "all_gather",
        "_reduce_scatter_base",
        "reduce_scatter_single",
        "reduce_scatter",
        "broadcast",
        "reduce",
        "barrier",
    }
)
"""Collectives whose ranks must all give the same sizes; an all-to-all's may differ."""
SOON = 8
"""Calls within which another order is recognised as one."""


@dataclass(frozen=True)
class Mismatch:
    """One collective that ranks did not agree on.

    Args:
        view: Its group.
        seq: Its number.
        what: `operation`, `size` or `dtype`.
        common: The call that most made.
        others: The calls of those that differ, by rank; all ranks where there is no majority.
        decided: Whether there is a majority, so that `others` are the culprits.
        skipped: Whether those that differ called the same as the others, but in another order.
    """

    view: GroupView
    seq: int
    what: str
    common: RecordedCall
    others: dict[int, RecordedCall]
    decided: bool
    skipped: bool

    @property
    def ranks(self) -> list[int]:
        """The culprits, ascending."""
        return sorted(self.others)


def find_mismatches(views: list[GroupView]) -> list[Mismatch]:
    """Return the first mismatch of each group; what follows it in that group is its consequence."""
    return [found for view in views if (found := _first_mismatch(view)) is not None]


def _first_mismatch(view: GroupView) -> Mismatch | None:
    by_seq: dict[int, dict[int, RecordedCall]] = {}
    for rank, calls in view.calls.items():
        for seq, call in calls.items():
            by_seq.setdefault(seq, {})[rank] = call
    for seq in sorted(by_seq):
        calls = by_seq[seq]
        if len(calls) > 1 and len({call.shape for call in calls.values()}) > 1:
            for what in ("operation", "dtype", "size"):
                if (found := _differ(view, seq, what, calls)) is not None:
                    return found
    return None


def _differ(view: GroupView, seq: int, what: str, calls: dict[int, RecordedCall]) -> Mismatch | None:
    said = {rank: text for rank, call in calls.items() if (text := _aspect(call, what))}
    counts = Counter(said.values()).most_common(2)
    if len(counts) < 2:
        return None
    usual, count = counts[0]
    decided = count > counts[1][1]
    others = {rank: calls[rank] for rank, text in said.items() if text != usual or not decided}
    same = [rank for rank, text in said.items() if text == usual]
    common = calls[same[0]]
    skipped = what == "operation" and all(
        _called_later(view, rank, seq, common)
        and any(_called_later(view, usual_one, seq, calls[rank]) for usual_one in same)
        for rank in others
    )
    return Mismatch(view=view, seq=seq, what=what, common=common, others=others, decided=decided, skipped=skipped)


def _aspect(call: RecordedCall, what: str) -> str:
    op, inputs, outputs, dtypes = call.shape
    if what == "operation":
        return op
    if what == "dtype":
        return dtypes if op not in ("barrier", "coalesced") else ""
    return f"{inputs} → {outputs}" if op in SAME_SIZES else ""


def _called_later(view: GroupView, rank: int, seq: int, call: RecordedCall) -> bool:
    """Whether a rank made a call of this shape soon after number `seq`."""
    own = view.calls[rank]
    return any(number in own and own[number].shape == call.shape for number in range(seq + 1, seq + 1 + SOON))
