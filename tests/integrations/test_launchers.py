"""The Slurm script and the Kubeflow manifest: checked as far as that goes without a cluster; their commands train."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support import zygote
from tests.support.waiting import free_port

pytest.importorskip("torch")
from tests.integrations.frameworks import EXAMPLES, LIMIT_S

from ringside.monitor.run.directory import RunReader

SBATCH = EXAMPLES / "slurm_train.sbatch"
MANIFEST = EXAMPLES / "kubeflow_trainjob.yaml"
STEPS = 12

# Stands for Slurm's: runs the command once per node, all at the same time, and fails when one does.
SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do echo "$1" >> "$SRUN_FLAGS"; shift; done
pids=()
for ((node = 0; node < SLURM_NNODES; node++)); do SLURM_NODEID=$node "$@" & pids+=($!); done
for pid in "${pids[@]}"; do wait "$pid" || exit 1; done
"""
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames nodes[1-2]" ] && printf '127.0.0.1\\nelsewhere.invalid\\n'
"""


def environ(**more: str) -> dict[str, str]:
    """Return this process's environment without a job's, and with what keeps two ranks quiet."""
    foreign = ("RANK", "WORLD_SIZE", "RINGSIDE", "RINGSIDE_RUN_DIR", "RANKS_PER_NODE", "SLURM_GPUS_ON_NODE")
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    return {**kept, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1", **more}


def ranks_and_steps(run: Path) -> set[tuple[int, int]]:
    return {(record.rank, record.step) for record in RunReader(run).poll()}


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """An environment in which sbatch seems to have started a job of two nodes, both of them here."""
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join((str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]))
    return environ(
        PATH=path, SLURM_JOB_ID=str(50000 + free_port() - 10000), SLURM_NNODES="2", SLURM_JOB_NODELIST="nodes[1-2]",
        SLURM_SUBMIT_DIR=str(tmp_path), SRUN_FLAGS=str(tmp_path / "srun-flags"),
    )  # fmt: skip


def sbatch(slurm: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SBATCH), *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=slurm, cwd=slurm["SLURM_SUBMIT_DIR"]
    )


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.long
def test_slurm_trains_on_all_nodes(slurm: dict[str, str], tmp_path: Path) -> None:
    job = slurm["SLURM_JOB_ID"]
    done = sbatch(slurm, str(EXAMPLES / "train_ddp.py"), "--steps", str(STEPS))
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / f"slurm-{job}"
    assert f"recorded in {run}" in done.stdout
    assert ranks_and_steps(run) == {(rank, step) for rank in range(2) for step in range(STEPS)}
    assert (tmp_path / "srun-flags").read_text().split() == ["--ntasks-per-node=1", "--kill-on-bad-exit=1"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_slurm_without_a_script_says_so(slurm: dict[str, str]) -> None:
    done = sbatch(slurm)
    assert done.returncode == 2
    assert done.stderr.startswith("which script?")


def manifest() -> Any:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install pyyaml")
    return yaml.safe_load(MANIFEST.read_text())


def test_the_manifest_fits_kubeflows_schema() -> None:
    kubeflow = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="Kubeflow's schema is not installed: pip install kubeflow-trainer-api"
    )
    told = manifest()
    read = kubeflow.TrainerV1alpha1TrainJob.from_dict(told)
    assert read.to_dict() == told  # a field that the schema does not know would be gone
    assert read.spec.trainer.num_nodes == 2
    with pytest.raises(ValueError, match="runtimeRef"):
        kubeflow.TrainerV1alpha1TrainJob.from_dict({**told, "spec": {"trainer": told["spec"]["trainer"]}})


def test_the_manifests_command_trains(tmp_path: Path) -> None:
    trainer = manifest()["spec"]["trainer"]
    (tmp_path / "train_ddp.py").write_text((EXAMPLES / "train_ddp.py").read_text())
    words: list[str] = trainer["command"] + trainer["args"]
    python, command = words[0], words[1:]
    assert python == "python"
    assert command[-2:] == ["--steps", "1000"]
    # What the Trainer's torch plugin sets in every pod; here two pods of one rank each.
    run = tmp_path / "run"
    told = environ(
        PET_NNODES=str(trainer["numNodes"]), PET_NPROC_PER_NODE="1", PET_MASTER_ADDR="127.0.0.1",
        PET_MASTER_PORT=str(free_port()), PYTHON_EXEC=zygote.python(),
        **{variable["name"]: str(run) for variable in trainer["env"]},
    )  # fmt: skip
    pods = [
        subprocess.Popen(
            [sys.executable, *command[:-1], str(STEPS)], cwd=tmp_path, env={**told, "PET_NODE_RANK": str(node)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for node in range(trainer["numNodes"])
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for pod in pods:
            stack.enter_context(pod)
            stack.callback(pod.kill)
        ended = [(pod.communicate(timeout=LIMIT_S), pod.returncode) for pod in pods]
    assert [status for _, status in ended] == [0, 0], ended
    assert ranks_and_steps(run) == {(rank, step) for rank in range(2) for step in range(STEPS)}


def test_the_pages_links_lead_somewhere() -> None:
    page = EXAMPLES.parent / "docs" / "integrations.md"
    links = re.findall(r"\]\((?!https)([^)#]+)", page.read_text())
    assert len(links) > 6
    assert [link for link in links if not (page.parent / link).exists()] == []
