"""Four real workers, real memory, real signals: whatever is killed or stopped, every sample counts exactly once."""

import json
import signal
from pathlib import Path

import pytest
from tests.survive.herd import run_isolated

pytest.importorskip("torch")

CASES = {
    "nobody dies": {"trap": ""},
    "killed in mid all-reduce": {"trap": "kill:rank=1,step=3,phase=mid_chunk"},
    "the leader dies with all acknowledgements, and again while it comes back": {
        "trap": "kill:rank=0,step=5,phase=before_decide;kill:rank=0,epoch=2,phase=rejoin"
    },
    "one dies that wrote COMMIT and told nobody, another with COMMIT read and not applied": {
        "trap": "kill:rank=0,step=4,phase=after_decide;kill:rank=2,step=4,phase=before_apply",
        "reproducible": False,
    },
    "stopped after it acknowledged": {"trap": "stop:rank=2,step=5,phase=after_ack"},
    "the leader of four hosts is stopped with all acknowledgements, and comes back as a zombie": {
        "trap": "stop:rank=0,step=5,phase=before_decide",
        "hosts": 4,
        "reproducible": False,
    },
    "one of two hosts loses a worker, sums in the order of micro-batches": {
        "trap": "kill:rank=3,step=5,phase=after_send",
        "hosts": 2,
    },
    "all die, and go on from a checkpoint": {
        "trap": ";".join(f"kill:rank={rank},step=17,phase=after_send" for rank in range(4)),
        "checkpoints": 5,
    },
}


def test_every_sample_counts_exactly_once_whoever_dies():
    script = str(Path(__file__).with_name("real_cases.py"))
    out = run_isolated(script, *(json.dumps(case) for case in CASES.values()), limit_s=150)
    found = dict(zip(CASES, map(json.loads, out.splitlines()), strict=True))
    assert {name: told["wrong"] for name, told in found.items()} == {name: [] for name in CASES}
    for name, told in found.items():
        kills = [trap for trap in CASES[name]["trap"].split(";") if trap.startswith("kill:") and "epoch" not in trap]
        assert len(told["deaths"]) >= len(kills), name
        assert {signum for _, signum in told["deaths"]} <= {signal.SIGKILL}
    without = found["killed in mid all-reduce"]["members"]
    assert [0, 2, 3] in without
