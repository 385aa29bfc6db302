"""`bench/gpu.sh` where no GPU is: every section of one is skipped in a line, and the host engine measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from bench.gpu import __main__ as gpu  # noqa: E402
from bench.gpu.parts import machine  # noqa: E402

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
    assert sum(section.limit_s for section in every) < gpu.LONGEST_S < 600
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


def test_ctrl_c_ends_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None:
                started.append(self)
                raise KeyboardInterrupt
            return super().wait()

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu.run_section(section("import time; time.sleep(60)"), 60.0)
    assert started[0].returncode == -signal.SIGKILL


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
    with pytest.raises(LookupError):
        gpu.count_of_tests("ss\n2 skipped, 9 deselected in 0.5s\n")


def test_this_machine_is_described() -> None:
    found = machine()
    assert found["torch"] == torch.__version__
    assert (found["gpu"] is None) == (not torch.cuda.is_available())
