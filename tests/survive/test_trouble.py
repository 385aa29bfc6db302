"""Real workers in trouble that is not a death: strangers, two jobs with one name, a hopeless rank, a full disk."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.support import zygote
from tests.survive.herd import run_isolated

pytest.importorskip("torch")

SCRIPT = str(Path(__file__).with_name("trouble.py"))
REFUSED = "SystemExit: 77"


def lines(told, rank, word):
    """Return what a rank logged that has a word in it."""
    return [line for line in told["logs"][str(rank)] if word in line]


def test_strangers_and_another_job_are_refused_by_name_and_a_hopeless_rank_is_drained():
    out = run_isolated(SCRIPT, "strangers", "twice", "drain", limit_s=150)
    strangers, twice, drain = map(json.loads, out.splitlines())

    assert (strangers["wrong"], strangers["errors"]) == ([], [REFUSED] * 2)
    (model,), (code,) = (lines(strangers, rank, "is refused") for rank in (1, 2))
    assert "rank 1 is refused" in model
    assert "the model (" in model
    assert "the script (counting.py" in code
    assert strangers["left"] == {"0": ""}

    assert (twice["first"]["wrong"], twice["first"]["errors"]) == ([], [])
    assert twice["first"]["left"] == {"0": "", "1": ""}
    for other in twice["others"]:
        assert other["errors"] == [REFUSED] * 2
        assert [len(lines(other, rank, "runs already")) for rank in (0, 1)] == [1, 1]

    assert (drain["wrong"], drain["errors"]) == ([], [])
    assert drain["left"] == {"0": "", "1": "", "2": ""}  # the third waited, and has the final state of the others
    went = [line.partition(": ")[2] for line in lines(drain, 0, " go on with step ")]
    assert any(line.startswith("ranks 0 and 1 go on") for line in went)
    assert went[-1] == "ranks 0-2 go on with step 30"


def test_training_goes_on_when_the_disk_is_full_and_the_checkpoint_before_stays(tmp_path):
    apart = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    small = f"mount -t tmpfs -o size=512k none {tmp_path}"
    if subprocess.run([*apart, "sh", "-c", small], capture_output=True).returncode:
        pytest.skip("needs a file system of its own: this user may not mount one")
    root = Path(__file__).resolve().parents[2]
    command = f"{small} && exec {zygote.python()} {SCRIPT} full --disk {tmp_path}"
    environ = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*apart, "sh", "-c", command], capture_output=True, text=True, timeout=150, env=environ)
    assert done.returncode == 0, done.stderr[-4000:]
    full = json.loads(done.stdout)
    assert (full["wrong"], full["errors"]) == ([], [])
    assert (full["newest"], full["kept"]) == (5, ["filler", "step-00000005"])
    assert len(lines(full, 0, "No space left")) >= 2
    assert len(lines(full, 0, "WARNING no checkpoint")) == 1
