"""Makes a process group for torch.distributed, which calls this on every rank of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ringside.errors import UnsupportedError
from ringside.pytorch.process_group.group import RingsideGroup
from ringside.pytorch.process_group.torch_patches import let_ours_through

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
    let_ours_through()
    return RingsideGroup(options.store, options.group_rank, options.group_size, options.timeout)
