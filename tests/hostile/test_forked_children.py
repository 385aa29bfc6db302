"""A forked child of a rank comes and goes, and nothing that is its parent's changes."""

from __future__ import annotations

import atexit
import gc
import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from tests.pytorch.training import ddp_ranks, group, small_attachment, steps  # noqa: E402

import ringside  # noqa: E402

pytestmark = pytest.mark.native


def forked(port: int, directory: str) -> dict[str, Any]:
    path = Path(directory)
    with group(port) as rank:
        model, attachment, optimizer = small_attachment(run_dir=path)
        session = attachment.session
        assert session is not None
        assert session.watch is not None
        steps(model, optimizer, rank, 3)
        page = session.watch.board.view(rank)
        dist.barrier()
        before = {field: page.number(field) for field in ("left", "entered", "synced")}
        child = os.fork()
        if child == 0:
            try:
                # A child of a training rank may well train something of its own, log, and clean up.
                small = torch.nn.Linear(2, 2)
                small(torch.ones(1, 2)).sum().backward()
                torch.optim.SGD(small.parameters(), lr=0.1).step()
                ringside.log_step(loss=1.0)
                session.event("child", why="fork")
                session.watch.board.entered(1)
                session.watch.board.waiting()
                attachment.detach()
                del model, optimizer
                gc.collect()
                atexit._run_exitfuncs()  # as at the end of an ordinary process
            except BaseException:
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        after = {field: page.number(field) for field in before}
        dist.barrier()
        steps(model, optimizer, rank, 2)
        entered = page.number("entered")
        counters = attachment.counters
        session.end()
        events = (path / "events.jsonl").read_text() if rank == 0 else ""
        return {
            "status": status,
            "same": before == after and before["left"] == 0,
            "goes on": entered > after["entered"] and all(name.startswith("ringside/") for name in counters),
            "event of the child": '"child"' in events,
            "summary": rank != 0 or (path / "summary.json").exists(),
        }


def test_a_child_that_ends_changes_nothing_of_its_parents(tmp_path: Path) -> None:
    for found in ddp_ranks(2, forked, str(tmp_path / "run")):
        assert found == {"status": 0, "same": True, "goes on": True, "event of the child": False, "summary": True}
