"""What torch does without us, and what a user of Ringside would ask us about."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).parent / "gloo_at_exit.py"


def no_core_dump() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@pytest.mark.skipif(not hasattr(torch._C, "_stash_obj_in_tls"), reason="this torch keeps no context of a backward")
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python ends no thread that wants its lock too late")
def test_torch_alone_aborts_where_gloo_lets_go_of_a_backward_while_the_interpreter_ends(tmp_path: Path) -> None:
    """When this fails torch has mended it: then docs/faq.md need not speak of it any more, nor test_run.py beware."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("RINGSIDE", "PYTHONPATH"))}
    environ |= {"TMPDIR": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, str(SCRIPT)]
    for _ in range(3):  # on a busy machine the thread now and then comes after the interpreter's end
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=100, preexec_fn=no_core_dump, check=False
        )
        if done.returncode:
            break
    assert done.returncode == -signal.SIGABRT, done
    assert "terminate called without an active exception" in done.stderr
