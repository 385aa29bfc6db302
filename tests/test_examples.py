"""Every example runs as its first lines say, and prints what it should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import zygote
from tests.support.ranks import run_script

from ringside import _core
from ringside.lab import Lab
from ringside.monitor.run.directory import RunReader

pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def torchrun(*arguments: str, directory: Path, python: str = "") -> str:
    """Run torchrun with two ranks in `directory` and return what they wrote to stdout.

    Args:
        arguments: Its own.
        directory: Where.
        python: What runs it and its ranks; "": they are forked.
    """
    python = python or zygote.python()
    command = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *arguments]
    quiet = {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
    environ = {**os.environ, **quiet, "PYTHON_EXEC": python}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=directory, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_examples_are_run_here() -> None:
    elsewhere = "integrations_"  # tests/integrations/ runs these
    assert {path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith(elsewhere)} == {
        "train_ddp.py",
        "between_hosts.py",
        "numpy_all_reduce.py",
        "numpy_kmeans.py",
        "numpy_poisson.py",
        "process_group_fsdp.py",
        "process_group_tensor_parallel.py",
        "survive.py",
    }


def test_train_ddp(tmp_path: Path) -> None:
    """The one that is started as a user starts it."""
    words = (str(EXAMPLES / "train_ddp.py"), "--steps", "60")
    out = torchrun(*words, directory=tmp_path, python=sys.executable).splitlines()
    first, last = (float(word) for word in out[0].removeprefix("loss ").split(" -> "))
    assert last < 0.5 * first
    if _core.available():
        assert "ringside/" in out[1]
        assert "gloo" not in out[1]
    run = tmp_path / out[2].removeprefix("recorded in ")
    assert run.parent.name == "runs"
    assert len(RunReader(run).poll()) == 2 * 60
    assert (run / "report.html").exists()


def test_survive_under_keepers(tmp_path: Path) -> None:
    """Of keepers and their workers the one that is started as a user starts it."""
    arguments = ("-m", "ringside.survive", str(EXAMPLES / "survive.py"), "--steps", "40")
    first, second = torchrun(*arguments, directory=tmp_path, python=sys.executable).splitlines()
    before, after = (float(word) for word in first.removeprefix("loss ").split(" -> "))
    assert after < before
    assert second == "40 steps, 2512 samples, each once"


@pytest.mark.native
def test_between_hosts_on_one_host(tmp_path: Path) -> None:
    assert torchrun(str(EXAMPLES / "between_hosts.py"), directory=tmp_path).splitlines() == [
        "2 ranks on 1 hosts",
        "sum 1, mean over samples 1.5238, even ranks [0]",
        "4194304 bytes: shared memory, all 2 ranks are on one host",
    ]


def test_between_hosts_in_the_lab(tmp_path: Path) -> None:
    if reason := Lab.unavailable():
        pytest.skip(reason)
    with Lab(hosts=2, ranks_per_host=2) as lab:
        env = {"RINGSIDE_SELECTION": "fresh"}
        result = lab.run([zygote.python(), str(EXAMPLES / "between_hosts.py")], env, timeout_s=90).check()
    lines = result.ranks[0].stdout.splitlines()
    assert lines[:2] == ["4 ranks on 2 hosts", "sum 6, mean over samples 2.6087, even ranks [0, 2]"]
    assert lines[2].startswith("4 MiB: ")


@pytest.mark.native
def test_process_group_fsdp(tmp_path: Path) -> None:
    loss, *rest = torchrun(str(EXAMPLES / "process_group_fsdp.py"), directory=tmp_path).splitlines()
    first, last = (float(word) for word in loss.removeprefix("loss ").split(" -> "))
    assert last < 0.5 * first
    assert rest == ["carried by ringside", "reduce-scatters 60"]


@pytest.mark.native
def test_process_group_tensor_parallel(tmp_path: Path) -> None:
    out = torchrun(str(EXAMPLES / "process_group_tensor_parallel.py"), directory=tmp_path).splitlines()
    assert out == ["same as on one rank: True", "carried by ringside", "all-reduces: True"]


@pytest.mark.core
@pytest.mark.native
def test_numpy_all_reduce(tmp_path: Path) -> None:
    script = str(EXAMPLES / "numpy_all_reduce.py")
    expected = ["2 ranks", "sum [3.0, 3.0, 3.0]", "max 1.0 1.0", "mean [0.0, 0.5, 1.0, 1.5]", "meanwhile 499500"]
    assert torchrun("--no-python", sys.executable, script, directory=tmp_path).splitlines() == expected


@pytest.mark.native
def test_numpy_all_reduce_alone(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "numpy_all_reduce.py")], capture_output=True, text=True, timeout=60, env=environ
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["1 ranks", "sum [1.0, 1.0, 1.0]"]


@pytest.mark.native
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_numpy_poisson(ranks: int) -> None:
    ended = run_script(ranks, EXAMPLES / "numpy_poisson.py")
    assert [(one.status, one.err) for one in ended] == [(0, "")] * ranks
    assert ended[0].out.splitlines() == [
        f"{ranks} ranks, a grid of 240 x 240",
        "solved with mean 0.0",
        "highest at 60 60 lowest at 180 100",
    ]


@pytest.mark.native
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_numpy_kmeans(ranks: int) -> None:
    ended = run_script(ranks, EXAMPLES / "numpy_kmeans.py")
    assert [(one.status, one.err) for one in ended] == [(0, "")] * ranks
    assert ended[0].out.splitlines() == [
        f"points per rank {[3000 * (rank + 1) for rank in range(ranks)]}",
        "centres (0, 0) (8, 0) (0, 8) (8, 8) (4, 16) (16, 4)",
        "mean distance 0.63",
    ]
