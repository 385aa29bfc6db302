"""Training that survives: a rank dies in the middle of an all-reduce, the others finish the step, no sample is lost.

`training` is the door for users; `torchrun ... -m ringside.survive train.py` starts a keeper per rank that starts its
worker anew when it dies. The rest is one idea a file: the state machine of a member (`protocol/__init__.py`, no I/O),
what carries out its instructions (`driver.py`), and what that stands on. Importing this imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringside.survive.job import Step
    from ringside.survive.state.final import final_state
    from ringside.survive.train import Training, training

__all__ = ["Step", "Training", "final_state", "training"]

_LAZY = {
    "Step": "ringside.survive.job",
    "Training": "ringside.survive.train",
    "final_state": "ringside.survive.state.final",
    "training": "ringside.survive.train",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'ringside.survive' has no attribute {name!r}")
