"""Jobs that end before their last step, and are started again, each printed as a line of JSON; test_resume.py runs it.

`python -m tests.survive.resuming NAME...`: `fewer`, `storeless`, `too_few`.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.waiting import until
from tests.survive.counting import count
from tests.survive.herd import Report, Store, run_job
from tests.survive.real_cases import warm_up
from tests.survive.trouble import told

from ringside.survive.state.checkpoint import Checkpoints

STEPS, RARELY, EVERY = 30, 1000, 5


def run(store: Store, name: str, ranks: int, path: Path, **given: Any) -> dict[str, Any]:
    """Run a job whose checkpoints lie in a directory; return what became of it, and the newest step saved there."""
    own = path / name
    own.mkdir()
    to_job = {key: given.pop(key) for key in ("trap", "respawn", "on_stop") if key in given}
    worker = functools.partial(_counted, path / "checkpoints", given)
    report: Report = run_job(store, name, ranks, worker, own, **to_job)
    newest = Checkpoints(path / "checkpoints").newest()
    steps = {rank: end["step"] for rank, end in report.ended.items()}
    return {**told(report, own, STEPS), "steps": steps, "saved": newest and newest["step"], "deaths": report.deaths}


def _counted(checkpoints: Path, given: dict[str, Any], rank: int, directory: Path) -> Any:
    return count(STEPS, directory, checkpoint_dir=checkpoints, **given)


def fewer(path: Path) -> list[dict[str, Any]]:
    """All of four ranks die and stay dead; the job is started again with two ranks, which die too, then with five.

    Nobody dies before the checkpoint of two intervals ago is there: steps of milliseconds outrun who writes it.
    """
    store = Store()
    written = functools.partial(_wait_for_checkpoint, path / "checkpoints", 2 * EVERY)
    every = {"checkpoint_every": EVERY, "respawn": False, "between_steps": written}
    found = [
        run(store, "four", 4, path, trap=killed(4, 12), **every),
        run(store, "two", 2, path, trap=killed(2, 23), **every),
        run(store, "five", 5, path, **every),
    ]
    store.close()
    return found


def _wait_for_checkpoint(checkpoints: Path, behind: int, step: int) -> None:
    """Wait until the newest checkpoint is no more than so many steps behind the next one to be trained."""

    def is_there() -> bool:
        return any(int(saved.name.removeprefix("step-")) >= step - behind for saved in checkpoints.glob("step-*"))

    if step > behind:
        until(is_there, "a checkpoint")


def killed(ranks: int, step: int) -> str:
    """Return the trap that kills all ranks in a step."""
    return ";".join(f"kill:rank={rank},step={step},phase=after_send" for rank in range(ranks))


def storeless(path: Path) -> list[dict[str, Any]]:
    """The store is killed in the middle of a step, long before a checkpoint is due; then the job is started again."""
    store = Store()
    cut = functools.partial(os.kill, store.pid, signal.SIGKILL)
    trap = "stop:rank=1,step=10,phase=after_send"
    found = [run(store, "storeless", 3, path, trap=trap, on_stop=cut, checkpoint_every=RARELY)]
    store.close()
    store = Store()
    found.append(run(store, "again", 2, path, checkpoint_every=RARELY))
    store.close()
    return found


def too_few(path: Path) -> dict[str, Any]:
    """One of three ranks dies for good, and three are needed."""
    store = Store()
    trap = "kill:rank=1,step=8,phase=after_send"
    found = run(store, "few", 3, path, trap=trap, respawn=False, least_ranks=3, checkpoint_every=RARELY)
    store.close()
    return found


def main(names: list[str]) -> None:
    cases: dict[str, Callable[[Path], Any]] = {"fewer": fewer, "storeless": storeless, "too_few": too_few}
    warm_up()
    for name in names:
        with tempfile.TemporaryDirectory(prefix="ringside-survive-") as path:
            print(json.dumps(cases[name](Path(path))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
