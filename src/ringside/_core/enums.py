"""The codes that C++ and Python share: the native core's own enums.

They are declared once, in `enums.def`. Where the core is not built they are made of that file, so that ranks with and
without it mean the same by a number.

A member is an int, and its name is what users read: `DType.bfloat16`, `ReduceOp["sum"]`. What is called for every
collective takes plain ints, `int(Status.ok)`, looked up once when a module is imported.
"""

from __future__ import annotations

import re
from enum import IntEnum
from pathlib import Path as FilePath
from typing import Any

from ringside import _core

__all__ = ["Algorithm", "DType", "Kind", "Path", "ReduceOp", "Status"]


def _shared(enum: str, macro: str) -> Any:
    """Return an enum of the native core, or one that is made as the file declares it."""
    if _core.available():
        return getattr(_core.native(), enum)
    text = FilePath(__file__).with_name("enums.def").read_text(encoding="utf-8")
    names = re.findall(rf'^{macro}\(\w+, "(\w+)"\)$', text, re.MULTILINE)
    return IntEnum(enum, names, start=0, module=__name__)


Algorithm: Any = _shared("Algorithm", "ALGORITHM")
DType: Any = _shared("DType", "DTYPE")
Kind: Any = _shared("Kind", "KIND")
Path: Any = _shared("Path", "PATH")
ReduceOp: Any = _shared("ReduceOp", "REDUCE_OP")
Status: Any = _shared("Status", "STATUS")
