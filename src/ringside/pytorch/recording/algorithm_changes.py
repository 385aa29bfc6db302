"""Puts into the run what a selector between hosts decides anew: a link that was gone around is not forgotten."""

from __future__ import annotations

from typing import Any

from ringside.engine.net.rank_map import RankMap
from ringside.engine.probe.links import MeasuredSlowLink
from ringside.engine.tuner.explain import AlgorithmChange
from ringside.pytorch.recording import session as sessions


def tell_run(roster: RankMap, revision: AlgorithmChange) -> None:
    """Tell the session of this process, if it has one and the group is of all its ranks.

    Args:
        roster: Who is where, in the group that decided.
        revision: What it decided.
    """
    session = sessions.current()
    if session is not None and session.size == roster.size:
        session.revised(fields(roster, revision))


def fields(roster: RankMap, revision: AlgorithmChange) -> dict[str, Any]:
    """Return a revision as the fields of an event; links are named by the first rank of each host."""
    return {
        "size_bytes": revision.size_bytes,
        "before": revision.before,
        "after": revision.after,
        "others_changed": revision.others_changed,
        "reason": revision.reason,
        "links": [_link(roster, link) for link in revision.slow],
        "seconds": revision.seconds,
    }


def _link(roster: RankMap, link: MeasuredSlowLink) -> dict[str, Any]:
    ends = [link.src] if link.dst < 0 else [link.src, link.dst]
    return {
        "ranks": [roster.hosts[end][0] for end in ends],
        "hosts": [roster.names[end] for end in ends],
        "bytes_per_s": link.bytes_per_s,
        "usual_bytes_per_s": link.usual,
    }


__all__ = ["fields", "tell_run"]
