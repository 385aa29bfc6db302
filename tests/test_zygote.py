"""The Python that tests start programs with is, to whoever starts it and to the program, as Python is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.support import zygote
from tests.support.waiting import until

from ringside.processes import hold

TELLS = """
import atexit, json, os, sys, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.05), print("a thread"))).start()
def annotated(x: int): ...
words = [sys.argv, __name__, os.getcwd(), os.environ["MINE"], annotated.__annotations__["x"] is int]
print(json.dumps(words), file=sys.stderr)
print(sys.stdin.read())
sys.exit(7)
"""


def start(*words: object, **environ: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command, variables = [zygote.python(), *map(str, words)], {"MINE": "mine", **environ}
    return subprocess.Popen(command, env=variables, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize("how", ["script", "-m", "-c"])
def test_a_program_runs_from_its_main_to_the_end_of_its_interpreter(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tells.py"
    path.write_text(TELLS)
    monkeypatch.chdir(tmp_path)
    words, name = {"script": ([path], path), "-m": (["-u", "-m", "tells"], path), "-c": (["-c", TELLS], "-c")}[how]
    with start(*words, "--flag", "-m") as program:
        out, err = program.communicate("asked", timeout=60)
    assert json.loads(err) == [[str(name), "--flag", "-m"], "__main__", str(tmp_path), "mine", True]
    assert (program.returncode, out) == (7, "asked\na thread\nat exit\n")


def test_what_goes_wrong_is_a_traceback_and_a_status() -> None:
    with start("-c", "import nonesuch") as program:
        _, err = program.communicate(timeout=60)
    assert (program.returncode, err.splitlines()[-1]) == (1, "ModuleNotFoundError: No module named 'nonesuch'")
    for code, said in (("'words'", "words\n"), ("(1, 2)", "(1, 2)\n"), ("None", "")):
        with start("-c", f"raise SystemExit({code})") as program:
            assert program.communicate(timeout=60) == ("", said)
        assert program.returncode == (code != "None")
    with start("-c", "raise KeyboardInterrupt") as program:
        assert program.communicate(timeout=60)[1].endswith("KeyboardInterrupt\n")
    assert program.returncode == -signal.SIGINT


@pytest.mark.parametrize(
    ("words", "environ", "out"), [(["-u"], {}, "said"), ([], {"PYTHONUNBUFFERED": "1"}, "said"), ([], {}, "")]
)
def test_what_is_buffered_is_lost_with_a_program_that_is_killed(
    words: list[str], environ: dict[str, str], out: str
) -> None:
    code = "import os; print('said', end=''); os.kill(os.getpid(), 9)"
    with start(*words, "-c", code, **{"PYTHONUNBUFFERED": "", **environ}) as program:
        assert program.communicate(timeout=60)[0] == out


SLEEPS = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
CATCHES = f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); {SLEEPS}"


@pytest.mark.parametrize(
    ("code", "number", "status"),
    [(SLEEPS, signal.SIGTERM, -15), (SLEEPS, signal.SIGKILL, -9), (CATCHES, signal.SIGTERM, 5)],
)
def test_it_gets_the_signals_of_what_was_started_and_ends_with_it(code: str, number: int, status: int) -> None:
    with start("-c", code) as program:
        process = hold(int(program.stdout.readline()))
        program.send_signal(number)
        assert program.wait(60) == status
        assert process.wait(60)
        process.close()


def test_what_is_killed_itself_is_seen_as_killed() -> None:
    with start("-c", SLEEPS) as program:
        os.kill(int(program.stdout.readline()), signal.SIGKILL)
        assert program.wait(60) == -signal.SIGKILL


STARTS = """
import subprocess, sys
number = int(sys.argv[1])
tells = f"import os; os.write({number}, b'told'); print(os.listdir('/proc/self/fd'))"
subprocess.run([sys.executable, "-c", tells], pass_fds=[number])
"""


def test_it_inherits_descriptors_under_their_numbers_and_what_it_starts_is_forked_too() -> None:
    ours, theirs = os.pipe()
    command = [zygote.python(), "-c", STARTS, str(theirs)]
    done = subprocess.run(command, pass_fds=[theirs], capture_output=True, text=True, timeout=60)
    os.close(theirs)
    with os.fdopen(ours) as told:
        assert told.read() == "told", done.stderr
    own = {"0", "1", "2", str(theirs)}
    assert len(set(eval(done.stdout)) - own) == 1, "and that of the listing"


def test_a_flag_that_it_does_not_know_is_left_to_python() -> None:
    command = [zygote.python(), "-W", "error", "-c", "import warnings; warnings.warn('now')"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "UserWarning: now")


def test_its_processor_time_is_counted_when_it_has_ended() -> None:
    def spent() -> int:
        return sum(map(int, Path(f"/proc/{zygote.pid()}/stat").read_text().rpartition(")")[2].split()[13:15]))

    with start("-c", "pass") as program:
        program.communicate(timeout=60)
    before = spent()
    with start("-c", "import time\nwhile time.process_time() < 0.2: pass") as program:
        program.communicate(timeout=60)
    until(lambda: spent() >= before + 10, "its time")
