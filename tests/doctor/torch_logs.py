"""What torch writes when a job fails: of its watchdog, of torchrun, and the error file of a rank."""

from __future__ import annotations

import json
from pathlib import Path

ELASTIC = """\
E0101 failed (exitcode: -9) local_rank: 3 (pid: 77) of binary: /usr/bin/python
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2024-12-10_18:28:00
  host      : node-1
  rank      : 3 (local_rank: 1)
  exitcode  : -9 (pid: 77)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 77
============================================================
"""


def timeout(rank: int, seq: int, op: str = "ALLREDUCE") -> str:
    return (
        f"[rank{rank}]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective "
        f"operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn=466119168, NumelOut=466119168, "
        f"Timeout(ms)=600000) ran for 600060 milliseconds before timing out.\n"
    )


def standing(rank: int, enqueued: int, completed: int) -> str:
    return (
        f"[rank{rank}]:[E321 02:07:08.465150152 ProcessGroupNCCL.cpp:1664] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
        f"Exception (either an error or timeout) detected by watchdog at work: {completed + 1}, "
        f"last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}.\n"
    )


def error_file(folder: Path, rank: int, message: str, time: int) -> None:
    """Write what `torch.distributed.elastic`'s error handler writes."""
    folder.joinpath(str(rank)).mkdir(parents=True)
    content = {
        "message": {"message": message, "extraInfo": {"py_callstack": "Traceback\n  train()", "timestamp": str(time)}}
    }
    folder.joinpath(str(rank), "error.json").write_text(json.dumps(content))
