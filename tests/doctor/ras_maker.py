"""What `ncclras -f json` and its monitor print, in the form that NCCL 2.30's `src/ras/client_support.cc` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

FUNCTIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce", "SendRecv", "Send", "Recv")


def member(rank: int, place: int | None = None) -> dict[str, Any]:
    """Return who a rank is: four to a host."""
    place = rank if place is None else place
    return {
        "rank": rank,
        "host": f"10.0.0.{place // 4}",
        "pid": 1000 + place,
        "cuda_dev": place % 4,
        "nvml_dev": place % 4,
    }


def communicator(
    counts: Mapping[int, Mapping[str, int]],
    name: str = "0x7f8c",
    missing: Mapping[int, str] | None = None,
    places: Mapping[int, int] | None = None,
) -> dict[str, Any]:
    """Return one communicator: what each rank has called, and the ranks that are missing, with why."""
    places = places or {}
    missing = missing or {}
    status = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    return {
        "hash": name,
        "secondary_hash": "0x1:0x2",
        "size": len(counts) + len(missing),
        "ranks_count": len(counts),
        "missing_ranks_count": len(missing),
        "ranks": [
            {
                **member(rank, places.get(rank)),
                "status": status,
                "collective_counts": {function: called.get(function, 0) for function in FUNCTIONS},
            }
            for rank, called in counts.items()
        ],
        "missing_ranks": [
            {
                **member(rank, places.get(rank)),
                "status": {"unresponsive": why == "unresponsive", "considered_dead": why == "considered_dead"},
            }
            for rank, why in missing.items()
        ],
    }


def reading(second: int, *communicators: dict[str, Any]) -> str:
    """Return what is printed at a second of some minute."""
    document = {
        "nccl_version": "2.30.7",
        "cuda_runtime_version": 13000,
        "cuda_driver_version": 13000,
        "timestamp": f"2026-11-27 08:00:{second:02}",
        "communicators_count": len(communicators),
        "communicators": list(communicators),
        "ras": {"collection_time_sec": 0.013, "timeouts_count": 0},
    }
    return json.dumps(document, indent=2) + "\n"


def event(kind: str, peer: dict[str, Any] | None = None, second: int = 0) -> str:
    """Return an event of the monitor."""
    document: dict[str, Any] = {"timestamp": f"2026-11-27 08:00:{second:02}", "group": "LIFECYCLE", "event": kind}
    if peer is not None:
        document["peer"] = peer
    return json.dumps({**document, "details": ""}, indent=2) + "\n"
