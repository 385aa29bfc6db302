"""The program that plays NCCL (`nccl_harness.cpp`) and the plugin that records it (`nccl_recorder.cpp`), built once.

And what was played, by the program's own account and as the ring has it.
"""

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

import numpy as np
import pytest

from ringside.monitor.nccl.calls import Calls, Joined
from ringside.monitor.nccl.ring import PREFIX, RecordedCommunicator, Ring

CORE = Path(__file__).resolve().parents[2] / "src" / "ringside" / "_core"
HERE = Path(__file__).parent
LIBRARY = "libnccl-profiler-ringside.so"


@functools.cache
def _build(source: str, *words: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="ringside-harness-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = ["c++", "-std=c++17", "-O1", f"-I{CORE}", *words, str(HERE / source), "-o", str(folder / "built")]
    subprocess.run([*command, "-ldl", "-pthread"], check=True, timeout=120)
    return folder / "built"


def harness() -> Path:
    """Return the program; the test is skipped where nothing can build it."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    return _build("nccl_harness.cpp")


def recorder() -> Path:
    """Return the recorder; the test is skipped where nothing can build it."""
    harness()
    return _build("nccl_recorder.cpp", "-fPIC", "-shared")


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


def ring_in(folder: Path) -> Ring:
    (path,) = folder.glob(f"{PREFIX}*")
    return Ring(path)


def joined(ring: Ring) -> Joined:
    return Calls().add(ring.drain(), time.monotonic_ns(), is_last=True)


def named(ring: Ring, number: int) -> RecordedCommunicator:
    communicator = ring.communicator(int(number))
    assert communicator is not None
    return communicator


def read_calls(ring: Ring, calls: np.ndarray) -> dict[tuple[int, str, int], tuple[int, int]]:
    """Return as `played_calls` does what the ring's reader says."""
    return {
        (named(ring, call["communicator"]).id, call["func"].decode(), int(call["number"])): (
            int(call["arrived_gpu_ns"]),
            int(call["ended_gpu_ns"]),
        )
        for call in calls
    }
