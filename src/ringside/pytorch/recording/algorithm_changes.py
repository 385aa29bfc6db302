"""Puts into the run what a tuner between hosts decides anew: a link that was avoided stays on record."""

from __future__ import annotations

from typing import Any

from ringside.engine.net.rank_map import RankMap
from ringside.engine.tuner.explain import AlgorithmChange
from ringside.pytorch.recording import session as sessions


def record_algorithm_change(roster: RankMap, change: AlgorithmChange) -> None:
    """Record a change in the session of this process, if it has one and the group is of all its ranks.

    Args:
        roster: Who is where, in the group that decided.
        change: What it decided.
    """
    session = sessions.current()
    if session is not None and session.size == roster.size:
        session.algorithm_changed(event_fields(roster, change))


def event_fields(roster: RankMap, change: AlgorithmChange) -> dict[str, Any]:
    """Return a change as the fields of an event; links are named by the first rank of each host."""
    links = []
    for link in change.slow:
        ends = [link.src] if link.dst < 0 else [link.src, link.dst]  # dst < 0: a host as a whole
        links.append(
            {
                "ranks": [roster.hosts[end][0] for end in ends],
                "hosts": [roster.names[end] for end in ends],
                "bytes_per_s": link.bytes_per_s,
                "usual_bytes_per_s": link.usual,
            }
        )
    return {
        "size_bytes": change.size_bytes,
        "before": change.before,
        "after": change.after,
        "others_changed": change.others_changed,
        "reason": change.reason,
        "links": links,
        "seconds": change.seconds,
    }


__all__ = ["event_fields", "record_algorithm_change"]
