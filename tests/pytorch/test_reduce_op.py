"""`op` is a name or torch's `ReduceOp`, wherever a communicator takes one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from tests.support.ranks import communicator, on_ranks

from ringside.engine.dtypes import OPS, op_name
from ringside.errors import UsageError


def test_each_of_torchs_is_known_by_its_name() -> None:
    names = [name for name in dist.ReduceOp.RedOpType.__members__ if name != "PREMUL_SUM"]
    assert sorted(op_name(getattr(dist.ReduceOp, name)) for name in names) == sorted(OPS)


@pytest.mark.parametrize("op", [dist.ReduceOp.PREMUL_SUM, dist._make_nccl_premul_sum(2.0)])
def test_one_that_carries_a_factor_is_refused(op: Any) -> None:
    with pytest.raises(UsageError, match=r"PREMUL_SUM.*give op='sum' and scale="):
        op_name(op)


@pytest.mark.parametrize("op", ["product", "SUM", 0, None, ["sum"]])
def test_what_names_no_reduction_is_refused(op: Any) -> None:
    with pytest.raises(UsageError, match="unknown reduction"):
        op_name(op)


def reduced() -> list[Any]:
    with communicator() as comm:
        x = np.arange(4.0) + comm.rank
        results = [
            comm.all_reduce(x.copy(), dist.ReduceOp.MAX),
            comm.all_reduce(x.copy(), dist.ReduceOp.AVG, weights=1.0),
        ]
        results += [comm.reduce_scatter(x, dist.ReduceOp.PRODUCT), comm.reduce(x.copy(), 0, dist.ReduceOp.SUM)]
        return [result.tolist() for result in results]


@pytest.mark.native
def test_collectives_take_torchs() -> None:
    first, second = on_ranks(2, reduced)
    assert first == [[1.0, 2.0, 3.0, 4.0], [0.5, 1.5, 2.5, 3.5], [0.0, 2.0], [1.0, 3.0, 5.0, 7.0]]
    assert second[2] == [6.0, 12.0]
