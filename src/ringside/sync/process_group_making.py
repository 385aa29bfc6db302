"""Makes a process group for torch.distributed, which calls this on every rank of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ringside.errors import UnsupportedError
from ringside.sync.process_group import RingsideGroup

NEEDED = ("_set_default_backend", "_register_backend", "shutdown", "abort")


def make(options: Any, wishes: Any) -> RingsideGroup:
    """Make a group.

    Args:
        options: torch's: `store`, `group_rank`, `group_size` and `timeout`.
        wishes: What the caller gave as `pg_options`; they are for other backends and mean nothing here.

    Raises:
        MismatchError, DeadlineError: As `RingsideGroup`.
        UnsupportedError: torch is too old.
    """
    missing = [name for name in NEEDED if not hasattr(dist.ProcessGroup, name)]
    if missing:
        raise UnsupportedError(
            f"the process group needs a newer torch than {torch.__version__}, whose ProcessGroup has no {missing[0]} "
            '(2.7 is the first that will do): use init_process_group("gloo") and ringside.attach(model)'
        )
    _let_monitored_barrier_through()
    return RingsideGroup(options.store, options.group_rank, options.group_size, options.timeout)


def _let_monitored_barrier_through() -> None:
    """Have `dist.monitored_barrier`, which refuses every group that is not named "gloo", take ours as well."""
    stock = c10d.monitored_barrier
    if getattr(stock, "_ringside", False):
        return

    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        own = group if group is not None else c10d._get_default_group()
        if isinstance(own, RingsideGroup):
            own.monitored_barrier(timeout, wait_all_ranks)
        else:
            stock(group, timeout, wait_all_ranks)

    monitored_barrier.__doc__, monitored_barrier._ringside = stock.__doc__, True  # type: ignore[attr-defined]
    c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier
