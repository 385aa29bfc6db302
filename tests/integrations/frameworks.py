"""The examples of frameworks on two ranks, as torchrun or `ringside run` starts them, and what they recorded."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support import zygote

from ringside import _core
from ringside.monitor.run.directory import RunReader
from ringside.monitor.run.records import StepRecord

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
LIMIT_S = 170


@dataclass(frozen=True)
class Trained:
    """What a training wrote and recorded."""

    out: str
    err: str
    records: list[StepRecord]

    @property
    def carried_by(self) -> str:
        """What rank 0 says of who carried its gradients."""
        return next(line for line in self.out.splitlines() if line.startswith("gradients reduced by"))


def train(script: Path, run: Path, *, steps: int, start: tuple[str, ...] = (), **environ: str) -> Trained:
    """Train `steps` steps on two ranks and return what was recorded in `run`.

    Args:
        script: What trains.
        run: The run directory.
        steps: How many.
        start: What is started; default: a torchrun that is forked, as ranks are in any case.
        environ: More of the environment.
    """
    python = sys.executable if start else zygote.python()
    command = [python, *(start or TORCHRUN), "--nproc-per-node", "2", str(script), "--steps", str(steps)]
    quiet = {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1", "RINGSIDE_RUN_DIR": str(run)}
    quiet["PYTHON_EXEC"] = zygote.python()
    without = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "RINGSIDE")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, cwd=run.parent, env={**without, **quiet, **environ}
    )
    assert done.returncode == 0, done.stderr
    return Trained(done.stdout, done.stderr, RunReader(run).poll() if run.exists() else [])


def check(trained: Trained, steps: int) -> None:
    """Every step of both ranks is recorded once, with one synchronisation, and our engine carried its gradients."""
    seen = sorted((record.step, record.rank) for record in trained.records)
    assert seen == [(step, rank) for step in range(steps) for rank in range(2)]
    assert {record.collectives for record in trained.records} == {1}
    assert all(record.payload_bytes > 0 for record in trained.records)
    if _core.available():
        assert "ringside/" in trained.carried_by
        assert "gloo" not in trained.carried_by
    assert "ringside only watches" not in trained.err or not _core.available()


def entry_points() -> dict[str, dict[str, str]]:
    """Return the entry points that pyproject.toml promises, by group."""
    groups: dict[str, dict[str, str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    return groups


def installed_with_entry_points(site: Path) -> dict[str, str]:
    """Return the environment in which Lightning finds the entry points, though this checkout was installed before."""
    groups = entry_points()
    if all(any(e.name == "ringside" for e in importlib.metadata.entry_points(group=group)) for group in groups):
        return {}
    info = site / "ringside_of_this_checkout-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ringside-of-this-checkout\nVersion: 0\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in table.items()) for group, table in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))}
