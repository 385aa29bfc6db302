"""Ranks that called different collectives under the same number: another operation, size or dtype, or another order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice

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
        aspect: `operation`, `size` or `dtype`.
        common: The call that most made.
        others: The calls of those that differ, by rank; all ranks where there is no majority.
        decided: Whether there is a majority, so that `others` are the culprits.
        skipped: Whether those that differ called the same as the others, but in another order.
    """

    view: GroupView
    seq: int
    aspect: str
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
    found: list[Mismatch] = []
    for view in views:
        by_seq: dict[int, dict[int, RecordedCall]] = {}
        for rank, calls in view.calls.items():
            for seq, call in calls.items():
                by_seq.setdefault(seq, {})[rank] = call
        mismatches = (
            mismatch
            for seq in sorted(by_seq)
            if len({call.shape for call in by_seq[seq].values()}) > 1
            for aspect in ("operation", "dtype", "size")
            if (mismatch := _differ(view, seq, aspect, by_seq[seq])) is not None
        )
        found += islice(mismatches, 1)
    return found


def _differ(view: GroupView, seq: int, aspect: str, calls: dict[int, RecordedCall]) -> Mismatch | None:
    """Whether ranks differ in one aspect of collective number `seq`, and who."""
    # What is compared; calls whose ranks may differ in this are left out.
    values: dict[int, str] = {}
    for rank, call in calls.items():
        op, inputs, outputs, dtypes = call.shape
        if aspect == "operation":
            values[rank] = op
        elif aspect == "dtype" and op not in ("barrier", "coalesced"):
            values[rank] = dtypes
        elif aspect == "size" and op in SAME_SIZES:
            values[rank] = f"{inputs} → {outputs}"
    values = {rank: text for rank, text in values.items() if text}
    counts = Counter(values.values()).most_common(2)
    if len(counts) < 2:
        return None
    # A tie decides nothing: then all are shown and nobody is blamed.
    majority, count = counts[0]
    decided = count > counts[1][1]
    others = {rank: calls[rank] for rank, text in values.items() if text != majority or not decided}
    same = [rank for rank, text in values.items() if text == majority]
    common = calls[same[0]]
    # Another order: each side soon calls what the other called here.
    skipped = aspect == "operation" and all(
        _called_later(view, rank, seq, common) and any(_called_later(view, member, seq, calls[rank]) for member in same)
        for rank in others
    )
    return Mismatch(view=view, seq=seq, aspect=aspect, common=common, others=others, decided=decided, skipped=skipped)


def _called_later(view: GroupView, rank: int, seq: int, call: RecordedCall) -> bool:
    """Whether a rank made a call of this shape soon after number `seq`."""
    own = view.calls[rank]
    return any(number in own and own[number].shape == call.shape for number in range(seq + 1, seq + 1 + SOON))
