"""What `nccl_recorder.cpp` writes down of NCCL's calls, played again: the plugin records of both the same.

Recordings of a real NCCL are tests/data/nccl/calls-v*.txt.gz: `python -m bench.gpu.parts plugin 2 --record FOLDER`.
"""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.native.nccl import joined, named, play, recorder, ring_in

from ringside import _core
from ringside.monitor.nccl.calls import UNKNOWN, WAITS, Joined
from ringside.monitor.nccl.ring import KIND_BITS, Records, Ring
from ringside.monitor.nccl.watch import NcclWatch

pytestmark = pytest.mark.native
VERSIONS = (4, 5, 6)
FIXTURES = sorted((Path(__file__).parents[1] / "data" / "nccl").glob("calls-v*.txt.gz"))


@pytest.fixture
def library() -> Path:
    return _core.nccl_plugin()


def record(library: Path, folder: Path, *words: object, wider: int = 0) -> tuple[list[list[str]], list[Path]]:
    """Let the harness play to the recorder, which passes it on; return what was played, and the recordings."""
    environ = {"RINGSIDE_RECORDED_PLUGIN": str(library), "RINGSIDE_RECORDED_MASK": str(wider)}
    told = play(recorder(), folder, *words, RINGSIDE_RECORD_DIR=str(folder), RANK="7", **environ)
    return told, sorted(folder.glob("calls-*.txt"))


def replay(library: Path, folder: Path, version: int, recording: Path, *words: object) -> tuple[list[list[str]], Ring]:
    """Play a recording; return what was played, and the ring."""
    folder.mkdir()
    return play(library, folder, "recorded", version, recording, *words), ring_in(folder)


def lines_of(what: str, told: list[list[str]]) -> list[list[str]]:
    return sorted(words for words in told if words[0] == what)


def events_of(ring: Ring, records: Records) -> list[tuple[Any, ...]]:
    """Return everything that records say but times of the host, with what they belong to in place of its number."""
    known: dict[int, tuple[Any, ...]] = {}
    names = [
        name for name in records.dtype.names or () if name not in ("sequence", "host_ns", "handle", "communicator")
    ]
    for one in records:
        number = int(one["communicator"])
        communicator = "other" if number == UNKNOWN else named(ring, number)
        parent = known.get(int(one["handle"]) >> KIND_BITS)
        known[int(one["sequence"])] = (communicator, parent, *(one[name].item() for name in names))
    return list(known.values())


def check_calls(told: list[list[str]], ring: Ring, calls: np.ndarray) -> None:
    """The ring has the collectives that were played, with the GPU's times."""
    read = [
        ["call", str(named(ring, call["communicator"]).id), call["func"].decode()]
        + [str(int(call[name])) for name in ("number", "arrived_gpu_ns", "ended_gpu_ns")]
        for call in calls
    ]
    assert sorted(read) == lines_of("call", told)


def check_waits(told: list[list[str]], ring: Ring, waits: np.ndarray) -> None:
    """The ring has the steps and bytes that were played, and times that these can have taken."""
    sums: dict[tuple[str, ...], np.ndarray] = {}
    for wait in waits:
        number = int(wait["communicator"])
        communicator = "foreign" if number == UNKNOWN else str(named(ring, number).id)
        key = (communicator, str(wait["peer"]), str(int(wait["sends"])))
        sums[key] = np.array([wait["steps"], wait["size_bytes"], *(wait[name] * 1e9 for name in WAITS.values())])
    played = {tuple(words[1:4]): np.array(words[4:], float) for words in told if words[0] == "sent"}
    assert sums.keys() == played.keys()
    for key, (steps, size_bytes, *times) in sums.items():
        least, most = played[key][2::2], played[key][3::2]
        assert (steps, size_bytes) == tuple(played[key][:2])
        assert (least - 1 <= times).all(), key  # a nanosecond for the floats
        assert (times <= most + 1).all(), key


def check(told: list[list[str]], ring: Ring, read: Joined) -> None:
    check_calls(told, ring, read.calls)
    check_waits(told, ring, read.waits)
    assert (ring.dropped, ring.torn) == (0, 0)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("how", ["play", "threads", "again"])
def test_what_was_recorded_and_is_played_again_reads_the_same(
    how: str, version: int, library: Path, tmp_path: Path
) -> None:
    """One thread; four with a communicator each; and a library that is closed and opened again."""
    told, (recording,) = record(library, tmp_path, how, version, 50)
    first = ring_in(tmp_path)
    told_again, second = replay(library, tmp_path / "again", version, recording)
    events, events_again = (events_of(ring, ring.drain()) for ring in (first, second))
    if how == "threads":  # whose records lie in any order, and each one's in its own
        assert Counter(events) == Counter(events_again)
    else:
        assert events == events_again
    for what in ("comm", "call"):
        assert lines_of(what, told) == lines_of(what, told_again)
    assert lines_of("call", told)
    assert recording.name.startswith(f"calls-v{version}-rank7-")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_replay_says_what_its_ring_has(version: int, library: Path, tmp_path: Path) -> None:
    _, (recording,) = record(library, tmp_path, "threads", version, 50)
    told, ring = replay(library, tmp_path / "again", version, recording)
    check(told, ring, joined(ring))


def test_a_replay_can_be_as_slow_as_is_wanted(library: Path, tmp_path: Path) -> None:
    _, (recording,) = record(library, tmp_path, "play", 6, 5)
    head, *lines = (line.split() for line in recording.read_text().splitlines())
    for at, words in enumerate(lines):
        words[2] = str(at * 100_000_000 // (len(lines) - 1))
    recording.write_text("\n".join(" ".join(words) for words in (head, *lines)))
    began = time.monotonic()
    replay(library, tmp_path / "again", 6, recording, 0.1)
    assert time.monotonic() - began >= 1.0


def test_a_forked_child_is_recorded_by_itself(library: Path, tmp_path: Path) -> None:
    told, recordings = record(library, tmp_path, "forked", 5, 20)
    assert len(recordings) == 2
    again = [words for at, path in enumerate(recordings) for words in replay(library, tmp_path / str(at), 5, path)[0]]
    assert lines_of("call", again) == lines_of("call", told)


@pytest.mark.parametrize(("wider", "masks"), [(0, {"78", "94"}), (4095, {"4095"})])  # in some seconds also steps
def test_what_the_plugin_declines_is_seen_where_that_is_wanted(
    wider: int, masks: set[str], library: Path, tmp_path: Path
) -> None:
    """A kernel's launch: NCCL stops one only if it was given a handle for it."""
    (told,), (recording,) = record(library, tmp_path, "mask", 6, wider=wider)
    assert told[1] in masks
    lines = [line.split() for line in recording.read_text().splitlines()]
    assert lines[0] == ["nccl-calls", "1", "version", "6", "wider", str(wider), "left_out", "0"]
    (launch,) = (at for at, words in enumerate(lines) if words[0] == "start" and words[7] == "2048")
    (stop,) = (words for words in lines if words[0] == "stop")
    assert lines[launch][3] == "0"
    assert int(stop[3]) == (launch if wider else 0)


@pytest.mark.parametrize(
    "fixture",
    FIXTURES
    or [pytest.param(None, marks=pytest.mark.skip(reason="no recording of a real NCCL is in tests/data/nccl"))],
    ids=lambda path: path.name if path else "none",
)
def test_what_a_real_nccl_has_called_is_read(fixture: Path, library: Path, tmp_path: Path) -> None:
    recording = tmp_path / "calls.txt"
    recording.write_bytes(gzip.decompress(fixture.read_bytes()))
    with recording.open() as file:
        version = int(file.readline().split()[3])
    told, ring = replay(library, tmp_path / "again", version, recording)
    read = joined(ring)
    assert ring.interface == version
    assert len(read.calls) > 0
    assert (read.calls["ended_gpu_ns"] > 0).any()
    check(told, ring, read)


@pytest.mark.parametrize(("version", "seconds"), [(4, 0.103516512), (5, 0.107570464), (6, 0.103178752)])
def test_the_late_rank_of_a_job_on_a_gpu_is_named(version: int, seconds: float, library: Path, tmp_path: Path) -> None:
    """Calls of two ranks, of which the second came 2 ms late to each; the seconds are those found on the GPU then."""
    folder = tmp_path / "rings"
    folder.mkdir()
    for rank in (0, 1):
        (fixture,) = (path for path in FIXTURES if path.name.startswith(f"calls-v{version}-rank{rank}of2-collectives"))
        recording = tmp_path / f"{rank}.txt"
        recording.write_bytes(gzip.decompress(fixture.read_bytes()))
        play(library, folder, "recorded", version, recording, RANK=str(rank))
    watch = NcclWatch(folder)
    watch.poll(is_last=True)
    (blame,) = watch.report().blames
    assert (blame.rank, blame.peer) == (1, -1)
    assert blame.seconds == pytest.approx(seconds)


REUSED = """
import ctypes, os, sys

class Profiler(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("name", "init", "start", "stop", "state", "end")]

MADE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint64, ctypes.POINTER(ctypes.c_int), ctypes.c_char_p,
    ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p,
)
CLOSED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
recorder, ours = (Profiler.in_dll(ctypes.CDLL(path), "ncclProfiler_v5") for path in sys.argv[1:])
init, finalize = MADE(recorder.init), CLOSED(recorder.end)
begun = []

def open_one():
    init(ctypes.byref(ctypes.c_void_p()), len(begun), ctypes.byref(ctypes.c_int()), b"", 1, 1, 0, None)

@MADE
def make(context, *_):
    context[0] = 4096  # memory that was freed is given out again
    begun.append(1)
    return 0

@CLOSED
def close(context):
    if len(begun) == 1:
        open_one()  # as another thread does between the end of this and what follows it
    return 0

ours.init, ours.end = (ctypes.cast(each, ctypes.c_void_p) for each in (make, close))
open_one()
finalize(4096)
finalize(4096)
os._exit(0)  # past what is written when a process ends
"""


def test_a_communicator_in_the_place_of_one_that_was_just_freed_is_open(tmp_path: Path) -> None:
    library = recorder()
    ours = tmp_path / "ours.so"
    source = 'extern "C" { struct Profiler { void* of[6]; }; Profiler ncclProfiler_v5; }'
    building = ["c++", "-xc++", "-", "-shared", "-fPIC", "-o", str(ours)]
    subprocess.run(building, input=source, text=True, check=True, timeout=60)
    environ = {"RINGSIDE_RECORDED_PLUGIN": str(ours), "RINGSIDE_RECORD_DIR": str(tmp_path)}
    command = [sys.executable, "-c", REUSED, str(library), str(ours)]
    subprocess.run(command, env={**os.environ, **environ}, check=True, timeout=60)
    (recording,) = tmp_path.glob("calls-*.txt")
    calls = [line.split() for line in recording.read_text().splitlines()[1:]]
    assert [words[-1] for words in calls if words[0] == "finalize"] == ["1", "3"], "lines of the inits"
