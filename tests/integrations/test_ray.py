"""Ray Train's loop, wrapped: on ranks of a team as a worker runs it, and on a local cluster where Ray is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")
from tests.integrations.frameworks import EXAMPLES
from tests.pytorch.training import ddp_ranks, group

from ringside.errors import UsageError
from ringside.monitor.run.directory import RunReader

STEPS = 12
CLUSTER_LIMIT_S = 600  # a cluster of a dozen processes begins and ends: two minutes on a busy machine


def ended(run: Path) -> bool:
    """Tell whether every step of both ranks is there, and the end as well."""
    seen = sorted((record.step, record.rank) for record in RunReader(run).poll())
    assert seen == [(step, rank) for step in range(STEPS) for rank in range(2)]
    return (run / "summary.json").exists()


def worker(port: int, run: str) -> bool:
    """Run a wrapped loop as a worker does; return whether it left the class as it was and no session behind."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from ringside.integrations.ray import watched
    from ringside.pytorch.recording import session

    def train(steps: int) -> None:
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    made = DistributedDataParallel.__init__
    with pytest.MonkeyPatch.context() as patch, group(port):
        patch.setitem(sys.modules, "ray", ModuleType("ray"))  # the wrapper asks for no more than that it is there
        patch.setitem(sys.modules, "ray.train", ModuleType("ray.train"))
        watched(train, run_dir=run)(STEPS)
        return DistributedDataParallel.__init__ is made and session.current() is None


def test_a_workers_loop_is_recorded_to_its_end(tmp_path: Path) -> None:
    assert ddp_ranks(2, worker, str(tmp_path / "run")) == [True, True]
    assert ended(tmp_path / "run")


def test_without_ray_one_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from ringside.integrations.ray import watched

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError) as raised:
        watched(print)
    assert str(raised.value) == "ringside.integrations.ray needs ray, which is not installed: pip install ray"


@pytest.mark.timeout(CLUSTER_LIMIT_S + 30)
def test_the_example_on_a_local_cluster(tmp_path: Path) -> None:
    pytest.importorskip("ray.train.torch", reason="Ray is not installed: pip install 'ray[train]'")
    command = [sys.executable, str(EXAMPLES / "integrations_ray.py"), "--steps", str(STEPS), "--run-dir", "run"]
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}  # for its results
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=CLUSTER_LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    assert ended(tmp_path / "run")
