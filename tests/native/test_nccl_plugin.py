"""NCCL's plugin, loaded as NCCL does by a program that plays NCCL: what it writes is what was played."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.native.nccl import harness, joined, named, play, played_calls, read_calls, ring_in

from ringside import _core
from ringside.errors import RingsideError, UnsupportedError
from ringside.monitor.nccl.calls import UNKNOWN, Calls
from ringside.monitor.nccl.ring import (
    COMMUNICATOR,
    COMMUNICATORS,
    FOLDER,
    FOREIGN,
    HEAD,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MESSAGE,
    MOST_CLOSED,
    PREFIX,
    PROXY,
    STARTED,
    TAIL,
    Ring,
)
from ringside.processes import start_time

pytestmark = pytest.mark.native
VERSIONS = (4, 5, 6)


@pytest.fixture
def library() -> Path:
    return _core.nccl_plugin()


@pytest.mark.core
@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_played_is_what_is_read(version: int, library: Path, tmp_path: Path) -> None:
    """Calls that overlap and end out of order or never, on four threads with a communicator each."""
    told = play(library, tmp_path, "threads", version, 100)
    ring = ring_in(tmp_path)
    records = ring.drain()
    calls, waits = Calls().add(records, time.monotonic_ns(), is_last=True)
    assert ring.interface == version
    assert (ring.dropped, ring.torn) == (0, 0)
    assert read_calls(ring, calls) == played_calls(told)
    communicators = sorted((one.id, one.ranks, one.rank, one.name) for one in (named(ring, at) for at in range(4)))
    assert communicators == sorted((int(w[1]), int(w[2]), int(w[3]), "dp") for w in told if w[0] == "comm")
    assert np.count_nonzero((records["kind"] == MESSAGE) & (records["what"] == STARTED)) == 100
    assert calls["is_captured"].sum() == (80 if version > 4 else 0)  # version 4 does not tell
    own = waits[waits["communicator"] != UNKNOWN]
    assert set(own["communicator"]) == set(range(4))
    assert all(own["peer"] == 0)
    assert all(own["send"] > 0)


def test_what_proxies_do_for_other_processes_is_not_taken_for_ones_own(library: Path, tmp_path: Path) -> None:
    play(library, tmp_path, "play", 6, 10)
    records = ring_in(tmp_path).drain()
    foreign = records[(records["kind"] == PROXY) & (records["flags"] & FOREIGN != 0)]
    assert len(foreign) == 10
    assert set(foreign["communicator"]) == {UNKNOWN}


def test_a_library_that_is_opened_again_or_from_a_copy_takes_its_ring_up(library: Path, tmp_path: Path) -> None:
    shutil.copy(library, tmp_path / "copy.so")
    told = play(library, tmp_path, "again", 6, 20, tmp_path / "copy.so")
    ring = ring_in(tmp_path)
    assert read_calls(ring, joined(ring).calls) == played_calls(told)
    assert [named(ring, number).id for number in range(3)] == [1, 2, 3]


class Follower:
    """Reads the ring in a folder while it is written.

    Attributes:
        calls: What was read, as `read_calls` has it.
        late: Of each communicator, the peer of an event that was started when it was closed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._calls = Calls()
        self._ring: Ring | None = None
        self.calls: dict[tuple[int, str, int], tuple[int, int]] = {}
        self.late: list[tuple[int, int]] = []

    def read(self, *, is_last: bool = False) -> Ring | None:
        if self._ring is None:
            try:
                self._ring = ring_in(self._folder)
            except (ValueError, RingsideError):  # it is not there yet
                return None
        calls, waits = self._calls.add(self._ring.drain(), time.monotonic_ns(), is_last=is_last)
        self.calls |= read_calls(self._ring, calls)
        own = waits[(waits["communicator"] != UNKNOWN) & (waits["peer"] != 0)]
        self.late += [(named(self._ring, row["communicator"]).id, int(row["peer"])) for row in own]
        return self._ring


@pytest.mark.parametrize("version", VERSIONS)
def test_the_places_of_closed_communicators_are_used_again(version: int, library: Path, tmp_path: Path) -> None:
    """Three times as many as there are places, by two copies of the library; ends and starts come after the close."""
    copy = shutil.copy(library, tmp_path / "copy.so")
    follower = Follower(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        playing = pool.submit(play, library, tmp_path, "remade", version, 3 * COMMUNICATORS, copy)
        while not playing.done():
            follower.read()
    ring = follower.read(is_last=True)
    assert ring is not None
    assert (ring.dropped, ring.torn) == (0, 0)
    played = played_calls(playing.result())
    assert follower.calls.keys() == played.keys()
    # Of a thread that has no processor for long a call is given up; nothing else may differ.
    given_up = [call for call, times in follower.calls.items() if times != played[call]]
    assert all(follower.calls[call] == (played[call][0], 0) for call in given_up)
    assert len(given_up) <= 4
    assert len(follower.late) > COMMUNICATORS
    assert all(communicator == peer for communicator, peer in follower.late)


def test_a_process_killed_while_it_makes_communicators_is_read_to_its_end(library: Path, tmp_path: Path) -> None:
    copy = shutil.copy(library, tmp_path / "copy.so")
    follower = Follower(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        playing = pool.submit(play, library, tmp_path, "remade-killed", 6, 3 * COMMUNICATORS, copy, status=-9)
        while not playing.done():
            follower.read()
    follower.read(is_last=True)
    played = played_calls(playing.result())
    assert len(played) > COMMUNICATORS
    assert played.items() <= follower.calls.items()


@pytest.mark.parametrize("version", VERSIONS)
def test_there_is_room_for_so_many_communicators_at_a_time(version: int, library: Path, tmp_path: Path) -> None:
    """More are refused until one was closed, and what names it was read."""
    play(library, tmp_path, "places", version)


def test_a_reader_forgets_communicators_that_were_closed_long_ago(library: Path, tmp_path: Path) -> None:
    play(library, tmp_path, "mask", 6)
    ring = ring_in(tmp_path)
    ring.drain()
    memory = np.memmap(ring.path, np.uint8)
    made_ever = memory[: HEADER.itemsize].view(HEADER)["communicators"]
    made = memory[HEADER_BYTES : HEADER_BYTES + COMMUNICATORS * COMMUNICATOR.itemsize].view(COMMUNICATOR)["made"]
    newest = MOST_CLOSED // COMMUNICATORS + 2
    for turn in range(1, newest + 1):
        made[:] = turn * COMMUNICATORS + 1 + np.arange(COMMUNICATORS)
        made_ever += COMMUNICATORS
        assert ring.filled_ratio == 1.0
        ring.drain()
        assert ring.filled_ratio == 0.0
    known = [ring.communicator(number) is not None for number in (0, 2 * COMMUNICATORS - 1, 2 * COMMUNICATORS)]
    assert known == [False, False, True]
    assert ring.communicator(newest * COMMUNICATORS) is not None


def test_a_communicator_that_is_just_being_made_is_read_later(library: Path, tmp_path: Path) -> None:
    play(library, tmp_path, "mask", 6)
    ring = ring_in(tmp_path)
    memory = np.memmap(ring.path, np.uint8)
    made = memory[HEADER_BYTES : HEADER_BYTES + COMMUNICATORS * COMMUNICATOR.itemsize].view(COMMUNICATOR)["made"]
    made[0] = 0
    ring.drain()
    assert ring.communicator(0) is None
    made[0] = 1 + COMMUNICATORS
    memory[: HEADER.itemsize].view(HEADER)["communicators"] += 1
    ring.drain()
    assert named(ring, COMMUNICATORS).id == 1


def test_a_forked_child_has_a_ring_of_its_own(library: Path, tmp_path: Path) -> None:
    play(library, tmp_path, "forked", 5, 20)
    rings = [Ring(path) for path in tmp_path.glob(f"{PREFIX}*")]
    for ring in rings:
        ring.drain()
    known = [ring.communicator(number) for ring in rings for number in range(2)]
    assert sorted(one.id for one in known if one is not None) == [1, 2, 3]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_killed_process_leaves_its_ring_readable(version: int, library: Path, tmp_path: Path) -> None:
    play(library, tmp_path, "killed", version, 200, status=-9)
    ring = ring_in(tmp_path)
    assert not ring.is_alive()
    calls, _ = joined(ring)
    assert len(calls) > 50
    assert len(ring.drain()) == 0


def test_a_full_ring_drops_what_is_new_and_counts_it(library: Path, tmp_path: Path) -> None:
    play(library, tmp_path, "full", 6)
    ring = ring_in(tmp_path)
    assert ring.dropped == 11
    records = ring.drain()
    assert len(records) == 32 * 1024
    calls = Calls().add(records, time.monotonic_ns(), is_last=True).calls
    assert (calls["arrived_gpu_ns"][0], calls["ended_gpu_ns"][0]) == (5, 0)  # its end is not known


def test_a_record_that_was_never_finished_is_left_out(library: Path, tmp_path: Path) -> None:
    play(library, tmp_path, "play", 5, 20)
    ring = ring_in(tmp_path)
    words = np.memmap(ring.path, np.uint64)
    words[HEAD] += 1
    records = ring.drain()
    assert len(records) == words[HEAD] - 1
    assert ring.torn == 1
    assert words[TAIL] == words[HEAD]
    words[HEAD] += 10**9
    with pytest.raises(RingsideError, match="damaged"):
        ring.drain()


def test_of_a_living_process_only_what_is_whole_is_taken(library: Path, tmp_path: Path) -> None:
    play(library, tmp_path, "play", 5, 20)
    (path,) = tmp_path.glob(f"{PREFIX}*")
    header = np.memmap(path, np.uint64)
    header[1], np.memmap(path, np.int32)[6] = start_time(os.getpid()), os.getpid()
    header[HEAD] += 1
    ring = Ring(path)
    assert len(ring.drain()) == header[HEAD] - 1
    assert (header[TAIL], ring.torn) == (header[HEAD] - 1, 0)


def test_files_that_are_no_rings_are_refused(tmp_path: Path) -> None:
    for content in (b"", b"\0" * 5_000_000, MAGIC + b"\0" * 1_000_000):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(RingsideError, match="no ring"):
            Ring(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"RNGNCCL2" + b"\0" * 1_000_000)
    with pytest.raises(UnsupportedError, match=r"has version 2 of the layout.* reads version 3"):
        Ring(tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OSError):
        Ring(tmp_path / "link")


def test_without_shared_memory_init_fails_and_nothing_else(library: Path, tmp_path: Path) -> None:
    play(library, tmp_path / "missing", "refused", 6)
    play(library, tmp_path / ("x" * 600), "refused", 5)
    limited = ["bash", "-c", 'ulimit -f 1024; exec "$@"', "-", harness(), library, "refused", "6"]
    subprocess.run(limited, env={**os.environ, "RINGSIDE_NCCL_DIR": str(tmp_path)}, check=True, timeout=60)
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def test_in_the_default_folder_rings_of_processes_that_ended_are_removed(library: Path) -> None:
    before = set(Path(FOLDER).glob(f"{PREFIX}*"))
    living = Path(FOLDER, f"{PREFIX}{os.getpid()}-{start_time(os.getpid())}")
    dead = [Path(FOLDER, f"{PREFIX}{os.getpid()}-1"), Path(FOLDER, f"{PREFIX}{2**22 + 1}-1")]
    other = Path(FOLDER, f"{PREFIX}{2**22 + 1}-1.txt")
    try:
        for path in (living, *dead, other):
            path.touch()
        play(library, Path(), "mask", 6, RINGSIDE_NCCL_DIR="")
        assert [path.exists() for path in (living, *dead, other)] == [True, False, False, True]
    finally:
        for path in (living, *dead, other):
            path.unlink(missing_ok=True)
        for path in set(Path(FOLDER).glob(f"{PREFIX}*")) - before:
            if path.is_file() and not Ring(path).is_alive():
                path.unlink()


@pytest.mark.parametrize(("text", "rank"), [("", -1), ("x", -1), ("-3", -1), ("7", 7)])
def test_a_rank_that_is_no_number_is_not_known(text: str, rank: int, library: Path, tmp_path: Path) -> None:
    play(library, tmp_path, "mask", 6, RANK=text)
    assert ring_in(tmp_path).global_rank == rank


def test_steps_of_proxies_are_asked_for_always_where_that_is_wanted(library: Path, tmp_path: Path) -> None:
    """The harness plays them in any case; what NCCL is asked for is the mask."""
    assert play(library, tmp_path, "mask", 6, RINGSIDE_NCCL_STEPS="1") == [["mask", str(2 + 4 + 8 + 16 + 64)]]


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_it_shows_three_names_and_needs_nothing_but_the_c_library(library: Path) -> None:
    def told(*words: str) -> str:
        return subprocess.run([*words, str(library)], capture_output=True, text=True, check=True).stdout

    assert re.findall(r" [A-TV-Z] (\S+)", told("nm", "-D")) == [f"ncclProfiler_v{version}" for version in VERSIONS]
    assert re.findall(r"NEEDED.*\[(.+)\]", told("readelf", "-dW")) == ["libc.so.6"]
    assert not [name for name in re.findall(r" U (\S+)", told("nm", "-D")) if "@GLIBC" not in name]
    assert "NODELETE" in told("readelf", "-dW")
    names = told("nm", "-D")
    assert not {"pthread_create", "__cxa_thread_atexit_impl", "__cxa_atexit", "malloc", "_Znwm"} & set(names.split())


def test_a_path_that_nccl_would_cut_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "LONGEST_PLUGIN_PATH", len(os.fsencode(_core.nccl_plugin())))
    _core.nccl_plugin()
    monkeypatch.setattr(_core, "LONGEST_PLUGIN_PATH", _core.LONGEST_PLUGIN_PATH - 1)
    with pytest.raises(UnsupportedError, match="cuts paths of plugins off"):
        _core.nccl_plugin()


def test_without_the_core_there_is_none() -> None:
    tell = "from ringside import _core; _core.nccl_plugin()"
    done = subprocess.run(
        [sys.executable, "-c", tell], env={**os.environ, "RINGSIDE_NO_NATIVE": "1"}, capture_output=True, text=True
    )
    assert "comes with Ringside's native core, but RINGSIDE_NO_NATIVE is set" in done.stderr
