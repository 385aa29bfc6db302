"""`bench/gpu.sh` where no GPU is: every section of one is skipped in a line, and the host engine measured."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
from bench.gpu import __main__ as gpu  # noqa: E402
from bench.gpu import parts  # noqa: E402
from bench.monitor import parallel_jobs  # noqa: E402
from tests.support.waiting import until  # noqa: E402

ROOT = Path(__file__).parents[2]
HERE = {"gpu": "a GPU", "nccl": "2.29.3", "nvml": True, "plugin": "plugin.so", "cores": 16}


@pytest.mark.long  # the streaming limit and two peers: 50 processor seconds
@pytest.mark.native
@pytest.mark.timeout(300)  # the streaming limit takes memory of three caches
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_host_engine_is_measured_and_the_rest_skipped(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    words = ["--out", str(out), "--ranks", "2,512", "--sizes", "4", "--times", "5"]
    ended = subprocess.run(
        [str(ROOT / "bench/gpu.sh"), *words],
        env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (0, f"{out}\n"), ended.stderr
    told = json.loads(out.read_text())
    assert told["machine"]["gpu"] is None
    assert told["date"] == time.strftime("%Y-%m-%d", time.localtime(out.stat().st_mtime))
    found = {section["name"]: section for section in told["sections"]}
    host, outnumbered = found.pop("host engine, 2 ranks"), found.pop("host engine, 512 ranks")
    assert {section["why"] for section in found.values()} == {"torch sees no GPU"}
    assert {section["outcome"] for section in (*found.values(), outnumbered)} == {"skipped"}
    assert host["outcome"] == "passed", host["why"]
    assert {row["algorithm"] for row in host["figures"]["rows"]} >= {"auto", "hierarchical"}
    assert {row["engine"] for row in host["figures"]["rows"]} >= {"ringside", "gloo"}
    assert len(ended.stderr.splitlines()) == len(told["sections"]), "a line each"


def test_all_limits_together_are_less_than_ten_minutes_and_every_command_is_there() -> None:
    every = list(gpu.sections(HERE, gpu.RANKS, gpu.SIZES))
    assert not any(section.missing for section in every)
    assert sum(section.limit_s for section in every) + gpu.ENDING_S < gpu.LONGEST_S < 600
    for section in every:
        for word in section.command:
            assert not word.startswith("tests/") or (ROOT / word).is_file()


@pytest.mark.parametrize(
    ("lacks", "why"), [("gpu", "no GPU"), ("nccl", "no NCCL"), ("nvml", "nvidia-ml-py"), ("plugin", "no plugin")]
)
def test_what_a_machine_lacks_is_said(lacks: str, why: str) -> None:
    skipped = [s.missing for s in gpu.sections({**HERE, lacks: None}, (2,), "4") if s.missing]
    assert skipped
    assert all(why in missing for missing in skipped)


def section(code: str, figures: Any = gpu.json_lines, limit_s: float = 20.0) -> gpu.Section:
    return gpu.Section("a part", limit_s, [sys.executable, "-c", code], "", figures)


def test_a_section_that_fails_or_hangs_stops_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    every = [
        section("import sys; print('{}', file=sys.stderr); sys.exit('no such\\nGPU')"),
        section("import time; time.sleep(60)", limit_s=1.0),
        gpu.Section("a part", 20.0, ["/nowhere/at/all"], "", gpu.json_lines),
        section("print('no figures')"),
        section("""print('noise\\n{"a": NaN, "b": 1}')"""),
    ]
    found = list(gpu.run_all(every))
    assert [one.outcome for one in found] == ["failed", "timed out", "failed", "failed", "passed"]
    assert [one.why for one in found[:2]] == ["GPU", "it was ended after 1 s"]
    assert "/nowhere/at/all" in found[2].why
    assert found[4].figures == [{"a": None, "b": 1}]
    assert len(capfd.readouterr().err.splitlines()) == len(every)
    (late,) = gpu.run_all([section("import time; time.sleep(60)")], longest_s=0.0)
    assert late.outcome == "timed out", "what is left of ten minutes"


def test_what_is_no_text_and_whoever_holds_its_output_stop_no_section() -> None:
    holds = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"
    every = [
        section("""import sys; sys.stdout.buffer.write(b'\\xff\\n{"a": 1}\\n')"""),
        section(f"""{holds}; print('{{"a": 1}}')"""),
    ]
    began = time.monotonic()
    assert [one.outcome for one in gpu.run_all(every)] == ["passed", "passed"]
    assert time.monotonic() - began < 40.0


def cleaning_up(begun: Path, cleaned: Path) -> gpu.Section:
    """Return a section that takes down what it has set up when it is told to end."""
    code = f"""
import pathlib, time
try:
    pathlib.Path({str(begun)!r}).touch()
    time.sleep(60)
finally:
    pathlib.Path({str(cleaned)!r}).touch()
"""
    return section(code)


def test_a_section_at_its_limit_takes_down_what_it_has_set_up(tmp_path: Path) -> None:
    begun, cleaned = tmp_path / "begun", tmp_path / "cleaned"
    limit_s = 1.0
    while not begun.exists() and limit_s < 60.0:  # on a busy machine it has not begun by then
        limit_s *= 2
        assert gpu.run_section(cleaning_up(begun, cleaned), limit_s).outcome == "timed out"
    assert cleaned.exists()


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_the_section(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, times: int) -> None:
    begun, cleaned = tmp_path / "begun", tmp_path / "cleaned"
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None and len(started) < times:
                started.append(self)
                until(begun.exists)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu.run_section(cleaning_up(begun, cleaned), 60.0)
    assert started[0].returncode == {1: -signal.SIGINT, 2: -signal.SIGKILL}[times]
    assert cleaned.exists() or times == 2


def test_numbers_that_json_does_not_have_are_null() -> None:
    row = dict.fromkeys(("engine", "algorithm", "tensor", "cache", "size_bytes", "time_seconds", "ratios", "wrong"), 1)
    told = gpu.rows_of_bench(json.dumps({"rows": [{**row, "ratios": float("nan")}], "skipped": [], "peers": []}))
    assert told["rows"][0]["ratios"] is None


def test_a_section_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--only", "nonsense", "--out", str(tmp_path / "gpu.json")])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2


def test_tests_that_were_all_skipped_tried_nothing() -> None:
    assert gpu.count_of_tests("...\n3 passed, 2 deselected in 5.01s\n") == {"passed": 3}
    for last in ("2 skipped, 9 deselected in 0.5s", "1 passed, 2 skipped in 0.5s"):
        with pytest.raises(LookupError, match=last):
            gpu.count_of_tests(f"ss\n{last}\n")


def test_trials_in_which_the_slow_rank_is_not_named_fail() -> None:
    def of_jobs(*rights: int) -> gpu.Outcome:
        scores = [json.dumps({"kind": "fsdp", "right": right, "trials": 2}) for right in rights]
        (trials,) = [each for each in gpu.sections(HERE, (), "4") if each.name == "FSDP2 and DDP, 4 ranks"]
        command = [sys.executable, "-c", "import sys; print(*sys.argv[1:], sep='\\n')", *scores]
        return gpu.run_section(replace(trials, command=command), 20.0)

    assert of_jobs(2, 2).outcome == "passed"
    found = of_jobs(2, 1)
    assert (found.outcome, found.why) == ("failed", "fsdp: 1 of 2 trials named")
    assert len(found.figures) == 2, "they are kept"


@contextlib.contextmanager
def fake_mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: str, ends: str = "exit 0") -> Iterator[Path]:
    """Have a `nvidia-cuda-mps-control` on PATH that runs these words of a shell; yields what it has noted."""
    noted, program = tmp_path / "noted", tmp_path / parallel_jobs.MPS
    note = f'echo "${{1:-$(cat)}} $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY" >> {noted}'
    program.write_text(f'#!/bin/sh\n{note}\n[ "$1" = -d ] && {{ {starts}; }}\n{ends}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/the/callers")
    monkeypatch.delenv("CUDA_MPS_LOG_DIRECTORY", raising=False)
    yield noted
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "/the/callers"
    assert "CUDA_MPS_LOG_DIRECTORY" not in os.environ


def test_mps_is_started_and_ended_with_folders_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_mps(tmp_path, monkeypatch, "exit 0") as noted:
        with parallel_jobs.sharing() as shares:
            assert shares
            folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
            assert os.environ["CUDA_MPS_LOG_DIRECTORY"] == folder
        assert noted.read_text() == f"-d {folder} {folder}\nquit {folder} {folder}\n"


def test_an_mps_that_cannot_be_started_is_said_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with fake_mps(tmp_path, monkeypatch, "exit 3"), parallel_jobs.sharing() as shares:
        assert not shares
    (line,) = capfd.readouterr().err.splitlines()
    assert "MPS cannot be started" in line
    assert "exit status 3" in line


def test_an_mps_that_does_not_end_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run

    def brief(*args: Any, timeout: float, **named: Any) -> Any:
        return run(*args, timeout=min(timeout, 1.0) if named.get("input") else timeout, **named)

    monkeypatch.setattr(subprocess, "run", brief)
    with (
        fake_mps(tmp_path, monkeypatch, "exit 0", "exec sleep 60"),
        pytest.raises(ZeroDivisionError),
        parallel_jobs.sharing(),
    ):
        raise ZeroDivisionError


def test_an_nccl_within_torch_is_asked_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3, "a suffix"))
    assert parallel_jobs.nccl_version() == (2, 27, 3)


@pytest.mark.parametrize(("named", "passes"), [((1,), True), ((), False), ((0,), False), ((0, 1), False)])
def test_the_plugin_is_to_name_the_late_rank_alone(
    monkeypatch: pytest.MonkeyPatch, named: tuple[int, ...], passes: bool
) -> None:
    blames = [{"cause": "late rank", "rank": rank} for rank in named]
    blames.append({"cause": "not known", "rank": 0})
    monkeypatch.setattr(parts, "run_ranks_here", lambda command, ranks: None)
    monkeypatch.setattr(parts, "read_rings", lambda folder, environ, ranks: {"blames": blames})
    monkeypatch.setattr(parts, "sharing", lambda: contextlib.nullcontext(True))
    with (
        mock.patch.dict(os.environ),
        contextlib.nullcontext() if passes else pytest.raises(SystemExit, match="not known"),
    ):
        assert parts.plugin(2, None, 6, 0) == {"ranks": 2, "mps": True, "blames": blames}


def test_this_machine_is_described() -> None:
    found = parts.machine()
    assert found["torch"] == torch.__version__
    assert (found["gpu"] is None) == (not torch.cuda.is_available())
    assert found["cpu"]
    assert 1 <= found["cores"] <= len(os.sched_getaffinity(0))
    assert found["numa_nodes"] >= 1
    assert found["cache_bytes"] >= 1 << 15
