"""Keepers whose workers end time after time: they give up with a reason and a status, and no final state is lost."""

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.survive.counting import Counting

from ringside.errors import RingsideError
from ringside.launch.torchrun import StopRequest
from ringside.survive.cluster import store_host
from ringside.survive.state.kept import Head, Kept, Stage
from ringside.survive.supervisor import Supervisor, end

torch = pytest.importorskip("torch")

from ringside.survive import final_state  # noqa: E402
from ringside.survive.state.final import Final  # noqa: E402
from ringside.survive.state.state import JobState  # noqa: E402


class NoStop:
    signum = 0


class Failing(Supervisor):
    """A keeper whose worker ends with a status, each time after a while."""

    def __init__(self, status):
        super().__init__(["train.py"], {"RANK": "0"})
        self.status = status

    def _run_once(self, stop):
        self.starts += 1
        return self.status


@pytest.mark.parametrize(("status", "most", "told"), [(1, 3, 1), (-signal.SIGSEGV, 3, 139), (-signal.SIGKILL, 10, 137)])
def test_a_worker_that_never_comes_to_a_step_is_not_started_for_ever_however_long_a_start_takes(
    status, most, told, monkeypatch, capsys
):
    hours = itertools.count(0.0, 3600.0)
    monkeypatch.setattr("time.monotonic", lambda: next(hours))
    keeper = Failing(status)
    assert keeper.run(NoStop()) == told
    assert keeper.starts == most
    assert f"{most} times in a row without the job having come further" in capsys.readouterr().err


def kept_at_the_end(directory):
    """Return memory as the worker of a job that was over left it."""
    model = Counting(8)
    torch.nn.init.constant_(model.counts, 3.0)
    state = JobState(model, torch.optim.SGD(model.parameters(), lr=1.0))
    state.step = 7
    kept = Kept()
    final = Final(kept, directory)
    final.keep(state)
    final.agree(attended=True)
    return kept


def run_keeper(kept, *words):
    script = Path(__file__).parent / "scripts" / "kept_worker.py"
    return Supervisor([str(script), *words], {**os.environ, "RANK": "0"}, kept=kept).run(NoStop())


def test_last_lines_that_fail_each_time_leave_the_final_state_in_a_file_that_is_named(tmp_path, capfd):
    status = run_keeper(kept_at_the_end(tmp_path), "fails")
    out, err = capfd.readouterr()
    assert status == 1
    assert out.splitlines() == [f"start {number} OVER 7" for number in (1, 2, 3)]
    path = Path(re.search(r"lies in (\S+\.ringside): ringside.survive.final_state reads it", err)[1])
    assert path.parent == tmp_path
    assert path.stat().st_mode & 0o777 == 0o600
    state = final_state(path)
    assert (state["step"], state["model"]["counts"].tolist()) == (7, [3.0] * 8)


def test_a_file_of_a_final_state_that_is_damaged_is_refused(tmp_path):
    kept = kept_at_the_end(tmp_path)
    path = Path(kept.save())
    kept.close()
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", whole[:-40] + b"xyz" + whole[-37:]):
        path.write_bytes(damaged)
        with pytest.raises(RingsideError, match="no file of a final state, or not whole"):
            final_state(path)
    with pytest.raises(RingsideError, match="cannot be read"):
        final_state(tmp_path / "none")


def test_last_lines_that_end_well_leave_nothing(tmp_path, capfd):
    assert run_keeper(kept_at_the_end(tmp_path), "is killed once") == 0
    assert capfd.readouterr().out.splitlines() == ["start 1 OVER 7", "start 2 OVER 7"]
    assert list(tmp_path.iterdir()) == []


def test_where_rank_0_does_not_come_the_status_says_so():
    kept = Kept()
    kept.head = Head(stage=Stage.UNATTENDED)
    assert run_keeper(kept, "ends") == 76


OPEN = """
import os
links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
print(sum("survive-kept" in os.readlink(link) for link in links if os.path.islink(link)))
"""


def test_what_a_keeper_keeps_is_not_given_to_processes_that_its_worker_starts(tmp_path, capfd):
    (tmp_path / "open.py").write_text(OPEN)
    assert run_keeper(kept_at_the_end(tmp_path), "starts", str(tmp_path / "open.py")) == 0
    assert capfd.readouterr().out.splitlines()[1:] == ["0"]


def test_a_keeper_imports_neither_torch_nor_numpy():
    words = "import ringside.survive.supervisor, sys; print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_worker_that_is_refused_after_the_end_does_not_take_the_final_state_with_it(tmp_path, capfd):
    """Its script was edited, say, while its last lines ran for the first time."""
    status = run_keeper(kept_at_the_end(tmp_path), "is refused")
    assert status == 76
    told = re.search(
        r"is refused.*lies in (\S+\.ringside): ringside.survive.final_state reads it", capfd.readouterr().err
    )
    assert final_state(told[1])["step"] == 7


class Slow:
    """A worker that does not end when it is asked to, as far as a keeper sees of it."""

    def __init__(self):
        self.did, self.waited = [], []

    def send_signal(self, signum):
        self.did.append(signum)

    def kill(self):
        self.did.append("kill")

    def wait(self, timeout=None):
        self.waited.append(timeout)
        if timeout is not None:
            raise subprocess.TimeoutExpired("train.py", timeout)
        return -signal.SIGKILL


@pytest.mark.parametrize(("environ", "given_s"), [({}, 30.0), ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "90"}, 90.0)])
def test_a_worker_that_is_told_to_stop_has_most_of_the_time_that_torchrun_gives(environ, given_s):
    worker = Slow()
    assert end(worker, signal.SIGTERM, environ) == -signal.SIGKILL
    assert worker.did == [signal.SIGTERM, signal.SIGCONT, "kill"]
    assert 0.8 * given_s < worker.waited[0] < given_s, "what is left is for the final state"


class Stopped(Supervisor):
    """A keeper that is told to stop while its worker runs, which ends with a status then."""

    def __init__(self, rank, status, kept):
        super().__init__(["train.py"], {"RANK": str(rank)}, kept=kept)
        self.status = status

    def _run_once(self, stop):
        stop.handle(signal.SIGTERM, None)
        return self.status


@pytest.mark.parametrize(("rank", "status", "saved"), [(0, -15, 1), (0, 0, 0), (1, -15, 0)])
def test_a_stop_in_the_last_lines_of_rank_0_leaves_the_final_state_in_a_file(tmp_path, capsys, rank, status, saved):
    assert Stopped(rank, status, kept_at_the_end(tmp_path)).run(StopRequest()) == 128 + signal.SIGTERM
    assert len(list(tmp_path.iterdir())) == saved
    assert (
        "rank 0 was stopped before its last lines were done; the final state (step 7) lies in"
        in capsys.readouterr().err
    ) == saved


def test_a_stop_in_the_middle_of_a_job_leaves_nothing(tmp_path, capsys):
    kept = Kept()
    assert Stopped(0, -15, kept).run(StopRequest()) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == ""


def test_a_store_whose_port_is_taken_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(store_host, "die_with_parent", lambda *_: None)
    with socket.create_server(("0.0.0.0", 0)) as taken:
        assert store_host.main([str(taken.getsockname()[1])]) == 1
    assert "two jobs share MASTER_PORT" in capsys.readouterr().err
