"""A real rank that is held back while `ringside run` watches: it is named, and so is what holds it back."""

import json

import pytest
from tests.quotas import quota_or_skip

from . import launched

pytest.importorskip("torch")

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


@pytest.mark.noisy
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
    told = [v for v in launched.summary(tmp_path / "run")["verdicts"] if v["ranks"] == [1] and v["since_step"] > 40]
    assert [verdict["kind"] for verdict in told] == ["slow_rank"]
    (verdict,) = told
    # (Which cause comes first, this one or others' work on the same cores, is tried in monitor/test_cause.py.)
    assert "its container was throttled " in verdict["cause"], verdict
    assert "quota 0.04 CPUs" in verdict["cause"]
    evidence = verdict["evidence"]
    assert evidence["throttled_ratio"] > 0.1
    assert evidence["others_throttled_ratio"] == 0
    assert evidence["quota_cpus"] == pytest.approx(0.04)
    # The healthy rank records no throttling, and neither of the two was ever asked on the path of a step.
    known = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    shown = [one for one in known if "vitals" in one]
    assert {one["rank"] for one in shown} == {0, 1}
    assert all("throttled_seconds" not in one["vitals"] for one in shown if one["rank"] == 0)
    assert max(one["vitals"].get("throttled_seconds", 0) for one in shown if one["rank"] == 1) > 0
