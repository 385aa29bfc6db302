"""`ringside run --on-verdict --metrics-port` on real ranks: an alert fires, and it is over when its cause is."""

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.monitor.hook_server import hook_server

from ringside.monitor.run.directory import RunReader
from ringside.monitor.verdict import OWN_TIME_KINDS

from . import launched

pytest.importorskip("torch")
pytest.importorskip("prometheus_client")


HOSTILE = 'x"} 1\nringside_steps_total 7\n$(touch owned)`touch owned`;touch owned'


WRITER = "import sys; open(sys.argv[1], 'ab').write(sys.stdin.buffer.read())"


def writer(path):
    """A command that appends what it reads to a file."""
    return shlex.join([sys.executable, "-c", WRITER, str(path)])


def run(tmp_path, command, script, *words, name="run", **environ):
    script = Path(__file__).parent / "scripts" / script
    environ = {"no_proxy": "127.0.0.1", "PAGES": str(tmp_path), **environ}
    path = tmp_path / name
    ended = command("run", "--run-dir", path, *words, "--nproc-per-node=2", script, **environ)
    return *ended, path


def value(page, series):
    return float(re.search(rf"^{re.escape(series)} (\S+)$", page, re.MULTILINE)[1])


def injected(verdict):
    """Whether a verdict is on what the script did to rank 1: three times the work."""
    return verdict["ranks"] == [1] and verdict["since_step"] > 60 and verdict["excess_ratio"] > 0.5


def active(page):
    return [kind for kind in OWN_TIME_KINDS if f'ringside_verdict_active{{kind="{kind}",rank="1"}}' in page]


def recorded(path, rank, steps):
    """Own seconds of a rank in its first steps, from the run directory."""
    records = RunReader(path).poll()
    return sum(record.own_seconds for record in records if record.rank == rank and record.step < steps)


@pytest.mark.noisy
def test_an_alert_fires_and_is_over_when_the_fault_is(tmp_path, command):
    with hook_server() as server:
        hooks = f"{server.url}\n{writer(tmp_path / 'told')}"
        status, _, err, path = run(
            tmp_path, command, "slowed.py", "--on-verdict", hooks, "--metrics-port=0", name=HOSTILE
        )
        told = server.rest()
    assert status == 0, err
    assert "training goes on" not in err
    # What the machine did to it before or after may have become alerts too, or the beginning of this one.
    over = next(a for a in told if a["status"] == "resolved" and injected(a["verdict"]))
    firing = next(a for a in told if a["fingerprint"] == over["fingerprint"])
    assert (firing["status"], firing["severity"], over["reason"]) == ("firing", "warning", "repaired")
    assert {firing["kind"], over["kind"]} <= OWN_TIME_KINDS
    assert over["verdict"]["evidence"]["until_step"] > over["verdict"]["since_step"]
    told = [a for a in told if a["fingerprint"] == over["fingerprint"]]
    assert over["ended_unix"] > over["started_unix"]
    assert (firing["run"], firing["run_dir"]) == (HOSTILE, str(path))
    written = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert [a for a in written if a["fingerprint"] == over["fingerprint"]] == told
    during, after = ((tmp_path / name).read_text() for name in ("firing.txt", "over.txt"))
    assert active(during)
    assert not active(after)
    assert sum(value(after, f'ringside_verdicts_total{{kind="{kind}"}}') for kind in OWN_TIME_KINDS) >= 1
    assert value(after, "ringside_cost_rank_seconds_total") > 0
    assert value(after, "ringside_steps_total") > value(during, "ringside_steps_total") > 80
    for rank in (0, 1):
        seconds = value(after, f'ringside_rank_own_seconds_total{{rank="{rank}"}}')
        assert seconds == pytest.approx(recorded(path, rank, int(value(after, "ringside_steps_total"))), rel=1e-6)
        assert seconds > value(during, f'ringside_rank_own_seconds_total{{rank="{rank}"}}') > 0
    assert r'run="x\"} 1\nringside_steps_total 7\n$(touch owned)`touch owned`;touch owned"' in during
    assert not list(tmp_path.rglob("owned"))
    if shutil.which("promtool"):
        checked = subprocess.run(["promtool", "check", "metrics"], input=during, text=True, capture_output=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_rank_that_was_killed_is_told_by_the_launcher_and_a_taken_port_once(tmp_path, command):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        hook = f"--on-verdict={writer(tmp_path / 'told')}"
        status, _, err, path = run(tmp_path, command, "killed.py", hook, f"--metrics-port={port}")
    assert status == 1
    assert err.count(f"port {port} at 127.0.0.1 is not available") == 1
    assert launched.summary(path)["steps"] > 0
    # What the machine did to a rank before may have become an alert of its own.
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    # Rank 0 may have told of the death, or died of it with the word in its mouth: the launcher tells it again.
    alert, *again = [each for each in told if each["kind"] not in OWN_TIME_KINDS]
    assert [each["fingerprint"] for each in again] == [alert["fingerprint"]] * len(again)
    assert len(again) <= 1
    assert (alert["status"], alert["kind"], alert["ranks"]) == ("firing", "dead_rank", [1]), err
    assert alert["severity"] == "critical"


@pytest.mark.parametrize(
    ("flag", "value", "why"),
    [
        ("--on-verdict", "page 'me", "close the quotes"),
        ("--on-verdict", "https://", "needs a host"),
        ("--metrics-port", "99999", "no port"),
        ("--metrics-port", "0.0.0.0:9464", "RINGSIDE_METRICS_TOKEN"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(tmp_path, command, flag, value, why):
    status, out, err, path = run(tmp_path, command, "killed.py", flag, value)
    assert (status, out) == (2, "")
    assert why in err
    assert len(err.splitlines()) == 1
    assert not path.exists()
