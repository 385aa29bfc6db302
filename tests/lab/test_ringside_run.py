"""`ringside run` on two hosts: told where to meet by flags or by torchrun's variables, the script untouched."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.support import zygote

pytest.importorskip("torch")

from ringside.lab import Lab
from ringside.monitor.run.directory import RunReader

from .factory import LabFactory

LIMIT_S = 150.0
STEPS = 8

# Knows nothing of Ringside: plain DDP, accumulation, two models in one step, and one that has a hook of its own.
TRAIN = f"""
import os
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
called = []

def own_hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    called.append(bucket.index())
    return default_hooks.allreduce_hook(state, bucket)

plain, first, second, hooked = models = [DDP(nn.Linear(16, 16)) for _ in range(4)]
hooked.register_comm_hook(None, own_hook)

def backward(model):
    model(torch.randn(8, 16)).square().mean().backward()

def train(*models, passes=1):
    for _ in range({STEPS}):
        for model in models:
            with model.no_sync():
                for _ in range(passes - 1):
                    backward(model)
            backward(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
                    parameter.grad = None

train(plain)
train(plain, passes=3)
train(first, second)
train(hooked)
mine = torch.cat([parameter.detach().ravel() for model in models for parameter in model.parameters()])
theirs = mine.clone()
dist.broadcast(theirs, 0)
os.write(1, f"{{torch.equal(mine, theirs)}} {{len(called)}}\\n".encode())
dist.destroy_process_group()
"""


def ringside_run(lab: Lab, host: int, folder: Path, *flags: str, **environ: str) -> subprocess.Popen[str]:
    """Start `ringside run` on a host, with one rank there, which is forked."""
    here = ("--nproc-per-node", "1", "--local-addr", lab.address(host), "--run-dir", str(folder / f"run-{host}"))
    command = [sys.executable, "-m", "ringside", "run", *flags, *here, str(folder / "train.py")]
    quiet = {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1", "PYTHON_EXEC": zygote.python()}
    return lab.spawn(host, command, {**quiet, **environ}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_scripts_are_untouched_and_the_host_of_rank_0_records(lab_factory: LabFactory, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    lab = lab_factory(hosts=2)
    meet = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={lab.address(0)}:29400", "--rdzv-conf=is_host=1"]
    told = {"NNODES": "2", "RDZV_BACKEND": "c10d", "RDZV_ENDPOINT": f"{lab.address(0)}:29400", "RDZV_CONF": "is_host=0"}
    started = [
        ringside_run(lab, 0, tmp_path, *meet),
        ringside_run(lab, 1, tmp_path, **{f"PET_{name}": value for name, value in told.items()}),
    ]
    ended = [process.communicate(timeout=LIMIT_S) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    assert [out.splitlines()[0] for out, _ in ended] == [f"True {STEPS}"] * 2

    # torchrun numbers its nodes in the order in which they met.
    at, other = (0, 1) if (tmp_path / "run-0").exists() else (1, 0)
    out, err = ended[at]
    path = tmp_path / f"run-{at}"
    assert out.splitlines()[-1] == str(path)
    assert "only watches this model: the script registered its own communication hook own_hook" in err
    records = RunReader(path).poll()
    assert Counter(record.rank for record in records)[0] == Counter(record.rank for record in records)[1] >= 4 * STEPS
    summary = json.loads((path / "summary.json").read_text())
    assert summary["world_size"] == 2

    out, err = ended[other]
    assert out.splitlines() == [f"True {STEPS}"]
    assert "the run is recorded on the host of rank 0; here ran rank 1" in err
    assert not (tmp_path / f"run-{other}").exists()
