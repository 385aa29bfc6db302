from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
from tests.support.schemas import departures

from ringside.commands import build_parser, main
from ringside.lab import Lab
from ringside.lab.namespaces import namespaces_there

needs_lab = pytest.mark.skipif(bool(Lab.unavailable()), reason=Lab.unavailable())


@needs_lab
def test_lines_are_prefixed_and_the_first_failing_status_is_returned(capsys: pytest.CaptureFixture[str]):
    argv = [
        "lab",
        "--hosts",
        "2",
        "--ranks-per-host",
        "2,1",
        "--",
        "sh",
        "-c",
        "echo out; echo err >&2; exit $GROUP_RANK",
    ]
    assert main(argv) == 1
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[rank 0 host 0] out", "[rank 1 host 0] out", "[rank 2 host 1] out"]
    assert "[rank 1 host 0] err" in err
    assert "ringside lab: rank 2 on host 1 ended with status 1" in err


@needs_lab
@pytest.mark.parametrize("wiring", ["star", "mesh"])
def test_json(capsys: pytest.CaptureFixture[str], wiring: str):
    options = ["--hosts", "2", "--rate", "250mbit", "--delay", "1ms", "--wiring", wiring, "--json"]
    if reason := Lab.unavailable(delay=True):
        pytest.skip(reason)
    assert main(["lab", *options, "--", "echo", "--json"]) == 0
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert "[rank 0 host 0] --json" in err
    assert summary["wiring"] == wiring
    assert summary["rate_bits_per_second"] == 250e6
    assert summary["delay_seconds"] == 1e-3
    assert [rank["status"] for rank in summary["ranks"]] == [0, 0]
    assert [host["host"] for host in summary["hosts"]] == [0, 1]
    assert departures("lab", summary) == []


@needs_lab
def test_ranks_that_take_too_long_are_ended(capsys: pytest.CaptureFixture[str]):
    assert main(["lab", "--hosts", "1", "--timeout", "0.3", "--json", "--", "sleep", "600"]) == 128 + signal.SIGTERM
    out, err = capsys.readouterr()
    assert json.loads(out)["timed_out"] is True
    assert "was ended by the lab" in err


@needs_lab
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(signum: int):
    command = [sys.executable, "-m", "ringside", "lab", "--hosts", "2", "--", "sh", "-c", "echo $$; exec sleep 600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            pids = [int(child.stdout.readline().split()[-1]) for _ in range(2)]
            child.send_signal(signum)
            _, err = child.communicate(timeout=30)
        finally:
            child.kill()
    assert child.returncode == 128 + signum
    assert "Traceback" not in err
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert not [name for name in namespaces_there() if name.startswith(f"ringside-{child.pid}-")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--hosts 0 -- true", "0 hosts: a lab has 1 to 250"),
        ("--rate '1 elephant' -- true", "rate '1 elephant'"),
        ("--delay soon -- true", "delay 'soon'"),
        ("--wiring ring -- true", "unknown wiring 'ring'; there are star, mesh"),
        ("--ranks-per-host many -- true", "--ranks-per-host many"),
        ("--hosts 4 --ranks-per-host 1,2 -- true", "given for 2 hosts, and there are 4"),
        ("--timeout 0 -- true", "--timeout 0"),
        ("--hosts 2", "there is no command to run"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str], words: str, message: str):
    assert main(["lab", *shlex.split(words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ringside lab: ")
    assert message in line


def test_where_there_is_no_lab_the_reason_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Lab, "unavailable", staticmethod(lambda delay=False: "the lab needs root"))
    assert main(["lab", "--", "true"]) == 2
    assert capsys.readouterr().err == "ringside lab: the lab needs root\n"


def test_help_has_an_example_that_parses(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["lab", "--help"])
    plain, listed = re.findall(r"\$ ringside (lab .*)", capsys.readouterr().out)
    args = build_parser(verbs=("lab",)).parse_args(shlex.split(plain))
    assert args.command_line[-4:] == ["python", "train.py", "--epochs", "3"]
    assert args.hosts == 4
    assert build_parser(verbs=("lab",)).parse_args(shlex.split(listed)).ranks_per_host == "3,2,4"
