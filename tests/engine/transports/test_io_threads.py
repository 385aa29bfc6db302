"""Gloo's threads of our groups wait for their turn; those of the user's own groups are left as they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch.distributed as dist
from tests.pytorch.groups import LIMIT_S, communicator, meeting_point, process_group
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")


def policies() -> list[int]:
    """Return the scheduling policies of this process's Gloo threads."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text().startswith("gloo")]
    return sorted(os.sched_getscheduler(int(task.name)) for task in tasks)


def with_and_without(path: str) -> tuple[list[int], list[int]]:
    with process_group(f"{path}.plain", 2):
        plain = policies()
        dist.barrier()  # who leaves while another still connects ends that one's making
    with communicator(path, (0, 1)):
        return plain, policies()


def test_threads_of_ours_do_not_push_in_and_those_of_others_are_left_alone():
    with meeting_point() as path:
        for plain, both in on_ranks(2, with_and_without, path, limit_s=LIMIT_S):
            assert plain
            assert set(plain) == {os.SCHED_OTHER}
            assert both.count(os.SCHED_OTHER) == len(plain)
            assert both.count(os.SCHED_BATCH) >= 2  # for messages, and for last words
