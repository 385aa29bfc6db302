"""A job of bench/scale/, by name, with its words; what came of it as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from bench.scale.__main__ import slow_rank_job
from bench.scale.job import run
from bench.scale.replay import Turn, recorded, replay

folder, name, *words = sys.argv[1:]
if name == "slow rank":
    job = slow_rank_job(int(words[0]), float(words[1]), int(words[2])).job
else:
    assert name == "recorded", name
    job = replay(recorded([Path(words[0])]), Turn("repeated", False, 0, 0), 90, 0)
outcome = run(job, Path(folder) / "run")
print(json.dumps({**asdict(outcome), "missing": outcome.missing}))
