"""The program that plays NCCL (`nccl_harness.cpp`), built once, and what it says that it has played."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

CORE = Path(__file__).resolve().parents[2] / "src" / "ringside" / "_core"
HARNESS = Path(__file__).with_name("nccl_harness.cpp")
LIBRARY = "libnccl-profiler-ringside.so"


@functools.cache
def _build() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="ringside-harness-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = ["c++", "-std=c++17", "-O1", f"-I{CORE}", str(HARNESS), "-o", str(folder / "harness"), "-ldl", "-pthread"]
    subprocess.run(command, check=True, timeout=120)
    return folder / "harness"


def harness() -> Path:
    """Return the program; the test is skipped where nothing can build it."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    return _build()


def play(library: Path, folder: Path, *words: object, status: int = 0, **environ: str) -> list[list[str]]:
    """Let the program load the library and play; return the words of the lines that it prints."""
    done = subprocess.run(
        [harness(), library, *map(str, words)],
        env={**os.environ, "RINGSIDE_NCCL_DIR": str(folder), **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def play_ranks(library: Path, folder: Path, version: int, calls: int, how: str, ranks: Sequence[int]) -> None:
    """Let processes play the ranks of a job beside each other; `ranks` are their numbers in it."""
    program = harness()
    begin = time.monotonic_ns() + 500_000_000
    playing = [
        subprocess.Popen(
            [program, library, "work", str(version), str(calls), str(at), str(len(ranks)), how, str(begin)],
            env={**os.environ, "RINGSIDE_NCCL_DIR": str(folder), "RANK": str(rank)},
        )
        for at, rank in enumerate(ranks)
    ]
    assert [process.wait(timeout=120) for process in playing] == [0] * len(ranks)


def played_calls(lines: Sequence[Sequence[str]]) -> dict[tuple[int, str, int], tuple[int, int]]:
    """Return by communicator, function and number when a collective's kernels started and stopped; 0: never."""
    return {
        (int(words[1]), words[2], int(words[3])): (int(words[4]), int(words[5]))
        for words in lines
        if words[0] == "call"
    }
