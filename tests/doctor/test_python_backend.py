"""Dumps of a backend in Python, whose ends torch does not record: who never came is known all the same.

`python_backend` was recorded on torch 2.15 by three ranks of a job over `ringside`: two all-reduces, a broadcast and a
barrier, and a third all-reduce that rank 1 did not call.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ringside.doctor import examine
from ringside.doctor.findings import Findings

RECORDED = Path(__file__).parent / "python_backend"
CALLED_S = 1795747188.6
"""When the last call was made, seconds since 1970."""


def examined(
    folder: Path, written_s: dict[int, float] | None = None, op: str = "all_reduce", last: int = 5
) -> Findings:
    """Examine the dumps as if written at those times (a minute later), the last call another, or with fewer calls."""
    for rank in range(3):
        dump: dict[str, Any] = json.loads((RECORDED / f"rank_{rank}.json").read_text())
        for entry in dump["entries"][4:]:
            entry["profiling_name"] = f"ringside:{op}"
        dump["entries"] = dump["entries"][:last]
        dump["pg_status"]["0"]["last_enqueued_collective"] = len(dump["entries"]) - 1
        path = folder / f"rank_{rank}.json"
        path.write_text(json.dumps(dump))
        at = (written_s or {}).get(rank, CALLED_S + 60)
        os.utime(path, (at, at))
    return examine([folder])


def test_who_never_came_is_named(tmp_path: Path) -> None:
    found = examined(tmp_path)
    (verdict,) = found.verdicts
    assert (verdict.kind, verdict.ranks) == ("hang", [1])
    assert verdict.cause.startswith("rank 1 never entered ringside:all_reduce 5 Float, sequence number 5 of")
    (standing,) = found.standings
    assert standing.rows == [
        [0, 5, None, 1, "entered, not completed"],
        [1, 4, None, 0, "culprit: never entered"],
        [2, 5, None, 1, "entered, not completed"],
    ]


@pytest.mark.parametrize(
    "how",
    [
        {"written_s": {1: CALLED_S - 1}},
        {"written_s": dict.fromkeys(range(3), CALLED_S + 0.2)},
        {"op": "broadcast"},
        {"last": 4},
    ],
    ids=["rank 1's dump is older", "it may still come", "a root need not wait", "all came"],
)
def test_what_is_not_certain_is_not_said(tmp_path: Path, how: dict[str, Any]) -> None:
    found = examined(tmp_path, **how)
    assert found.verdicts == []
    (unjudged,) = found.unjudged
    assert unjudged.what == "whether collectives ended"
    assert "no ends are recorded of ringside" in unjudged.why
