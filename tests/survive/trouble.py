"""Jobs with real workers in trouble that is not a death, each printed as a line of JSON; started by test_trouble.py.

`python -m tests.survive.trouble NAME... [--disk DIRECTORY]`: `strangers`, `twice`, `drain`, and `full`, which needs a
small disk of its own.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.survive.counting import BATCH, SAMPLES, Counting, consumed, count
from tests.survive.herd import Report, Store, run_job
from tests.survive.real_cases import warm_up, wrongs

from ringside.survive.state.checkpoint import Checkpoints
from ringside.survive.train import training

LIMIT_S = 30.0


def told(report: Report, directory: Path, steps: int) -> dict[str, Any]:
    """Return what became of a job: what is wrong, who left why, and the warnings of every rank."""
    logs = {path.stem: path.read_text().splitlines() for path in directory.glob("*.log")}
    errors, report.errors = [error.splitlines()[-1] for error in report.errors], []
    left = {rank: end["left"] for rank, end in report.ended.items()}
    return {"wrong": wrongs(report, steps), "errors": errors, "left": left, "logs": logs}


def strangers(store: Store, directory: Path) -> dict[str, Any]:
    """Two ranks are killed and come back as somebody else: one with another model, one with other code."""
    trap = "kill:rank=1,step=3,phase=after_send;kill:rank=2,step=5,phase=compute"
    return told(run_job(store, "strangers", 3, _changed, directory, trap=trap), directory, 30)


def _changed(rank: int, directory: Path) -> Any:
    been = directory / f"{rank}.been"
    again = been.exists()
    been.touch()
    if again and rank == 2:
        sys.modules["__main__"].__file__ = counted_by = str(Path(__file__).with_name("counting.py"))
        assert Path(counted_by).is_file()
    return count(30, directory, samples=SAMPLES + 24 * (again and rank == 1))


def twice(store: Store, directory: Path) -> dict[str, Any]:
    """While a job runs, others are started with its name and store: on its host, and as if on two others."""
    child = os.fork()
    if not child:
        _await(directory / "going")
        others = [_another(store, directory, hosts) for hosts in (1, 2)]
        (directory / "refused.part").write_text(json.dumps(others))
        (directory / "refused.part").rename(directory / "refused")
        os._exit(0)
    first = told(run_job(store, "twice", 2, _patient, directory), directory, 30)
    os.waitpid(child, 0)
    return {"first": first, "others": json.loads((directory / "refused").read_text())}


def _another(store: Store, directory: Path, hosts: int) -> dict[str, Any]:
    own = directory / str(hosts)
    own.mkdir()
    return told(run_job(store, "twice", 2, _counted, own, hosts=hosts, respawn=False), own, 30)


def _counted(rank: int, directory: Path) -> Any:
    return count(30, directory)


def _patient(rank: int, directory: Path) -> Any:
    """Count, and wait in the middle until the other job has ended."""

    def loss(model: Counting, batch: torch.Tensor) -> torch.Tensor:
        if rank == 0 and not (directory / "going").exists() and model.counts.detach().sum() > 5 * BATCH:
            (directory / "going").touch()
            _await(directory / "refused")
        return consumed(model, batch)

    return count(30, directory, loss_fn=loss)


def _await(path: Path) -> None:
    until = time.monotonic() + LIMIT_S
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)


def drain(store: Store, directory: Path) -> dict[str, Any]:
    """One of three ranks takes far longer than the others, who go on without it."""
    return told(run_job(store, "drain", 3, _slow, directory), directory, 30)


def _slow(rank: int, directory: Path) -> Any:
    def loss(model: Counting, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05 if rank == 2 else 0.001)
        return consumed(model, batch)

    return count(30, directory, loss_fn=loss, on_straggler="drain")


def full(store: Store, directory: Path, disk: Path) -> dict[str, Any]:
    """The disk for checkpoints is full after the first one."""
    report = run_job(store, "full", 2, functools.partial(_filling, disk), directory)
    newest = Checkpoints(disk).newest()
    kept = sorted(path.name for path in disk.iterdir())
    return {**told(report, directory, 30), "newest": newest and newest["step"], "kept": kept}


def _filling(disk: Path, rank: int, directory: Path) -> Any:
    def loss(model: Counting, batch: torch.Tensor) -> torch.Tensor:
        if (disk / "step-00000005").exists() and not (disk / "filler").exists():  # whoever is there first
            _fill(disk / "filler")
        return consumed(model, batch)

    made, make = [], Checkpoints.__init__

    def noted(self: Checkpoints, *args: Any) -> None:
        made.append(self)
        make(self, *args)

    pytest.MonkeyPatch().setattr(Checkpoints, "__init__", noted)  # for as long as the process lives
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given: dict[str, Any] = {"batch_size": BATCH, "micro_batches": 8, "mean": False, "checkpoint_every": 5}
    with training(model, optimizer, range(SAMPLES), loss_fn=loss, steps=30, checkpoint_dir=disk, **given) as t:
        for step in t:
            if step.number in (5, 10):  # its checkpoint was begun before this step; here it is written, or has failed
                (checkpoints,) = made
                checkpoints.finish(LIMIT_S)
        wrong = model.counts.detach().sum().item() - 30 * BATCH
        return {"step": t.step, "digest": t.digest(), "wrong": wrong, "left": t.reason, "members": []}


def _fill(path: Path) -> None:
    try:
        with path.open("xb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:  # it is full, or the other one fills it
        return


def main(words: list[str]) -> None:
    names, _, disk = " ".join(words).partition(" --disk ")
    cases: dict[str, Callable[[Store, Path], dict[str, Any]]] = {
        "strangers": strangers, "twice": twice, "drain": drain, "full": functools.partial(full, disk=Path(disk))
    }  # fmt: skip
    warm_up()
    store = Store()
    try:
        for name in names.split():
            with tempfile.TemporaryDirectory(prefix="ringside-survive-") as directory:
                print(json.dumps(cases[name](store, Path(directory))), flush=True)
    finally:
        store.close()


if __name__ == "__main__":
    main(sys.argv[1:])
