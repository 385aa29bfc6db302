from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import zygote
from tests.support.schemas import departures

from ringside.bench import launch, peers
from ringside.bench.plan import BenchPlan
from ringside.commands import bench, build_parser
from ringside.errors import RingsideError, UnsupportedError, UsageError

TINY = ("-n", "2", "--sizes", "4,4K", "--iterations", "2", "--rounds", "1")


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streaming limit takes memory by the cache, which is the whole machine's in some virtual ones: 480 MB."""
    monkeypatch.setattr(bench, "cache_bytes", lambda: 32 << 20)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forked; tests/bench/test_launch.py starts them as the command does, and so do tests of Open MPI."""
    monkeypatch.setattr(sys, "executable", zygote.python())


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def run(*argv: str) -> int:
    args = build_parser(verbs=("bench",)).parse_args(["bench", *argv])
    return int(args.command.run(args))


@pytest.mark.native
@pytest.mark.usefixtures("forked")
def test_ours_alone(capsys: pytest.CaptureFixture[str]):
    assert run(*TINY) == 0
    output, progress = capsys.readouterr()
    assert re.match(r"2 ranks on \d+ cores, float32 sum, in place\n +4 B: [\d.]+ [µm]s\n", output)
    rows = [line.split() for line in output.splitlines() if re.match(r" +\d+ +\d+ ringside", line)]
    assert [(row[0], row[3], row[4]) for row in rows[:2]] == [("4", "symm", "warm"), ("4", "priv", "warm")]
    assert all(row[-1] == "0" for row in rows)
    assert max(map(len, output.splitlines())) <= 80
    assert "starting 2 ranks, ours" in progress


@pytest.mark.native
@pytest.mark.usefixtures("forked")
@needs_torch
def test_beside_gloo_as_json(capsys: pytest.CaptureFixture[str]):
    assert run(*TINY, "--peers", "gloo", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert departures("bench", data) == []
    assert (data["schema"], data["ranks"], data["wrong"], data["skipped"]) == (1, 2, 0, [])
    assert data["stream_limit_bytes_per_second"] > 0
    assert {row["engine"] for row in data["rows"]} == {"ringside", "gloo"}
    assert all(row["wrong"] == 0 and row["time_seconds"] > 0 for row in data["rows"])
    ours = [row for row in data["rows"] if row["engine"] == "ringside"]
    assert all(list(row["ratios"]) == ["gloo"] for row in ours)
    assert (ours[0]["count"], ours[0]["type"], ours[0]["redop"], ours[0]["root"]) == (1, "float32", "sum", -1)


@pytest.mark.native
@pytest.mark.parametrize(("cores", "ranks"), [(1, 2), (2, 2), (3, 3)])
def test_there_are_as_many_ranks_as_cores_and_two_at_least(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int
) -> None:
    monkeypatch.setattr(bench, "usable_cores", lambda: cores)
    args = build_parser(verbs=("bench",)).parse_args(["bench", "--quick"])
    assert bench.make_plan(args)[0].ranks == ranks


def test_help_names_the_page(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        run("--help")
    told = capsys.readouterr().out
    assert "$ ringside bench -n 2 --peers gloo,mpi" in told
    assert "keys: docs/json.md" in " ".join(told.split())


@pytest.mark.native
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "changed",
    [("--algorithm", "ring,one_shot"), ("--dtype", "half", "--op", "avg"), ("-d", "int8", "-o", "bxor"), ("-n", "3")],
)
def test_other_algorithms_dtypes_and_ranks_are_right_too(changed: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    assert run(*TINY, *changed, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert departures("bench", data) == []
    if "--algorithm" in changed:
        assert {row["algorithm"] for row in data["rows"]} == {"ring", "one_shot"}


@pytest.mark.native
@pytest.mark.usefixtures("forked")
@needs_torch
def test_a_dtype_a_peer_cannot_do_is_said_and_ours_is_measured(capsys: pytest.CaptureFixture[str]):
    assert run(*TINY, "--dtype", "bfloat16", "--op", "avg", "--peers", "gloo", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert {row["type"] for row in data["rows"]} == {"bfloat16"}
    assert [skip["peer"] for skip in data["skipped"]] in (["gloo"], [])


@pytest.mark.native
def test_open_mpi_takes_part(capsys: pytest.CaptureFixture[str]):
    reason = peers.why_not("mpi")
    if reason:
        pytest.skip(reason)
    assert run(*TINY, "--sizes", "4", "--peers", "mpi", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["engine"] for row in data["rows"]] == ["ringside", "ringside", "mpi"]


@pytest.mark.native
def test_open_mpi_has_no_named_memory_while_it_is_measured_so_nobody_who_is_killed_leaves_any():
    if reason := peers.why_not("mpi"):
        pytest.skip(reason)
    before, seen = set(Path("/dev/shm").rglob("*")), []
    plan = BenchPlan(key="unnamed", ranks=2, sizes_bytes=(1024,), peers=("mpi",), iterations=5, rounds=1)
    launch.run_ranks(plan, lambda rank, message: seen.append(set(Path("/dev/shm").rglob("*")) - before))
    assert seen
    assert seen[-1] == set()
    assert set(Path("/dev/shm").rglob("*")) - before == set()


@pytest.mark.native
@pytest.mark.usefixtures("forked")
def test_a_peer_that_is_not_there_is_skipped_with_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(peers, "why_not", lambda *_: "mpirun is not installed")
    assert run(*TINY, "--sizes", "4", "--peers", "mpi") == 0
    output, progress = capsys.readouterr()
    assert output.splitlines()[-1] == "Open MPI skipped: mpirun is not installed"
    assert "Open MPI skipped: mpirun is not installed" in progress


@pytest.mark.native
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--peers", "nccl"), r"unknown peer 'nccl'; there are gloo, mpi, openmpi"),
        (("--dtype", "float8"), r"unknown dtype 'float8'; there are float32, float64"),
        (("--op", "median"), r"unknown reduction 'median'; there are sum"),
        (("--algorithm", "butterfly"), r"unknown algorithm 'butterfly'; there are auto, .*direct"),
        (("--sizes", "4,huge"), r"'huge' is not a size"),
        (("-b", "8", "-e", "4"), r"--min-bytes 8 is more than --max-bytes 4"),
        (("-n", "100000"), r"-n 100000: there can be 1 to"),
        (("-n", "0"), r"-n 0: there can be 1 to"),
        (("--iterations", "-1"), r"--iterations -1"),
        (("--collective", "all_gather,barrier"), r"--collective all_gather,barrier: one at a time"),
        (("--collective", ""), r"'' names no collective; there are all_reduce"),
        (("--arrays", ""), r"'' names no kind of array; there are numpy, torch"),
        (("--algorithm", ","), r"',' names no algorithm; there are auto"),
        (("--collective", "all_gather", "--algorithm", "ring,direct"), r"all_gather has none to choose"),
        (("--collective", "fsdp2", "--algorithm", "ring"), r"all_gather, reduce_scatter has none to choose"),
        (("-n", "4", "--sizes", "1000G"), r"take .* and .* are free"),
    ],
)
def test_what_cannot_be_is_refused_by_name(argv: tuple[str, ...], message: str):
    with pytest.raises(UsageError, match=message):
        run(*argv)


def test_bits_of_floats_are_not_reduced():
    with pytest.raises(UnsupportedError, match="bor of float32 is not defined"):
        run("--op", "bor")


@pytest.mark.native
def test_wrong_elements_and_dead_ranks_are_exit_status_1(monkeypatch: pytest.MonkeyPatch):
    def dead(*_: object) -> None:
        raise RingsideError("rank 1 died (SIGKILL)")

    monkeypatch.setattr(launch, "run_launches", dead)
    with pytest.raises(RingsideError) as caught:
        run(*TINY)
    assert caught.value.exit_status == 1


def test_the_command_line_itself_imports_no_peer():
    code = "import sys, ringside.commands.bench; sys.exit(bool({'torch', 'mpi4py'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
