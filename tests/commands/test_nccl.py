"""`ringside nccl-plugin`, and `ringside run --nccl` beside a program that plays NCCL in the ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.native.nccl import LIBRARY, play_ranks

from ringside import _core
from ringside.commands import main, run
from ringside.errors import UnsupportedError
from ringside.monitor.nccl.report import NcclReport, read_reports
from ringside.processes import Death

from .recorded_launch import Recorded

pytestmark = pytest.mark.native


class Ranks(Recorded):
    """Ranks in which a program plays NCCL, when the command looks for the first time.

    Args:
        ranks: How many.
        mode: Of them.
    """

    def __init__(self, ranks: int, mode: str = "host", looks: int = 2, run: str = "") -> None:
        super().__init__(run, looks=looks)
        self._ranks, self._mode = ranks, mode

    def wait(self, timeout_s: float) -> int | None:
        if self._ranks:
            folder = Path(self.environ["RINGSIDE_NCCL_DIR"])
            play_ranks(Path(self.environ["NCCL_PROFILER_PLUGIN"]), folder, 6, 100, self._mode, range(self._ranks))
        self._ranks = 0
        return super().wait(timeout_s)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where rings go; what NCCL's variables say is nothing."""
    folder = tmp_path / "shared"
    folder.mkdir()
    monkeypatch.setenv("RINGSIDE_NCCL_DIR", str(folder))
    for name in ("NCCL_PROFILER_PLUGIN", "NCCL_DEBUG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return folder


def launched(words: Sequence[str] = ()) -> list[str]:
    return ["run", "--nccl", *words, "--run-dir", "run", "-n", "3", "train.py"]


def test_the_path_is_printed_as_nccl_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nccl-plugin"]) == 0
    path = Path(capsys.readouterr().out.removesuffix("\n"))
    assert path.is_absolute()
    assert path.name == LIBRARY
    assert path.exists()


def test_where_there_is_none_that_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_core, "NCCL_PLUGIN", "libmissing.so")
    assert main(["nccl-plugin"]) == 2
    assert "this installation has no libmissing.so: NCCL and its plugin exist on Linux only" in capsys.readouterr().err
    monkeypatch.delenv("NCCL_PROFILER_PLUGIN", raising=False)
    with pytest.raises(UnsupportedError):
        run.NcclRecording.begin(Path())


@pytest.mark.noisy
@pytest.mark.parametrize(("mode", "cause"), [("host", "late rank"), ("gpu", "slow GPU")])
def test_who_was_late_is_said_and_written(
    mode: str, cause: str, shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = Ranks(3, mode)
    ranks.instead_of(run, monkeypatch)
    assert main(launched()) == 0
    assert ranks.environ["NCCL_PROFILER_PLUGIN"] == str(_core.nccl_plugin())
    err = capsys.readouterr().err
    assert f"ringside run: NCCL: {cause}: the others waited " in err
    assert "for rank 1 (host " in err
    assert "ringside run: NCCL: slow link from rank 2 to rank 0: " in err
    written = json.loads(Path("run", "nccl.json").read_text())
    assert {blame["cause"] for blame in written["blames"]} == {cause, "slow link"}
    assert written["communicators"][0]["calls"] == 100
    assert list(shared.iterdir()) == []


def test_a_plugin_in_nccls_file_is_left_alone(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = shared.parent / "nccl.conf"
    file.write_text("NCCL_PROFILER_PLUGIN=inspector\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(file))
    ranks = Ranks(0)
    ranks.instead_of(run, monkeypatch)
    assert main(launched()) == 0
    assert "NCCL_PROFILER_PLUGIN" not in ranks.environ
    assert f"NCCL_PROFILER_PLUGIN is inspector in {file} and NCCL opens one plugin" in capsys.readouterr().err


@pytest.mark.noisy
def test_what_nccl_tells_is_in_the_run_while_it_goes_on_and_in_its_summary(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(3, "gpu", run="hosts")
    ranks.instead_of(run, monkeypatch)
    seen = []
    monkeypatch.setattr(run.NcclRecording, "end", _looking_first(run.NcclRecording.end, seen))
    assert main(launched()) == 0
    (live,) = seen
    assert {blame.cause for report in live for blame in report.blames} <= {"slow GPU", "slow link"}
    verdicts = json.loads(Path("run", "summary.json").read_text())["verdicts"]
    by_nccl = [verdict for verdict in verdicts if verdict["evidence"].get("by") == "NCCL's own records"]
    assert {(verdict["kind"], *verdict["ranks"]) for verdict in by_nccl} == {("slow_rank", 1), ("slow_link", 2, 0)}


def _looking_first(end: Any, seen: list[list[NcclReport]]) -> Any:
    def look(recording: run.NcclRecording) -> NcclReport:
        seen.append(read_reports(Path("run")))
        return end(recording)

    return look


def test_a_plugin_of_the_users_is_left_alone(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCCL_PROFILER_PLUGIN", "inspector")
    ranks = Ranks(0)
    ranks.instead_of(run, monkeypatch)
    assert main(launched()) == 0
    assert ranks.environ["NCCL_PROFILER_PLUGIN"] == "inspector"
    err = capsys.readouterr().err
    assert "NCCL_PROFILER_PLUGIN is inspector and NCCL opens one plugin: --nccl records nothing" in err


def test_without_shared_memory_training_goes_on(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RINGSIDE_NCCL_DIR", str(shared / "missing"))
    ranks = Ranks(0)
    ranks.instead_of(run, monkeypatch)
    assert main(launched()) == 0
    assert "NCCL_PROFILER_PLUGIN" not in ranks.environ
    assert "--nccl records nothing: there is no shared memory" in capsys.readouterr().err


def test_after_a_minute_without_records_that_is_said_once(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    moments = iter(range(0, 10_000, 50))
    monkeypatch.setattr(run.time, "monotonic", lambda: float(next(moments)))
    Ranks(0, looks=5).instead_of(run, monkeypatch)
    assert main(launched(["-q"])) == 0
    assert capsys.readouterr().err.count("NCCL has recorded nothing in the first minute: no communicator was made") == 1


def test_a_short_run_that_recorded_nothing_says_so_at_its_end(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Ranks(0).instead_of(run, monkeypatch)
    assert main(launched()) == 0
    assert capsys.readouterr().err.count("NCCL has recorded nothing: no communicator was made") == 1


def test_a_node_without_rank_0_writes_what_its_nccl_told(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = Ranks(0)
    ranks.deaths = [Death(3, 1, 1, 0)]
    ranks.instead_of(run, monkeypatch)
    assert main(launched()) == 0
    (written,) = Path("run").glob("nccl-*.json")
    assert json.loads(written.read_text())["processes"] == 0
    assert f"NCCL's records of this host: {written}" in capsys.readouterr().err


def test_no_folder_is_left_where_torchrun_does_not_start_or_reading_fails(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("refused")

    with monkeypatch.context() as patched:
        patched.setattr(run, "Launch", refuse)
        with pytest.raises(OSError, match="refused"):
            main(launched())
    assert list(shared.iterdir()) == []
    Ranks(0).instead_of(run, monkeypatch)
    monkeypatch.setattr(run.NcclWatch, "poll", refuse)
    with pytest.raises(OSError, match="refused"):
        main(launched())
    assert list(shared.iterdir()) == []


def test_surviving_records_nothing(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(launched(["--survive"])) == 2
    assert "leave out --nccl, --run-dir" in capsys.readouterr().err
