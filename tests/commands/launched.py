"""Helpers for tests that start `ringside demo` and `ringside run` as a user does."""

import contextlib
import json
import os
import signal
import subprocess
import sys

PATIENCE_S = 150.0


def start(*words, cwd=None, **environ):
    variables = {key: value for key, value in os.environ.items() if not key.startswith("RINGSIDE")}
    return subprocess.Popen(
        [sys.executable, "-m", "ringside", *map(str, words)],
        env={**variables, "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="surrogateescape",  # a path may be no text
        cwd=cwd,
    )


def finish(process):
    """Return (exit status, stdout, stderr); a process that does not end is ended and fails the test."""
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=30)
        process.kill()
        raise
    return process.returncode, out, err


def run(*words, **how):
    return finish(start(*words, **how))


def while_running(process, condition):
    """Return a condition to look at until it holds; it fails when the process has ended."""

    def poll():
        assert process.poll() is None, process.communicate()
        return condition()

    return poll


def has_steps(path):
    return (path / "steps.jsonl").exists() and (path / "steps.jsonl").stat().st_size > 2000


def pids(path):
    return json.loads((path / "run.json").read_text())["pids"]


def gone(path):
    """Whether all ranks of a run have ended (a zombie has)."""
    return not any(os.path.exists(f"/proc/{pid}/exe") and _runs(pid) for pid in pids(path))


def _runs(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return False


def summary(path):
    return json.loads((path / "summary.json").read_text())
