"""Who can write a directory in which Ringside writes cannot make it write anywhere else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ringside.errors import RingsideError
from ringside.files import append_to_file, replace_file, user_file, write_user_file
from ringside.launch.follow import choose_directory
from ringside.monitor import RunInfo, StepRecord
from ringside.monitor.run.directory import EVENTS, REPORT, RUN, STEPS, SUMMARY, RunReader, RunWriter
from ringside.monitor.run.registry import register, unregister
from ringside.monitor.summary import finish_run
from ringside.view.export.perfetto import write_events
from ringside.view.html.run_report import render_report

PRECIOUS = b"precious\n"
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link to another user")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file that nothing may touch."""
    path = tmp_path / "victim.txt"
    path.write_bytes(PRECIOUS)
    return path


@pytest.fixture
def info() -> RunInfo:
    return RunInfo(schema=1, name="run", started_unix=0.0, command=[], world_size=1, hosts=[], pids=[1], engine="",
                   algorithm="", versions={})  # fmt: skip


def a_run(path: Path, info: RunInfo) -> Path:
    writer = RunWriter(path, info)
    writer.append([StepRecord(step=step, rank=0, ended_unix=1.0, step_seconds=0.2, own_seconds=0.1) for step in (0, 1)])
    assert not writer.off
    return path


def test_a_report_is_not_written_through_names_that_can_be_guessed(tmp_path: Path, victim: Path, info: RunInfo) -> None:
    """Hole B12: links under the names that the temporary files of the next processes had."""
    run = a_run(tmp_path / "run", info)
    script = Path(__file__).parent / "scripts" / "guessed_names.py"
    subprocess.run([sys.executable, script, run, victim, SUMMARY, REPORT], check=True, timeout=60)
    assert victim.read_bytes() == PRECIOUS
    assert json.loads((run / SUMMARY).read_text())["steps"] == 2


def test_no_file_of_a_run_is_written_through_a_link(tmp_path: Path, victim: Path, info: RunInfo) -> None:
    """A run is written into a directory that somebody has prepared, and its report is built there."""
    run = tmp_path / "run"
    run.mkdir()
    for name in (STEPS, EVENTS):
        (run / name).symlink_to(victim)
    writer = RunWriter(run, info)
    writer.append([StepRecord(step=0, rank=0, ended_unix=1.0, step_seconds=0.2, own_seconds=0.1)])
    writer.event({"unix": 0.0, "kind": "ended"})
    assert writer.off
    for name in (STEPS, EVENTS):
        (run / name).unlink()
        (run / name).touch()
    for name in (SUMMARY, REPORT):
        (run / name).symlink_to(victim)
    finish_run(run, render_report)
    assert victim.read_bytes() == PRECIOUS
    assert not any((run / name).is_symlink() for name in (RUN, SUMMARY, REPORT))
    assert RunReader(run).summary() is not None


def test_a_link_that_leads_nowhere_makes_no_file_there(tmp_path: Path, info: RunInfo) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    (run / STEPS).symlink_to(elsewhere)
    RunWriter(run, info)
    assert not elsewhere.exists()


def test_a_directory_is_tried_under_no_name_that_can_be_guessed(tmp_path: Path, victim: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / f".probe-{os.getpid()}").symlink_to(victim)
    assert choose_directory(run, "demo") == (run, "")
    assert victim.read_bytes() == PRECIOUS
    assert [path.name for path in run.iterdir()] == [f".probe-{os.getpid()}"]


def test_the_register_is_not_written_through_links(
    tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "ringside").mkdir(mode=0o700)
    for name in (f"{os.getpid()}.json", f".{os.getpid()}.json.{os.getpid()}.tmp"):
        (tmp_path / "ringside" / name).symlink_to(victim)
    entry = register(tmp_path, 1, 0.0)
    assert entry is not None
    assert not entry.is_symlink()
    unregister(entry)
    assert victim.read_bytes() == PRECIOUS


def test_lines_go_to_regular_files_alone(tmp_path: Path, victim: Path) -> None:
    """Not through a link, into a pipe whose reader never comes, or into another name of somebody's file."""
    (tmp_path / "link").symlink_to(victim)
    os.mkfifo(tmp_path / "pipe")
    shared = tmp_path / "shared"
    shared.mkdir()
    os.link(victim, shared / "name")
    shared.chmod(0o777)
    for path in (tmp_path / "link", tmp_path / "pipe", shared / "name", tmp_path):
        with pytest.raises(OSError, match=r"."):
            append_to_file(path, b"a line\n")
    assert victim.read_bytes() == PRECIOUS


def test_lines_are_added_behind_those_that_are_there(tmp_path: Path) -> None:
    """Also to a file with another name, where nobody else can write the directory."""
    for line in (b"one\n", b"two\n"):
        append_to_file(tmp_path / "lines", line)
    own = tmp_path / "own"
    own.mkdir(mode=0o755)
    os.link(tmp_path / "lines", own / "name")
    append_to_file(own / "name", b"three\n")
    assert (tmp_path / "lines").read_bytes() == b"one\ntwo\nthree\n"


def test_what_cannot_be_replaced_stays_and_nothing_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "folder" / "in it").mkdir(parents=True)
    with pytest.raises(OSError, match=r"."):
        replace_file(tmp_path / "folder", b"a file")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    replace_file(tmp_path / ("x" * 255), b"a long name")
    assert (tmp_path / ("x" * 255)).read_bytes() == b"a long name"


def test_a_hard_link_is_replaced_and_not_written(tmp_path: Path, victim: Path) -> None:
    os.link(victim, tmp_path / "summary.json")
    replace_file(tmp_path / "summary.json", b"{}")
    assert victim.read_bytes() == PRECIOUS


def test_a_folder_that_is_a_link_is_not_entered(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "stacks").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotADirectoryError):
        replace_file(tmp_path / "stacks" / "hang-0-rank-0.txt", b"a stack", own_folder=True)
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize(
    "write", [replace_file, append_to_file, lambda path, data: write_user_file(path, data.decode())]
)
def test_a_folder_that_the_user_named_may_be_a_link(tmp_path: Path, write: Callable[[Path, bytes], object]) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "elsewhere")
    write(tmp_path / "runs" / "page", b"a page")
    assert (tmp_path / "elsewhere" / "page").read_bytes() == b"a page"


# ------------------------------------------------------------------------------------- what the user named himself


def test_the_users_own_links_are_followed_as_the_shell_does(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "second.html").symlink_to("pages/report.html")
    (tmp_path / "first.html").symlink_to("second.html")
    for text in ("a longer page", "a page", ""):
        write_user_file(tmp_path / "first.html", text)
        assert (tmp_path / "pages" / "report.html").read_text() == text
    assert (tmp_path / "first.html").is_symlink()


def test_pipes_and_devices_can_be_named(tmp_path: Path) -> None:
    written = subprocess.run(
        [sys.executable, "-c", "from pathlib import Path;from ringside.files import write_user_file as w;"
         "w(Path('/dev/stdout'), 'page'); w(Path('/dev/null'), 'page')"],
        capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert written.stdout == b"page"


@as_root
@pytest.mark.parametrize("write", [write_user_file, lambda path, text: write_events(path, [])])
def test_another_users_link_is_not_followed(tmp_path: Path, victim: Path, write: Callable[[Path, str], object]) -> None:
    """Not even at the end of the user's own."""
    (tmp_path / "theirs").symlink_to(victim)
    os.lchown(tmp_path / "theirs", NOBODY, NOBODY)
    (tmp_path / "own").symlink_to("theirs")
    for name in ("theirs", "own"):
        with pytest.raises((OSError, RingsideError), match=f"link of another user .uid {NOBODY}"):
            write(tmp_path / name, "page")
    assert victim.read_bytes() == PRECIOUS


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        write_user_file(tmp_path / "a", "page")
    for number in range(41):  # as many as the kernel follows, and one more
        (tmp_path / f"link-{number}").symlink_to(f"link-{number - 1}" if number else "page")
    write_user_file(tmp_path / "link-39", "page")
    assert (tmp_path / "page").read_text() == "page"
    with pytest.raises(OSError, match="symbolic links"):
        write_user_file(tmp_path / "link-40", "another")


def test_what_cannot_be_finished_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        with user_file(path) as file:
            file.write(b"half of")
            file.flush()
            raise OSError(28, "No space left on device")

    (tmp_path / "old").write_text("an old page")
    for name in ("old", "new"):
        with pytest.raises(OSError, match="No space"):
            fail(tmp_path / name)
    assert (tmp_path / "old").read_bytes() == b""
    assert not (tmp_path / "new").exists()


@as_root
def test_a_full_device_is_not_removed(tmp_path: Path) -> None:
    """It was, by root: a trace that could not be written was unlinked under the name that was given."""
    full = tmp_path / "full"
    os.mknod(full, 0o20666, os.makedev(1, 7))
    try:
        descriptor = os.open(full, os.O_WRONLY)
    except PermissionError:
        pytest.skip("devices cannot be opened below this directory")
    os.close(descriptor)
    with pytest.raises(RingsideError, match="No space"):
        write_events(full, [{"name": "x" * 100_000}])
    assert full.exists()


def test_no_program_of_ours_opens_files_for_writing_in_another_way() -> None:
    """Each place that writes by itself is known here, with the reason why it may."""
    source = Path(__file__).resolve().parents[2] / "src" / "ringside"
    known = {
        "files.py": "the one way",
        "bench/launch.py": "a directory of its own under a random name, this user's alone",
        "bench/messages.py": "the same",
        "doctor/ringside_run.py": "the same",
        "doctor/calls/follow.py": "its own /proc/self/oom_score_adj",
        "faults/inject.py": "joins a cgroup of its own, in /sys/fs/cgroup",
        "faults/quota.py": "the same",
        "lab/network.py": "the kernel's switches in /proc/sys",
        "survive/state/checkpoint.py": "a directory that it has just made under a name of its own",
    }
    ways = re.compile(r"""\.write_(?:text|bytes)\(|\.touch\(|(?<!fd)open\([^)\n]*["'][wax]b?\+?["']""")
    found = {
        str(path.relative_to(source)) for path in source.rglob("*.py") if ways.search(path.read_text(encoding="utf-8"))
    }
    assert found <= set(known)
