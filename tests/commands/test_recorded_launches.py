"""`ringside demo`, `demo --kill` and `run` around a torchrun that has run already: what they start, say and return."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.commands.recorded_launch import Recorded
from tests.support.schemas import departures

from ringside.commands import demo, demo_kill, main
from ringside.commands import run as run_command
from ringside.engine.topology import usable_cores
from ringside.errors import RingsideError
from ringside.faults.inject import KINDS
from ringside.processes import Death

RUN = "demo --nproc-per-node 2 --seed 5 --steps 110 --run-dir here"
HEALTHY = f"{RUN} --inject none"
SLOW = "demo --nproc-per-node 8 --run-dir here --inject slow:rank=5,factor=1.3,from_step=30"
Call = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Call `ringside` in an empty directory; return its status and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr("ringside.view.terminal.LINE_EVERY_S", 1e9)  # one line, however slow this machine is

    def called(words: str) -> tuple[int, str, str]:
        status = main(words.split())
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return called


# ------------------------------------------------------------------------------------------------ ringside demo


def test_a_demo_of_a_healthy_run_says_that_nobody_was_named_rightly(call: Call, monkeypatch: pytest.MonkeyPatch):
    launch = Recorded("demo", ["[rank 0] hello"], looks=2).instead_of(demo, monkeypatch)
    status, out, err = call(HEALTHY)
    assert (status, out.splitlines()[-1]) == (0, "here")
    assert "Nothing was injected, and no rank was named: correct." in out
    assert re.search(r"^Loss 5\.\d\d → [23]\.\d\d nats per byte in 110 steps\.$", out, re.M)
    assert "The same training over Gloo, in turn with ours, 25 steps each (Gloo's time over ours):" in out
    assert re.search(r"^report +here/report.html\nsummary +here/summary.json$", out, re.M)
    assert "exit status" not in out
    assert err.splitlines() == ["00:00  the same training over Gloo for comparison: 90%"]
    assert Path("here", "torchrun.log").read_text() == "[rank 0] hello\n"
    assert launch.arguments == [
        "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2", "-m", "ringside.demo.train", "--steps=110",
        "--inject=none", "--compare=5", "--seed=5", "--size=small",
    ]  # fmt: skip
    assert launch.environ["OMP_NUM_THREADS"] == str(max(usable_cores() // 2, 1))
    assert (launch.environ["RINGSIDE"], launch.environ["RINGSIDE_LAUNCHED"]) == ("", "1")
    assert launch.ended == []


def test_what_is_asked_for_reaches_the_script_and_json_is_all_there_is(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    launch = Recorded("demo").instead_of(demo, monkeypatch)
    status, out, err = call(f"{HEALTHY} --size tiny --corpus {Path(demo.__file__).parent} --no-comparison --json")
    summary = json.loads(out)
    assert (status, summary["run_dir"], summary["steps"]) == (0, "here", 110)
    assert departures("report", summary) == []
    assert summary["injected"] == {"kind": "none", "ranks": [], "factor": None, "from_step": None}
    assert "Nothing was injected" in err
    assert launch.arguments[-2:] == ["--size=tiny", f"--corpus={Path(demo.__file__).parent}"]
    assert Path("here", "report.html").exists()


def test_a_fault_that_was_named_beside_others_is_right_and_one_that_was_not_is_wrong(
    call: Call, monkeypatch: pytest.MonkeyPatch
):
    Recorded("hosts", looks=2).instead_of(demo, monkeypatch)
    status, out, err = call(SLOW)
    assert status == 0
    assert "It was detected, and another rank too" in out
    assert [line[:44] for line in err.splitlines() if line.startswith("●")] == [
        "● rank 5 is 30% slower than the others since",
        "● the link 0 → 4 is slow since step 31: host",
        "● the replica of rank 3 drifted apart from t",
    ]
    Recorded("demo").instead_of(demo, monkeypatch)
    status, out, _ = call(f"{RUN}-too --inject slow:rank=1,factor=2.5,from_step=30")
    assert (status, "It was not detected in time." in out) == (1, True)


def test_the_log_is_shown_where_training_failed(call: Call, monkeypatch: pytest.MonkeyPatch):
    said = [f"line {k}" for k in range(40)]
    deaths = [Death(0, 1, 1, 0)]
    Recorded("demo", said, status=1, deaths=deaths).instead_of(demo, monkeypatch)
    status, out, _ = call(HEALTHY)
    assert (status, out.splitlines()[-1]) == (1, "here")
    assert "The training ended with exit status 1:\n  line 10\n" in out
    assert "line 9\n" not in out
    # a fault that ends ranks makes torchrun fail: that is what was asked for
    Recorded("demo", status=1, deaths=deaths).instead_of(demo, monkeypatch)
    _, out, _ = call(f"{RUN}-killed --inject kill:rank=1,at_step=60")
    assert "exit status" not in out
    # nobody knows of a rank that ended, or there is no record at all
    for number, run in enumerate(("demo", "")):
        Recorded(run, ["a traceback"], status=3).instead_of(demo, monkeypatch)
        status, _, err = call(f"{RUN}-{number} --inject none")
        assert (status, "the training failed with exit status 3:\n  a traceback" in err) == (1, True)


def test_a_record_that_is_gone_is_said(call: Call, monkeypatch: pytest.MonkeyPatch):
    Recorded().instead_of(demo, monkeypatch)
    status, out, err = call(HEALTHY)
    assert (status, out) == (1, "here\n")
    assert "its record in here is gone or not whole" in err
    assert call(f"{HEALTHY} --json")[:2] == (1, "")


@pytest.mark.parametrize(
    ("run", "message"), [("demo", "what was recorded is in here"), ("", "nothing was recorded in here")]
)
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_who_stops_a_demo_is_told_what_is_left(
    run: str, message: str, signum: int, status: int, call: Call, monkeypatch: pytest.MonkeyPatch
):
    def stop() -> str:
        os.kill(os.getpid(), signum)
        return "stopping"

    launch = Recorded(run, [stop], looks=100).instead_of(demo, monkeypatch)
    found, out, err = call(HEALTHY)
    assert (found, out, launch.ended) == (status, "here\n", [signum])
    assert f"ringside demo: stopped, all ranks have ended; {message}" in err
    if run:
        assert "injected" not in json.loads(Path("here", "summary.json").read_text())


@pytest.mark.parametrize(("fault", "ended"), [("hang", [signal.SIGTERM]), ("stop", [signal.SIGTERM]), ("kill", [])])
def test_a_hang_that_was_asked_for_and_named_is_ended_when_stacks_are_written(
    fault: str, ended: list[int], tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(demo, "STACKS_S", 0.0)
    hang = {"kind": "hang", "ranks": [1], "since_step": 60, "detected_step": 60, "excess_ratio": 0.0}

    def named() -> str:
        with Path("here", "events.jsonl").open("a") as events:
            events.write(json.dumps({"unix": 1.0, "kind": "verdict", "verdict": hang}) + "\n")
        return ""

    launch = Recorded("demo", [named], looks=4).instead_of(demo, monkeypatch)
    call(f"{RUN} --inject {fault}:rank=1,at_step=60")
    assert launch.ended == ended


def test_on_a_terminal_there_is_a_picture_and_no_lines(call: Call, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("LINES", "24")
    Recorded("hosts", looks=3).instead_of(demo, monkeypatch)
    _, _, err = call(SLOW)
    assert err.rfind("\x1b[?25h") > err.rfind("\x1b[?25l") >= 0, "the cursor is back"
    drawn = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", err)
    assert "demo: a byte-level GPT" in drawn
    assert "60 steps of at most 60" in drawn
    assert "● rank 5 is 30% slower than the others since step 30" not in drawn
    assert max(map(len, re.split(r"[\r\n]", drawn))) <= 80


def test_how_many_ranks_and_which_fault_nobody_need_say(call: Call, monkeypatch: pytest.MonkeyPatch):
    for cores, ranks in ((1, 2), (3, 3)):
        monkeypatch.setattr(demo, "usable_cores", lambda cores=cores: cores)
        launch = Recorded("demo").instead_of(demo, monkeypatch)
        call(f"demo --run-dir here-{cores} --seed 7")
        assert f"--nproc-per-node={ranks}" in launch.arguments
        fault = demo.draw(7, ranks, demo.STEPS)
        assert {"--steps=320", "--seed=7", f"--inject={fault}", "--calibrate-to=0.3"} <= set(launch.arguments)
        assert launch.environ["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("kind", ["slow", "input", "pause", "diverge"])
def test_of_a_fault_that_is_only_named_the_rest_is_drawn(kind: str, call: Call, monkeypatch: pytest.MonkeyPatch):
    launch = Recorded("demo").instead_of(demo, monkeypatch)
    call(f"{RUN} --inject {kind}")
    assert f"--inject={demo.draw(5, 2, 110, KINDS[kind])}" in launch.arguments
    assert ("--calibrate-to=0.3" in launch.arguments) == (kind == "slow")


def test_the_factor_of_the_calibration_is_the_one_that_is_revealed(call: Call, monkeypatch: pytest.MonkeyPatch):
    def calibrated() -> str:
        with Path("here", "events.jsonl").open("a") as events:
            events.write(
                json.dumps({"unix": 1.0, "kind": "calibrated", "factor": 1.43, "size": 0.3, "steps": 84}) + "\n"
            )
        return ""

    Recorded("demo", [calibrated]).instead_of(demo, monkeypatch)
    _, out, err = call(f"{RUN} --json")
    summary = json.loads(out)
    assert departures("report", summary) == []
    assert summary["injected"]["factor"] == summary["reveal"]["injected"]["factor"] == 1.43
    assert "43% more work in forward and backward" in err
    assert "  came to   rank " in err
    assert summary["reveal"]["came_to"]["steps"][1] > 8


def test_a_factor_that_is_given_is_taken_as_it_is(call: Call, monkeypatch: pytest.MonkeyPatch):
    launch = Recorded("demo").instead_of(demo, monkeypatch)
    call(f"{RUN} --inject slow:rank=1,factor=1.3,from_step=30")
    assert "--inject=slow:rank=1,factor=1.3,from_step=30" in launch.arguments
    assert not [word for word in launch.arguments if word.startswith("--calibrate")]


def test_the_tour_shows_five_and_leaves_out_what_cannot_be(call: Call, monkeypatch: pytest.MonkeyPatch):
    started: list[list[str]] = []

    def start(arguments: list[str], *given: object, **more: object) -> Recorded:
        launch = Recorded("demo").start(arguments, *given, **more)  # type: ignore[arg-type]
        started.append(launch.arguments)
        return launch

    monkeypatch.setattr(demo, "Launch", start)
    monkeypatch.setattr(demo.quota, "unavailable", lambda: "no cgroup here")
    monkeypatch.setattr(demo.Lab, "unavailable", staticmethod(lambda delay=False: "not root"))
    status, out, err = call("demo --all --nproc-per-node 2 --seed 5 --steps 110 --run-dir here --json")
    assert status == 1, "nothing of it was in the recorded run"
    summaries = json.loads(out)
    assert [one["injected"]["kind"] for one in summaries] == ["input", "pause", "diverge"]
    assert [one["run_dir"] for one in summaries] == ["here/input", "here/pause", "here/diverge"]
    assert "ringside demo: quota is left out: no cgroup here" in err
    assert "ringside demo: link is left out: not root" in err
    assert len(started) == 3
    assert not [word for words in started for word in words if word.startswith(("--compare", "--calibrate"))]
    status, _, err = call("demo --inject quota --run-dir alone")
    assert (status, err) == (2, "ringside demo: no cgroup here\n")
    status, _, err = call("demo --inject link --run-dir alone")
    assert (status, err) == (2, "ringside demo: not root\n")
    assert not Path("alone").exists()


def test_a_tour_goes_on_after_a_training_that_failed(call: Call, monkeypatch: pytest.MonkeyPatch):
    def demonstrate(args: argparse.Namespace) -> tuple[int, Path, dict[str, str]]:
        if args.inject == "quota":
            raise RingsideError("the training failed")
        return 0, args.run_dir, {"kind": args.inject}

    monkeypatch.setattr(demo, "demonstrate", demonstrate)
    status, out, err = call("demo --all --run-dir here --json")
    assert (status, [one["kind"] for one in json.loads(out)]) == (1, ["input", "link", "pause", "diverge"])
    assert "ringside demo: quota: the training failed" in err


def test_a_tour_that_is_stopped_goes_no_further(call: Call, monkeypatch: pytest.MonkeyPatch):
    def stop() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return ""

    Recorded("demo", [stop], looks=100).instead_of(demo, monkeypatch)
    status, out, _ = call("demo --all --nproc-per-node 2 --run-dir here")
    assert (status, out) == (130, "here/input\n")


def test_without_a_seed_two_demos_are_not_alike(call: Call, monkeypatch: pytest.MonkeyPatch):
    seeds = set()
    for number in range(2):
        launch = Recorded("demo").instead_of(demo, monkeypatch)
        call(f"demo --run-dir here-{number}")
        seeds |= {word for word in launch.arguments if word.startswith("--seed=")}
    assert len(seeds) == 2


# ------------------------------------------------------------------------------------------------ ringside demo --kill


SEED = 5
RANKS = 3
VICTIM = random.Random(SEED).randrange(RANKS)
OTHERS = [rank for rank in range(RANKS) if rank != VICTIM]
KILL = f"demo --kill --nproc-per-node {RANKS} --seed {SEED} --steps 40"


def mark(**said: object) -> Callable[[], str]:
    """Return what makes a worker's line: it says when."""
    return lambda: demo_kill.MARK + json.dumps({"at": time.monotonic(), **said})


def step(number: int, members: list[int]) -> Callable[[], str]:
    return mark(event="step", rank=0, step=number, loss=2.5, members=members, generation=1)


def ends(**said: object) -> list[Callable[[], str]]:
    usual = {"event": "end", "step": 60, "samples": 480, "lost": 0, "twice": 0, "digest": "00ab"}
    return [mark(**{**usual, "rank": rank, **(said if rank == 1 else {})}) for rank in range(RANKS)]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits to be killed."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def story(sleeper: subprocess.Popen[bytes], *, back: bool = True) -> list[str | Callable[[], str]]:
    whole = list(range(RANKS))
    pids = {rank: sleeper.pid if rank == VICTIM else 1 for rank in whole}

    def still() -> str:
        assert sleeper.poll() is None, "it was killed before training had settled"
        return step(15, whole)()

    return [
        "W0000 torchrun warns of something",
        *(mark(event="up", rank=rank, pid=pids[rank], joined=False) for rank in whole),
        step(0, whole), step(14, whole), step(13, OTHERS), still,
        step(16, OTHERS), "ringside survive: generation 2", step(17, OTHERS),
        *([mark(event="up", rank=VICTIM, pid=1, joined=True), step(18, whole), step(19, whole)] if back else []),
    ]  # fmt: skip


def shape(line: str) -> str:
    """Return a line without its numbers and units."""
    return re.sub(r"\d[\d.]*( (µs|ms|s)\b)?", "#", line)


def test_the_victim_is_killed_when_training_has_settled_and_its_return_is_told(
    call: Call, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
):
    launch = Recorded(lines=[*story(sleeper), *ends()], looks=40).instead_of(demo_kill, monkeypatch)
    status, out, err = call(KILL)
    assert sleeper.wait(30) == -signal.SIGKILL
    assert (status, out) == (0, "samples lost: 0\n")
    others = " and ".join(map(str, OTHERS))
    page = (Path(__file__).parents[2] / "docs" / "survive.md").read_text()
    shown = page.split("$ ringside demo --kill\n")[1].split("```")[0].splitlines()
    assert {shape(line) for line in shown if "was ended by" not in line} <= {shape(line) for line in err.splitlines()}
    told = re.sub(r"committed [\d.]+ (µs|ms|s) after", "committed (soon) after", err)
    assert told.splitlines() == [
        "the ranks are starting",
        f"● rank {VICTIM} is killed (SIGKILL) during step 16",
        f"● step 16 is committed (soon) after the kill: ranks {others} computed rank {VICTIM}'s samples too",
        "● generation 2",
        f"● rank {VICTIM} has been started again and asks to join",
        f"● rank {VICTIM} is back since step 18, with everybody's state",
        "samples trained: 480, lost: 0, steps counted twice: 0",
        "The state of all 3 ranks is the same to the bit (00ab).",
    ]
    assert launch.arguments == [
        "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=3", "-m", "ringside.survive", "-m",
        "ringside.demo.survive", "--steps=400", f"--seed={SEED}", "--size=small",
    ]  # fmt: skip
    assert launch.environ["OMP_NUM_THREADS"] == str(max(usable_cores() // 3, 1))


@pytest.mark.parametrize(
    ("end", "back", "status"),
    [
        ({}, True, 0), ({"lost": 2}, True, 1), ({"twice": 1}, True, 1), ({"digest": "00ac"}, True, 1), ({}, False, 1),
    ],
)  # fmt: skip
def test_what_was_lost_is_the_exit_status_and_in_json(
    end: dict[str, object], back: bool, status: int,
    call: Call, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    Recorded(lines=[*story(sleeper, back=back), *ends(**end)], looks=40).instead_of(demo_kill, monkeypatch)
    found, out, err = call(f"{KILL} --json")
    data = json.loads(out)
    assert departures("demo-kill", data) == []
    assert (found, data["killed"], data["back"], data["samples"]) == (status, VICTIM, back, 480)
    assert (data["lost"], data["twice"]) == (end.get("lost", 0), end.get("twice", 0))
    assert data["digests"] == sorted({"00ab", str(end.get("digest", "00ab"))})
    assert data["seconds"] > 0
    assert ("NOT the same" in err) == ("digest" in end)


def test_training_that_failed_ends_with_what_it_wrote_last(call: Call, monkeypatch: pytest.MonkeyPatch):
    for status in (0, 1):  # without an end there is nothing to conclude from
        Recorded(lines=[f"line {k}" for k in range(40)], status=status).instead_of(demo_kill, monkeypatch)
        found, _, err = call(KILL)
        assert found == 1
        assert f"the training failed with exit status {status}:\nline 10\nline 11\n" in err
        assert "line 9\n" not in err


def test_who_stops_it_gets_the_signals_status(call: Call, monkeypatch: pytest.MonkeyPatch):
    def stop() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return ""

    launch = Recorded(lines=[stop], looks=100).instead_of(demo_kill, monkeypatch)
    assert call(KILL)[0] == 130
    assert launch.ended == [signal.SIGINT]


def test_who_stops_what_has_just_ended_by_itself_ends_nothing(call: Call, monkeypatch: pytest.MonkeyPatch):
    launch = Recorded(lines=ends(), status=7).instead_of(demo_kill, monkeypatch)
    wait = launch.wait

    def stop_at_the_end(timeout_s: float) -> int | None:
        status = wait(timeout_s)
        if status is not None:
            os.kill(os.getpid(), signal.SIGINT)
        return status

    monkeypatch.setattr(launch, "wait", stop_at_the_end)
    assert call(KILL)[0] == 130
    assert launch.ended == []


def test_on_a_terminal_the_newest_step_stands_below_the_news(
    call: Call, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    again = mark(event="step", rank=1, step=19, loss=9.0, members=[], generation=1)  # another rank tells of it, too
    Recorded(lines=[*story(sleeper), again, *ends()], looks=40).instead_of(demo_kill, monkeypatch)
    status, _, err = call(KILL)
    drawn = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", err)
    assert status == 0
    assert "step   19  loss 2.500  ranks 0-2" in drawn
    assert "9.000" not in drawn
    assert f"● rank {VICTIM} is back since step 18" in drawn


def test_three_ranks_are_the_least_that_nobody_asked_for(call: Call, monkeypatch: pytest.MonkeyPatch):
    for cores, ranks in ((2, 3), (5, 5)):
        monkeypatch.setattr(demo_kill, "usable_cores", lambda cores=cores: cores)
        launch = Recorded(status=1).instead_of(demo_kill, monkeypatch)
        call("demo --kill")
        assert f"--nproc-per-node={ranks}" in launch.arguments
        assert f"--steps={10 * demo.STEPS}" in launch.arguments


# ------------------------------------------------------------------------------------------------ ringside run


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("")
    return path


def test_a_run_is_watched_and_told(call: Call, script: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    launch = Recorded("hosts", looks=2).instead_of(run_command, monkeypatch)
    status, out, err = call("run --run-dir here --digest-every 50 --nproc-per-node 8 train.py --epochs 3")
    assert (status, out) == (0, "here\n")
    told = [line for line in err.splitlines() if line.startswith("ringside run: ")]
    assert [line[:50] for line in told] == [
        "ringside run: watching 8 ranks, recording to here ",
        "ringside run: ● rank 5 is 30% slower than the othe",
        "ringside run: ● the link 0 → 4 is slow since step ",
        "ringside run: ● the replica of rank 3 drifted apar",
    ]
    assert re.search(r"^report +here/report.html\nsummary +here/summary.json$", err, re.M)
    assert launch.arguments == ["--standalone", "--nproc-per-node", "8", "train.py", "--epochs", "3"]
    autoload, before = launch.environ["PYTHONPATH"].split(os.pathsep)
    assert (Path(autoload, "sitecustomize.py").exists(), before) == (True, "/elsewhere")
    assert (launch.environ["RINGSIDE_AUTOLOAD"], launch.environ["RINGSIDE_DIGEST_EVERY"]) == ("1", "50")


@pytest.mark.parametrize("status", [0, 3])
def test_the_status_is_torchruns(status: int, call: Call, script: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    launch = Recorded("demo", status=status).instead_of(run_command, monkeypatch)
    assert call("run --run-dir here train.py")[:2] == (status, "here\n")
    assert os.pathsep not in launch.environ["PYTHONPATH"]


@pytest.mark.parametrize(
    ("deaths", "message", "out"),
    [
        ((), "nothing was recorded: no rank made a DistributedDataParallel model and trained it", "here\n"),
        ((0, 1), "nothing was recorded: no rank made a DistributedDataParallel model and trained it", "here\n"),
        ((2, 3), "the run is recorded on the host of rank 0; here ran ranks 2 and 3", ""),
    ],
)
def test_where_nothing_was_recorded_it_is_said_why(
    deaths: tuple[int, ...], message: str, out: str, call: Call, script: Path, monkeypatch: pytest.MonkeyPatch
):
    Recorded(status=1, deaths=[Death(rank, 1, 1, 0) for rank in deaths]).instead_of(run_command, monkeypatch)
    ended = "the job failed: of the ranks on this node, rank {} ended first, with exit status 1"
    failure = f"ringside run: {ended.format(deaths[0])}\n" if deaths else ""
    assert call("run --quiet --run-dir here train.py") == (1, out, f"ringside run: {message}\n{failure}")
    assert Path("here").exists() == bool(out)
