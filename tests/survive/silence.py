"""Jobs whose links go silent, in the network lab, printed as JSON by name; started by test_lab.py.

`python -m tests.survive.silence NAME...`: `around`, `parted`, `behind`, `orphaned`.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.survive.counting import Counting, consumed, count
from tests.survive.herd import Store, run_job
from tests.survive.real_cases import warm_up
from tests.survive.trouble import told

from ringside.lab import Lab
from ringside.survive.protocol.settings import ProtocolSettings
from verification.survive.audit import audit

STEPS = 30
SLOW_S = 0.05
END_PATIENCE_S = 5.0  # of 300: how long a rank is waited for at the end of which nobody knows whether it comes


def job(lab: Lab, name: str, ranks: int, trap: str, on_stop: Callable[[], object], **given: Any) -> dict[str, Any]:
    """Run a job of one rank on each host from 0 on, its store on the last host that has no rank, else on host 0.

    `on_stop` is called whenever the trap stops a worker. Of what became of it: with whom the last step was made,
    whether some step was made alone, and what is wrong with its decisions.
    """
    steps = given.pop("steps", STEPS)
    store = Store(lab, host=lab.hosts - 1 if ranks < lab.hosts else 0)
    with tempfile.TemporaryDirectory(prefix="ringside-survive-") as path:
        worker = functools.partial(_counted, steps, given)
        report = run_job(store, name, ranks, worker, Path(path), trap=trap, on_stop=on_stop)
        members = report.ended[0]["members"] if 0 in report.ended else []
        found = told(report, Path(path), steps)
    found["wrong"] += audit(store.registers(name), steps)
    store.close()
    return {**found, "last": members[-1] if members else [], "alone": [0] in members}


def _counted(steps: int, given: dict[str, Any], rank: int, directory: Path) -> Any:
    pause_s = given.get("pause_s", 0.0)

    def loss(model: Counting, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(pause_s)  # a step long enough for somebody to come back before the end
        return consumed(model, batch)

    settings = {key: value for key, value in given.items() if key != "pause_s"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "ringside.survive.train.ProtocolSettings",
            functools.partial(ProtocolSettings, end_patience_s=END_PATIENCE_S),
        )
        return count(steps, directory, loss_fn=loss, **settings)


def around() -> list[dict[str, Any]]:
    """On three hosts the link between the two that do not lead goes silent, early and late in a step."""
    cases = []
    for phase, reproducible in (("after_send", False), ("after_receive", True)):
        with Lab(hosts=3, wiring="mesh") as lab:
            cut = functools.partial(lab.cut, link=(1, 2))
            trap = f"stop:rank=1,step=5,phase={phase}"
            cases.append(job(lab, "around", 3, trap, cut, reproducible=reproducible))
    return cases


def parted() -> dict[str, Any]:
    """Two ranks lose the only link between them, but not the store, which is elsewhere; later it carries again."""
    with Lab(hosts=3, wiring="mesh") as lab:
        acts = iter([functools.partial(lab.cut, link=(0, 1)), functools.partial(lab.restore, link=(0, 1))])
        trap = "stop:rank=1,step=5,phase=after_send;stop:rank=0,step=45,phase=compute"
        return job(lab, "parted", 2, trap, lambda: next(acts)(), pause_s=SLOW_S, steps=90)


def behind() -> dict[str, Any]:
    """One of three ranks loses the link to the host that has the store, and the leader."""
    with Lab(hosts=3, wiring="mesh") as lab:
        cut = functools.partial(lab.cut, link=(0, 2))
        return job(lab, "behind", 3, "stop:rank=2,step=5,phase=after_send", cut)


def orphaned() -> dict[str, Any]:
    """Of two ranks the leader dies, and when it comes back the link falls silent before it has fetched the state."""
    with Lab(hosts=3, wiring="mesh") as lab:
        cut = functools.partial(lab.cut, link=(0, 1))
        trap = "kill:rank=0,step=5,phase=after_send;stop:rank=0,epoch=2,phase=rejoin"
        return job(lab, "orphaned", 2, trap, cut, pause_s=SLOW_S)


def main(names: list[str]) -> None:
    warm_up()
    cases: dict[str, Callable[[], Any]] = {
        "around": around, "parted": parted, "behind": behind, "orphaned": orphaned
    }  # fmt: skip
    print(json.dumps({name: cases[name]() for name in names}))


if __name__ == "__main__":
    main(sys.argv[1:])
