"""What torch loads when it is imported, by the entry point `torch.backends` (since 2.5): so little that nobody pays.

From torch 2.14 on torch looks up the backend "ringside" by itself when somebody asks for it, so nothing of the package
is loaded here unless "gloo" is to be served by it. A torch that cannot look it up is told of it at once.
"""

import os
import sys


def register() -> None:
    """Tell torch of the backend, where it would not find it."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    finds_it = hasattr(getattr(c10d, "Backend", None), "_ensure_backend_registered")
    if finds_it and os.environ.get("RINGSIDE_AS_GLOO", "").lower() in ("", "off", "0"):
        return
    from ringside.autoload import ringside_backend

    ringside_backend.register()
