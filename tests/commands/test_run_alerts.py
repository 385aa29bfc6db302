"""`ringside run --on-verdict --metrics-port` on real ranks: an alert fires, and it is over when its cause is."""

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys

import pytest
from tests.monitor.hook_server import hook_server

from ringside.monitor.alerts import OWN_TIME_KINDS
from ringside.monitor.run_directory import RunReader

from . import launched

pytest.importorskip("torch")
pytest.importorskip("prometheus_client")

SLOWED = """
import json, os, sys, time, urllib.request
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed import PrefixStore
from torch.nn.parallel import DistributedDataParallel as DDP
from ringside.demo.agreement import Agreement
from ringside.faults import inject, parse_fault
from ringside.sync import session as sessions

class Sleepy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)
    def forward(self, x):
        time.sleep(0.016)
        return self.inner(x)

def burn(seconds):
    began = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - began

def keep(name):
    first = json.loads((session.path / "events.jsonl").read_text().splitlines()[0])
    page = urllib.request.urlopen(first["metrics"], timeout=20).read()
    Path(os.environ["PAGES"], name).write_bytes(page)

def decide():
    # On a machine that does other things too, a rank may well be slow before it is made to.
    found = [v for v in session.verdicts if v.ranks == [1] and v.since_step > 60 and v.excess_ratio > 0.5]
    if found and not store.check(["healed"]):
        keep("firing.txt")
        store.set("healed", "1")
    if any("until_step" in v.evidence for v in found):
        keep("over.txt")
        return 0
    return LIMIT

LIMIT = 800
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(Sleepy())
session = sessions.current()
store = PrefixStore("test", dist.distributed_c10d._get_default_store())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
injector = inject(parse_fault("slow:rank=1,factor=3,from_step=80"), model, rank, burn=burn)
agreement = Agreement(store, rank, LIMIT, decide)
step = 0
while agreement.goes_on(step):
    injector.step(step)
    if rank == 1 and step > 80 and store.check(["healed"]):
        injector.remove()
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
dist.destroy_process_group()
"""

HOSTILE = 'x"} 1\nringside_steps_total 7\n$(touch owned)`touch owned`;touch owned'

KILLED = """
import os, torch, torch.distributed as dist
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
steps = Path(os.environ["PAGES"], "run", "steps.jsonl")
while True:
    if os.environ["RANK"] == "1" and steps.exists() and steps.stat().st_size > 2000:
        os.kill(os.getpid(), 9)
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

WRITER = "import sys; open(sys.argv[1], 'ab').write(sys.stdin.buffer.read())"


def writer(path):
    """A command that appends what it reads to a file."""
    return shlex.join([sys.executable, "-c", WRITER, str(path)])


def run(tmp_path, code, *words, name="run", **environ):
    (tmp_path / "train.py").write_text(code)
    environ = {"no_proxy": "127.0.0.1", "PAGES": str(tmp_path), **environ}
    path = tmp_path / name
    ended = launched.run("run", "--run-dir", path, *words, "--nproc-per-node=2", tmp_path / "train.py", **environ)
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
def test_an_alert_fires_and_is_over_when_the_fault_is(tmp_path):
    with hook_server() as server:
        hooks = f"{server.url}\n{writer(tmp_path / 'told')}"
        status, _, err, path = run(tmp_path, SLOWED, "--on-verdict", hooks, "--metrics-port=0", name=HOSTILE)
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


def test_a_rank_that_was_killed_is_told_by_the_launcher_and_a_taken_port_once(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        hook = f"--on-verdict={writer(tmp_path / 'told')}"
        status, _, err, path = run(tmp_path, KILLED, hook, f"--metrics-port={port}")
    assert status == 1
    assert err.count(f"port {port} at 127.0.0.1 cannot be had") == 1
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
def test_what_cannot_be_is_refused_before_anything_starts(tmp_path, flag, value, why):
    status, out, err, path = run(tmp_path, KILLED, flag, value)
    assert (status, out) == (2, "")
    assert why in err
    assert len(err.splitlines()) == 1
    assert not path.exists()
