"""Where gradient buckets lie: in memory that the ranks of a host map, or in private memory that is copied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec


class GradientMemory(msgspec.Struct, frozen=True, kw_only=True):
    """An event of kind `gradient_memory`: the buckets of one model on rank 0, recorded whenever they change.

    Args:
        model: Which model of this process, counted from 0.
        shared_buckets: Buckets that the host's ranks map and reduce where they lie.
        shared_bytes: Their size.
        copied_buckets: Buckets in private memory, which are copied through Ringside's.
        copied_bytes: Their size.
    """

    model: int = 0
    shared_buckets: int = 0
    shared_bytes: int = 0
    copied_buckets: int = 0
    copied_bytes: int = 0


def gradient_memory(events: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return what was shared and what was copied in the end, of all models together; {} where no event says."""
    newest: dict[int, GradientMemory] = {}
    for event in events:
        if event.get("kind") == "gradient_memory":
            try:
                memory = msgspec.convert(event, GradientMemory)
            except (msgspec.ValidationError, ValueError):
                continue
            newest[memory.model] = memory
    names = [name for name in GradientMemory.__struct_fields__ if name != "model"]
    return {name: sum(getattr(memory, name) for memory in newest.values()) for name in names} if newest else {}
