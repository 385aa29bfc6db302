"""Jobs that are struck at their end, each printed as a line of JSON; test_survive_end.py runs it.

`python -m tests.hostile.ending NAME...`, names as in `CASES`. The last line of every worker is that of most scripts:
`if t.rank == 0: torch.save(...)`. What it wrote is what is looked at.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.survive.counting import BATCH, SAMPLES, Counting, consumed
from tests.survive.herd import Store, run_job
from tests.survive.real_cases import warm_up

from ringside.survive.train import training

STEPS, RANKS = 12, 3


def train(settings: dict[str, Any], rank: int, directory: Path) -> Any:
    """Train the counting model and save it as rank 0, as scripts do; return what this process found."""
    model = Counting(SAMPLES + 24 * settings.get("stranger", lambda *_: False)(rank, directory))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    back = directory / "back"  # rank 0 has died and joined again

    def loss(module: Counting, batch: torch.Tensor) -> torch.Tensor:
        if settings.get("slow") == rank or (settings.get("slow_until_back") and not back.exists()):
            time.sleep(0.05)
        return consumed(module, batch)

    given: dict[str, Any] = {"batch_size": BATCH, "micro_batches": 8, "mean": False, **settings.get("training", {})}
    seen = 0
    with training(model, optimizer, range(len(model.counts)), loss_fn=loss, steps=settings.get("steps"), **given) as t:
        for step in t:
            seen += 1
            if rank == 0 and t.joined:
                back.touch()
            if (rank, step.number) == settings.get("breaks"):
                break
    if rank in settings.get("dies_in_last_lines", ()) and _first_time(directory / f"{rank}.died"):
        if rank == 0:
            (directory / "final.pt").write_bytes(b"half a fil")
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        torch.save(model.counts.detach().clone(), directory / "final.pt")
    return {"step": t.step, "digest": t.digest(), "left": t.reason, "seen": seen}


def _first_time(mark: Path) -> bool:
    first = not mark.exists()
    mark.touch()
    return first


def _comes_back_as_a_stranger(rank: int, directory: Path) -> bool:
    return rank == 0 and not _first_time(directory / "0.been")


def kills(phase: str, *ranks: int, step: int = STEPS - 1) -> str:
    return ";".join(f"kill:rank={rank},step={step},phase={phase}" for rank in ranks)


CASES: dict[str, dict[str, Any]] = {
    "late": {"trap": kills("before_apply", 0)},
    "early": {
        "trap": kills("after_send", 0, step=3) + ";kill:rank=0,epoch=2,phase=before_apply,step=59",
        "steps": 60,
        "slow_until_back": True,
    },
    "all after the last commit": {"trap": kills("before_keep", 0) + ";" + kills("after_keep", 1, 2)},
    "over": {"trap": kills("after_end", 0, 1, 2)},
    "last lines": {"dies_in_last_lines": (0, 1)},
    "drained": {"slow": 0, "training": {"on_straggler": "drain"}, "steps": 30},
    "left": {"breaks": (1, 6), "steps": None, "trap": kills("before_keep", 0, step=0)},
    "stranger": {"trap": kills("after_send", 0, step=4), "stranger": _comes_back_as_a_stranger},
    "hosts": {"trap": kills("before_apply", 0), "hosts": 3},
}


def run(store: Store, name: str) -> dict[str, Any]:
    """Run one case; return what became of it, and what the last line saved."""
    settings = {"steps": STEPS, **CASES[name]}
    trap, hosts = settings.pop("trap", ""), settings.pop("hosts", 1)
    with tempfile.TemporaryDirectory(prefix="ringside-ending-") as path:
        directory = Path(path)
        worker: Callable[[int, Path], Any] = functools.partial(train, settings)
        report = run_job(store, name.replace(" ", "-"), RANKS, worker, directory, trap=trap, hosts=hosts, limit_s=40)
        saved = torch.load(directory / "final.pt").tolist() if (directory / "final.pt").exists() else None
        files = [str(file) for file in directory.glob("ringside-final-*")]
        logs = "\n".join(file.read_text() for file in directory.glob("*.log"))
        return {
            "ended": report.ended,
            "deaths": report.deaths,
            "errors": [error.splitlines()[-1] for error in report.errors],
            "timed_out": report.timed_out,
            "unattended": getattr(report, "unattended", False),
            "saved": saved,
            "kept": [_read(file) for file in files],
            "named": [file in logs for file in files],
            "late": "came too late for the final state" in logs,
        }


def _read(file: str) -> Any:
    from ringside.survive import final_state

    state = final_state(file)
    return [state["step"], state["model"]["counts"].tolist()]


def main(names: list[str]) -> None:
    warm_up()
    store = Store()
    try:
        for name in names:
            print(json.dumps(run(store, name)), flush=True)
    finally:
        store.close()


if __name__ == "__main__":
    main(sys.argv[1:])
