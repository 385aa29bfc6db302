"""Scripts run as the main program of a rank that was forked, and so has imported torch already."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from ringside.autoload.ringside_autoload import install

_kept: list[object] = []
"""Kept until the process ends: who lets go of a DDP after its group was destroyed may hang in torch, see
`tests/pytorch/training.py`."""


def run_main(words: Sequence[str], *, module: bool = False) -> None:
    """Run a script, or a module, as this process's main program.

    Args:
        words: The script's path or the module's name, and its arguments.
        module: Which of the two.
    """
    destroy = dist.destroy_process_group

    def destroy_and_keep(group: dist.ProcessGroup | None = None) -> None:
        _kept.append(dist.group.WORLD)
        destroy(group)

    dist.destroy_process_group = destroy_and_keep
    sys.argv = list(words)
    if module:
        _kept.append(runpy.run_module(words[0], run_name="__main__", alter_sys=True))
    else:
        sys.path.insert(0, str(Path(words[0]).parent))
        _kept.append(runpy.run_path(words[0], run_name="__main__"))


def launched_main(words: Sequence[str], module: bool, out: str, err: str) -> None:
    """Be a rank of `ringside run` or `ringside demo`: run its main program, and end this process as Python ends one.

    Args:
        words: See `run_main`.
        module: See `run_main`.
        out: The file to append standard output to.
        err: That of standard error.
    """
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    status = 0
    try:
        if os.environ.get("RINGSIDE_AUTOLOAD") == "1":  # what ringside/autoload/sitecustomize.py does
            install()
        run_main(words, module=module)
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
