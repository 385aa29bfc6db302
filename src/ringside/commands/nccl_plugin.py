"""Print where NCCL's profiler plugin of Ringside lies.

With NCCL_PROFILER_PLUGIN set to it, NCCL (2.27 or newer) opens it by itself and
records its collectives in shared memory; `ringside run --nccl` does that, reads
the records and says who was late. On macOS there is none: NCCL runs on Linux.

exit status: 0 fine, 2 usage error, or there is none that NCCL can open.

examples:
  $ ringside nccl-plugin
  /usr/lib/python3/site-packages/ringside/_core/libnccl-profiler-ringside.so
  $ NCCL_PROFILER_PLUGIN=$(ringside nccl-plugin) torchrun train.py
"""

from __future__ import annotations

import argparse

from ringside import _core

HELP = "print where NCCL's profiler plugin lies"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments: none."""


def run(args: argparse.Namespace) -> int:
    """Print it."""
    print(_core.nccl_plugin())
    return 0
