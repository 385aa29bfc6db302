from __future__ import annotations

import os
import signal
import time
import uuid
from pathlib import Path

import msgspec
import pytest
from tests.support.waiting import until

from ringside.bench import launch
from ringside.bench.launch import rank_commands, run_launches, run_ranks
from ringside.bench.messages import Begin, Done, Limit, Message, MessageReader, Sample, Skipped, WorkerHello, Writer
from ringside.bench.plan import COLLECTIVES, STEPS, BenchPlan, whole_items
from ringside.bench.result import merge
from ringside.errors import RingsideError
from ringside.processes import read_stat


def plan(**changed: object) -> BenchPlan:
    values = {"key": f"test/{uuid.uuid4()}", "ranks": 2, "sizes_bytes": (4, 65536), "rounds": 1, "cache_bytes": 1 << 20}
    return BenchPlan(**{**values, "iterations": 2, **changed})  # type: ignore[arg-type]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.native
def test_every_rank_reports_every_case():
    reports = run_ranks(plan(sizes_bytes=(8, 65536), dtype="float64", op="max"))
    for report in reports:
        kinds = [type(m) for m in report if not isinstance(m, Begin)]
        assert kinds == [WorkerHello, Limit, *[Sample] * 8, Limit, Done]
        samples = [m for m in report if isinstance(m, Sample)]
        assert {(s.size_bytes, s.cache, s.tensor) for s in samples} >= {
            (8, "warm", "private"),
            (65536, "cold", "symmetric"),
        }
        assert [s.wrong for s in samples] == [0] * 8
        begun = [(m.what, m.share) for m in report if isinstance(m, Begin)]
        assert begun[0] == ("the streaming limit", 0.0)
        assert list(dict.fromkeys(begun[1:])) == [
            ("8 B, warm: ringside", 0.0), ("8 B, cold: ringside", 0.25),
            ("64 KiB, warm: ringside", 0.5), ("64 KiB, cold: ringside", 0.75),
        ]  # fmt: skip


@pytest.mark.native
def test_a_rank_that_dies_is_named_and_the_others_end():
    pids: dict[int, int] = {}

    def kill_rank_1(rank: int, message: Message) -> None:
        if isinstance(message, WorkerHello):
            pids[rank] = message.pid
        if rank == 1 and isinstance(message, Begin):
            os.kill(pids[1], signal.SIGKILL)

    with pytest.raises(
        RingsideError, match=r"^rank 1 died \(SIGKILL\) while measuring .*; the other ranks were ended$"
    ):
        run_ranks(plan(iterations=10_000_000), kill_rank_1)
    assert not any(alive(pid) for pid in pids.values())


@pytest.mark.native
def test_an_interrupt_ends_every_rank():
    pids: list[int] = []

    def interrupt(rank: int, message: Message) -> None:
        if isinstance(message, WorkerHello):
            pids.append(message.pid)
        if isinstance(message, Begin):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_ranks(plan(iterations=10_000_000), interrupt)
    assert pids
    assert not any(alive(pid) for pid in pids)


@pytest.mark.native
def test_a_rank_that_fails_says_why():
    with pytest.raises(RingsideError, match=r"^rank \d failed .*: UsageError: there is no algorithm 'none'"):
        run_ranks(plan(algorithms=("none",)))


def test_mpi_takes_one_mpirun_and_nothing_else_does(tmp_path: Path):
    ((command, _),) = rank_commands(plan(ranks=3, peers=("mpi",)), tmp_path)
    assert Path(command[0]).name == "mpirun"
    assert command[command.index("-n") + 1] == "3"
    started = rank_commands(plan(ranks=3, peers=("gloo",)), tmp_path)
    assert [environment for _, environment in started] == [{"RANK": "0"}, {"RANK": "1"}, {"RANK": "2"}]


def test_open_mpi_has_a_directory_of_its_own_while_ranks_run_and_their_words_are_kept(monkeypatch: pytest.MonkeyPatch):
    places: list[tuple[Path, int]] = []

    def commands(asked: BenchPlan, directory: Path) -> list[tuple[list[str], dict[str, str]]]:
        assert msgspec.json.decode((directory / "plan.json").read_bytes(), type=BenchPlan) == asked
        memory = Path("/dev/shm", directory.name)
        places.append((memory, memory.stat().st_mode & 0o777 if memory.exists() else 0))
        (memory / "left").touch() if memory.exists() else None
        done = """echo '{"type":"Done"}' > """ + f"{directory}/rank-$RANK.jsonl"
        silent = "echo first >&2; echo the last words; exit 0" if asked.rounds == 2 else done
        return [(["sh", "-c", done if rank == 0 else silent], {"RANK": str(rank)}) for rank in range(2)]

    monkeypatch.setattr(launch, "rank_commands", commands)
    assert run_ranks(plan(peers=("mpi",))) == [[Done()], [Done()]]
    assert run_ranks(plan(peers=("gloo",))) == [[Done()], [Done()]]
    with pytest.raises(RingsideError, match=r"^rank 1 ended before it started; its last words: the last words$"):
        run_ranks(plan(rounds=2, peers=("mpi",)))
    assert [mode for _, mode in places] == [0o700, 0, 0o700]
    assert not any(memory.exists() for memory, _ in places)


@pytest.mark.native
@pytest.mark.parametrize("collective", [*COLLECTIVES, *STEPS])
def test_every_collective_of_ours_is_right(collective: str):
    sizes = whole_items((4, 65536), "float32", collective, 3)
    for report in run_ranks(plan(ranks=3, sizes_bytes=sizes, collective=collective)):
        wrong = [m.wrong for m in report if isinstance(m, Sample)]
        assert wrong
        assert not any(wrong)


@pytest.mark.native
def test_torch_tensors_go_to_what_users_of_torch_call():
    pytest.importorskip("torch")
    for report in run_ranks(plan(arrays=("numpy", "torch"), sizes_bytes=(4,))):
        samples = [m for m in report if isinstance(m, Sample)]
        assert [(s.array, s.tensor, s.wrong) for s in samples[:4]] == [
            (array, tensor, 0) for array in ("numpy", "torch") for tensor in ("symmetric", "private")
        ]


@pytest.mark.native
def test_a_peer_that_hangs_or_crashes_stops_no_other_and_wrong_sums_are_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    names = tuple(f"tests.bench.fake_peers:{name}" for name in ("hangs", "crashes", "refuses", "sums_wrong", "sums"))
    asked = plan(peers=names, sizes_bytes=(4, 1024), cache_bytes=1 << 12, hang_s=3.0)
    launches, failed = run_launches(asked)
    hung, crashed = failed
    assert hung == Skipped(names[0], f"hung while measuring 1 KiB, warm: {names[0]}: no rank reported for 3 s")
    assert (
        crashed.peer,
        "died (SIGSEGV) while measuring 1 KiB, warm: tests.bench.fake_peers:crashes" in crashed.reason,
    ) == (names[1], True)
    result = merge(asked, 2, launches, failed)
    assert [(s.peer, s.reason) for s in result.skipped[2:]] == [(names[2], "sum of float32: not here")]
    rows = {(row.sample.engine.rpartition(":")[2], row.sample.size_bytes): row.wrong for row in result.rows}
    assert rows == {
        ("ringside", 4): 0, ("ringside", 1024): 0, ("hangs", 4): 0, ("crashes", 4): 0,
        ("sums_wrong", 4): 2, ("sums_wrong", 1024): 2, ("sums", 4): 0, ("sums", 1024): 0,
    }  # fmt: skip
    measured = {names[0], names[1], names[3], names[4]}  # until then
    assert set(result.to_json()["rows"][0]["ratios"]) == measured


@pytest.mark.native
def test_where_no_peer_could_be_measured_beside_ours_is_measured_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    asked = plan(peers=("tests.bench.fake_peers:crashes",), sizes_bytes=(1024,), cache_bytes=1 << 12)
    launches, (crashed,) = run_launches(asked)
    assert "died (SIGSEGV)" in crashed.reason
    assert {row.sample.engine for row in merge(asked, 2, launches, [crashed]).rows} == {"ringside"}


@pytest.mark.parametrize("ignored", ["", "trap '' TERM; "])
def test_what_a_shell_that_starts_the_ranks_waits_for_ends_with_it(ignored: str, tmp_path: Path):
    ranks, log = launch.BenchRanks([MessageReader(tmp_path, 0)]), tmp_path / "log"
    with log.open("wb") as file:
        ranks.start(["sh", "-c", f"{ignored}sh -c 'echo $$; while :; do sleep 0.1; done'; true"], {}, file)
    while not log.read_text().strip():
        time.sleep(0.01)
    pid = int(log.read_text().split()[0])
    assert alive(pid)
    ranks.end()
    until(lambda: (found := read_stat(pid)) is None or found.state == "Z", "its end: it was killed")


def test_messages_are_read_while_they_are_written(tmp_path: Path):
    reader = MessageReader(tmp_path, 0)
    assert reader.read() == []
    writer = Writer(tmp_path, 0)
    writer.send(WorkerHello(7))
    assert reader.read() == [WorkerHello(7)]
    (path,) = tmp_path.iterdir()
    with path.open("ab", buffering=0) as file:
        file.write(b'{"type":"Be')
        assert reader.read() == []
        file.write(b'gin","what":"4 B","share":0.5}\n')
    assert reader.read() == [Begin("4 B", 0.5)]
    writer.close()
    reader.close()
