"""A real rank that is held back while `ringside run` watches: it is named, and so is what holds it back."""

import json

import msgspec
import pytest
from tests.quotas import quota_or_skip

from ringside.monitor import Verdict
from ringside.monitor.cause import explain
from ringside.monitor.judge import judge
from ringside.monitor.run_directory import RunReader
from ringside.monitor.table import tabulate

from . import launched

pytest.importorskip("torch")

pytestmark = pytest.mark.noisy

BEGIN = 48

HELD_BACK = """
import os, time
import torch, torch.distributed as dist
from torch.distributed import PrefixStore
from torch.nn.parallel import DistributedDataParallel as DDP
from ringside.demo.agreement import Agreement
from ringside.sync import session as sessions

class Works(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)
    def forward(self, x):
        time.sleep(0.03)  # most of the step needs no CPU: other people's load disturbs little
        until = time.thread_time() + 0.004
        while time.thread_time() < until:
            sum(range(1000))
        return self.inner(x)

def decide():
    found = [verdict for verdict in session.verdicts if verdict.ranks == [1] and verdict.detected_step > BEGIN]
    return min((verdict.detected_step for verdict in found), default=LIMIT) + 8

BEGIN, LIMIT = int(os.environ["BEGIN"]), 88
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(Works())
session = sessions.current()
store = PrefixStore("test", dist.distributed_c10d._get_default_store())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
agreement = Agreement(store, rank, LIMIT, decide)
step = 0
while agreement.goes_on(step):
    if rank == 1 and step == BEGIN:
        open(os.environ["HELD_IN"], "w").write(str(os.getpid()))
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
if rank == 1:
    open(os.environ["FREE_IN"], "w").write(str(os.getpid()))
session.end()
dist.destroy_process_group()
"""


def judged(path, rank, *, since_step):
    """The verdict on a rank that is known to be slow since a step, from what a run recorded."""
    table = tabulate(RunReader(path).iterate(), 2)
    episode = table.between(since_step)
    verdict = judge(rank, episode["own_seconds"], None, since_step=since_step, detected_step=int(table.steps[-1]))
    return explain(verdict, episode, table.before(since_step))


def test_a_throttled_rank_is_named_with_its_quota(tmp_path):
    (tmp_path / "train.py").write_text(HELD_BACK)
    with quota_or_skip(cpus=0.04) as quota:
        status, _, err = launched.run(
            *("run", "--run-dir", tmp_path / "run", "--nproc-per-node=2", tmp_path / "train.py"),
            BEGIN=str(BEGIN),
            HELD_IN=str(quota.members),
            FREE_IN=str(quota.home),
        )
    assert status == 0, err
    # On a machine that is full of others' work the detector may need longer than this run lasts. The cause is told from
    # the same records either way; a verdict of the run itself has to have it, too.
    named = [v for v in launched.summary(tmp_path / "run")["verdicts"] if v["ranks"] == [1] and v["since_step"] > 40]
    told = [msgspec.convert(content, Verdict) for content in named] or [judged(tmp_path / "run", 1, since_step=BEGIN)]
    assert [verdict.kind for verdict in told] == ["slow_rank"]
    (verdict,) = told
    assert "its container was throttled " in verdict.cause, verdict
    assert "quota 0.04 CPUs" in verdict.cause
    evidence = verdict.evidence
    # What else runs on the machine may take more of its time than the quota, which is told all the same.
    if evidence["throttled_ratio"] > evidence.get("waited_for_cpu_ratio", 0.0):
        assert verdict.cause.startswith("its container was throttled ")
        assert "cpu.max" in verdict.advice
    assert evidence["throttled_ratio"] > 0.1
    assert evidence["others_throttled_ratio"] == 0
    assert evidence["quota_cpus"] == pytest.approx(0.04)
    # The healthy rank records no throttling, and neither of the two was ever asked on the path of a step.
    known = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    shown = [one for one in known if "vitals" in one]
    assert {one["rank"] for one in shown} == {0, 1}
    assert all("throttled_seconds" not in one["vitals"] for one in shown if one["rank"] == 0)
    assert max(one["vitals"].get("throttled_seconds", 0) for one in shown if one["rank"] == 1) > 0
