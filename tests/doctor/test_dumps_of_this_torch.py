"""The doctor reads what the flight recorder of the torch at hand writes, of a rank that did not come."""

from __future__ import annotations

import functools
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from tests.pytorch.groups import meeting_point  # noqa: E402
from tests.support.ranks import on_ranks, place  # noqa: E402
from tests.support.waiting import until  # noqa: E402

from ringside.doctor import examine  # noqa: E402

c10d: Any = torch._C._distributed_c10d
pytestmark = pytest.mark.skipif(
    not hasattr(c10d, "_dump_fr_trace"), reason="up to torch 2.7 the flight recorder is of collectives of NCCL alone"
)
TELLS_APART = "backend" in (getattr(c10d, "_dump_fr_trace", None).__doc__ or "")
"""Whether dumps are of one backend each."""


def all_are(where: str, store: Any) -> None:
    """Wait until all ranks are there, without a collective, which would be recorded as well."""
    store.set(f"{where}/{place().rank}", "")
    store.wait([f"{where}/{rank}" for rank in range(3)])


def stay_away(path: str, folder: str, name: str) -> None:
    """Complete three collectives, which rank 1 leaves it at, and dump."""
    from tests.pytorch.process_groups import backend  # for older torch than is tested here it skips the whole module

    with backend(path, name):
        dump = functools.partial(c10d._dump_fr_trace, **({"backend": name} if TELLS_APART else {}))
        store = dist.distributed_c10d._get_default_store()
        for _ in range(3):
            dist.all_reduce(torch.ones(3))
        if place().rank != 1:
            fourth = dist.all_reduce(torch.ones(5), async_op=True)
        all_are("where it stays", store)
        until(lambda: [entry["retired"] for entry in pickle.loads(dump())["entries"]][:3] == [True] * 3)
        Path(folder, f"rank_{place().rank}").write_bytes(dump())
        all_are("written", store)
        if place().rank == 1:
            fourth = dist.all_reduce(torch.ones(5), async_op=True)
        fourth.wait()


@pytest.mark.parametrize(
    "name",
    [
        "gloo",
        pytest.param(
            "ringside",
            marks=pytest.mark.skipif(
                hasattr(c10d, "_dump_fr_trace") and not TELLS_APART,
                reason="torch 2.15 is the first to record backends in Python",
            ),
        ),
    ],
)
def test_the_rank_that_never_came_is_named(tmp_path: Path, name: str) -> None:
    with meeting_point() as path:
        on_ranks(3, stay_away, path, str(tmp_path), name)
    later = time.time() + 60
    for dump in tmp_path.iterdir():  # as if they had waited for that long
        os.utime(dump, (later, later))
    (verdict,) = examine([tmp_path]).verdicts
    assert (verdict.kind, verdict.ranks) == ("hang", [1])
    assert f"never entered {name}:all_reduce" in str(verdict.evidence) + verdict.cause
