from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringside.monitor.run import registry
from ringside.monitor.run.registry import register, registry_directory, running_runs, unregister


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setattr(registry_directory, "__defaults__", (os.environ,))
    return tmp_path / "runtime" / "ringside"


def test_a_run_is_found_until_it_is_taken_back(tmp_path: Path) -> None:
    file = register(tmp_path / "run", 4, 12.0)
    assert [(entry.directory, entry.world_size, entry.pid) for entry in running_runs()] == [
        (tmp_path / "run", 4, os.getpid())
    ]
    unregister(file)
    assert running_runs() == []


def test_a_name_that_is_no_text_is_found_too(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xff\xfen"))
    file = register(path, 2, 1.0)
    assert [entry.directory for entry in running_runs()] == [path]
    unregister(file)


def test_what_a_killed_process_left_is_removed(tmp_path: Path, private: Path) -> None:
    command = [sys.executable, Path(__file__).parent / "scripts" / "registers_a_run.py", tmp_path / "run"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"registered\n"
        assert [entry.pid for entry in running_runs()] == [child.pid]
        child.kill()
        child.wait(30)
        assert running_runs() == []
        assert list(private.iterdir()) == []


def test_a_pid_that_is_used_again_is_another_process(tmp_path: Path, private: Path) -> None:
    register(tmp_path / "run", 4, 12.0)
    file = next(private.iterdir())
    file.write_bytes(file.read_bytes().replace(b'"born":', b'"born":1'))
    assert running_runs() == []


def test_a_directory_that_others_may_write_is_not_believed(tmp_path: Path, private: Path) -> None:
    private.mkdir()
    private.chmod(0o777)
    assert register(tmp_path / "run", 4, 12.0) is None
    assert running_runs() == []


def test_torn_entries_are_left_out(private: Path) -> None:
    private.mkdir(mode=0o700)
    (private / "1.json").write_bytes(b'{"path": "')
    assert running_runs() == []


def test_without_a_runtime_directory_it_lies_in_tmp_under_the_users_number() -> None:
    assert registry.registry_directory({}).name == f"ringside-{os.getuid()}"
