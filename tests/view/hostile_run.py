"""A run that wants to do harm to whoever shows it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.recorded_runs import slow_run

HOSTILE = '<img src=x onerror=alert(1)>"\\u0000</script>'


def hostile_run(path: Path) -> Path:
    """A run whose names are markup, whose lines are torn, and whose events are nonsense."""
    slow_run(path)
    info = json.loads((path / "run.json").read_text())
    info |= {"name": HOSTILE, "hosts": [HOSTILE] * 4, "algorithm": HOSTILE, "future": {"x": 1}}
    (path / "run.json").write_text(json.dumps(info))
    verdict = {
        "kind": "slow_rank",
        "ranks": [2, -5, 10**30],
        "since_step": 60,
        "detected_step": 66,
        "excess_ratio": 0.3,
        "cause": HOSTILE,
    }
    odd = {**verdict, "ranks": [2], "evidence": {"steps": "many", "until_step": HOSTILE}}
    lines = [{"kind": "verdict", "verdict": one} for one in (verdict, odd, {**odd, "evidence": {}}, None, 5)]
    (path / "events.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"kind": 5}\n\xff\n[[[[\n{"kind": "ver')
    with (path / "steps.jsonl").open("a") as file:
        file.write('{"step": 1e400}\n{"step": 99999999999999999999, "rank": 0}\nnull\n{"step": 5, "rank')
    return path
