"""Makes a process group for torch.distributed, which calls this on every rank of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ringside.errors import UnsupportedError
from ringside.pytorch.process_group import torch_patches
from ringside.pytorch.process_group.group import RingsideGroup

NEEDED = ("_set_default_backend", "_register_backend", "shutdown", "abort")


def make(options: Any, pg_options: Any) -> RingsideGroup:
    """Make a group.

    Args:
        options: torch's: `store`, `group_rank`, `group_size` and `timeout`.
        pg_options: The caller's; they are for other backends and mean nothing here.

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
    torch_patches.apply()
    return RingsideGroup(options.store, options.group_rank, options.group_size, options.timeout)
