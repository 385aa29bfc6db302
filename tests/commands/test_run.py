import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ringside.autoload
from ringside.commands import main
from ringside.commands.run import failure_line, start_line
from ringside.errors import UsageError
from ringside.launch.torchrun import SWITCHES, parse_command_line
from ringside.processes import Death

from . import launched

pytest.importorskip("torch")

AUTOLOAD = Path(ringside.autoload.__file__).parent

PLAIN = """
import argparse, os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--run-dir")
options = parser.parse_args()
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(64, 64))
{hook}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(options.steps):
    {inside}
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    # In one write: the ranks share the pipe.
    os.write(1, f"done {{options.steps}} {{options.run_dir}} {{dist.get_world_size()}}\\n".encode())
{end}
dist.destroy_process_group()
"""
# The group ends with whoever has it last; where that is the interpreter, torch may abort (sync/gloo_at_exit.py).
LETS_GO = "import gc; del model, optimizer; gc.collect()"
OWN_HOOK = """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
calls = []
def mine(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    calls.append(bucket.index())
    return default_hooks.allreduce_hook(state, bucket)
model.register_comm_hook(None, mine)
import atexit
atexit.register(lambda: os.write(1, f"hook was called {bool(calls)}\\n".encode()))
"""


SHARDED = """
import os, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("ringside")
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def script(tmp_path, hook="", inside="pass", end=""):
    path = tmp_path / "train.py"
    path.write_text(PLAIN.format(hook=hook, inside=inside, end=end))
    return path


def watch(tmp_path, run, *words, **how):
    path = tmp_path / "run"
    status, out, err = run("run", "--run-dir", path, *words, **how)
    assert out.splitlines()[-1:] == [str(path)], err
    return status, out, err, path


@pytest.mark.native
def test_an_unmodified_script_without_ddp_is_watched_by_its_groups(tmp_path, command):
    (tmp_path / "train.py").write_text(SHARDED)
    status, _, err, path = watch(tmp_path, command, "--nproc-per-node", 2, tmp_path / "train.py")
    assert status == 0, err
    records = [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]
    assert {record["step"] for record in records} == set(range(19)), "from the second step on"
    assert all(record["exposed_seconds"] > 0 and record["groups"] for record in records)


@pytest.mark.core
def test_an_unmodified_script_is_watched_with_its_arguments_untouched(tmp_path):
    """The one that is started as a user starts it, with torchrun; into a directory whose name is no text."""
    path = tmp_path / os.fsdecode(b"run-\xff\xfe")
    train = script(tmp_path, end='os.write(2, b"said on stderr\\n")')
    words = ("--run-dir", path, "--digest-every=5", "--nproc_per_node", 2, train, "--steps", 50, "--run-dir", "its own")
    status, out, err = launched.run("run", *words)
    assert status == 0, err
    assert out.splitlines()[-1] == str(path)
    assert "done 50 its own 2" in out
    assert err.count("said on stderr") == 2
    found = launched.summary(path)
    assert found["steps"] == 50
    assert found["world_size"] == 2
    assert found["sync"]["payload_bytes_per_step"] == 4 * (64 * 64 + 64)
    assert "own vs others' median" in err
    assert "/report.html" in err
    assert "Traceback" not in err
    assert "hang watch stopped" not in err


def test_what_ranks_recorded_is_reported_beside_it(tmp_path, command):
    status, out, err, path = watch(tmp_path, command, "--nproc_per_node", 2, script(tmp_path), "--steps", 12)
    assert status == 0, err
    assert "done 12" in out
    assert str(path / "report.html") in err


def test_a_script_alone_needs_no_flag():
    line = parse_command_line(["train.py", "--nproc-per-node", "none"])
    line.check_ranks()
    assert (line.flags, line.script) == ((), ("train.py", "--nproc-per-node", "none"))


def test_how_often_to_compare_is_a_whole_number(tmp_path, command):
    status, out, err = command("run", "--digest-every", "often", script(tmp_path))
    assert (status, out) == (2, "")
    assert "whole number of steps" in err
    assert len(err.splitlines()) == 1


@pytest.mark.long
def test_a_module_is_watched_too(tmp_path):
    script(tmp_path)
    status, out, err, path = watch(
        tmp_path, launched.run, "--nproc-per-node=2", "-m", "train", "--steps", 12, cwd=tmp_path
    )
    assert status == 0, err
    assert "done 12" in out
    assert launched.summary(path)["steps"] == 12


@pytest.mark.long
def test_a_script_with_its_own_hook_keeps_it_and_is_only_watched(tmp_path):
    status, out, err, path = watch(tmp_path, launched.run, "--nproc-per-node=2", script(tmp_path, hook=OWN_HOOK))
    assert status == 0, err
    assert out.count("hook was called True") == 2
    assert launched.summary(path)["steps"] == 40


def test_a_script_that_fails_keeps_its_traceback_and_status(tmp_path, command):
    fails = script(tmp_path, inside="assert step < 20, 'something broke'")
    status, _, err, path = watch(tmp_path, command, "--nproc-per-node=2", fails)
    assert status == 1
    assert "AssertionError: something broke" in err
    assert launched.summary(path)["steps"] > 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--run-dir", "run", "--nproc-per-node=2", "nosuch.py"], "no script"),
        (["--survive", "--nproc-per-node=2", "nosuch.py"], "no script"),
        (["--nosuchflag", "train.py"], "'train.py' was taken for the value of --nosuchflag"),
        (["--nproc-per-node", "0", __file__], "takes a number from 1 on, or one of auto, cpu, gpu, xpu, not '0'"),
        (["--nproc_per_node=two", __file__], "not 'two'"),
        (["--nproc-per-node=2", "--survive", "--run-dir=run", "train.py"], "leave out --run-dir"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(tmp_path, monkeypatch, capsys, words, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["run", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert why in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_script_without_a_model_is_said_to_have_none(tmp_path, command):
    (tmp_path / "train.py").write_text("print('hello')")
    status, out, err, _ = watch(tmp_path, command, "--nproc-per-node=2", tmp_path / "train.py")
    assert status == 0
    assert out.count("hello") == 2
    assert "nothing was recorded" in err


def test_a_failing_attachment_is_said_once_and_harms_nobody(tmp_path, command):
    train = script(tmp_path, end=LETS_GO)
    status, out, err, _ = watch(tmp_path, command, "--nproc-per-node=2", train, RINGSIDE_ENGINE="nonsense")
    assert status == 0, err
    assert "done 40" in out
    assert err.count("this model is not watched") == 1


def test_ctrl_c_ends_every_rank(tmp_path, command):
    path = tmp_path / "run"
    words = ("run", "--run-dir", path, "--nproc-per-node=2", script(tmp_path), "--steps", 10_000_000)
    status, out, _ = command(*words, stopped=signal.SIGINT, when=lambda: launched.has_steps(path))
    assert status == 130
    assert command.launch.ended == [signal.SIGINT]
    assert launched.gone(path)
    assert out.splitlines()[-1] == str(path)
    assert launched.summary(path)["steps"] > 0


def test_a_killed_rank_is_named(tmp_path, command):
    killed = script(tmp_path, inside="os.environ['RANK'] == '1' and step == 30 and os.kill(os.getpid(), 9)")
    status, _, err, path = watch(tmp_path, command, "--nproc-per-node=2", killed)
    assert status == 1
    (verdict,) = launched.summary(path)["verdicts"]
    assert (verdict["kind"], verdict["ranks"]) == ("dead_rank", [1])
    assert "rank 1 died" in err


def python(code, *first, **environ):
    variables = {key: value for key, value in os.environ.items() if key not in ("RANK", "PYTHONPATH")}
    variables["PYTHONPATH"] = os.pathsep.join(map(str, first))
    done = subprocess.run(
        [sys.executable, "-c", code], env={**variables, **environ}, capture_output=True, text=True, timeout=100
    )
    return done.stdout.split(), done.stderr


def test_the_sitecustomize_that_is_hidden_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os; HERE = 1; os.environ['CHAINED'] = 'yes'")
    code = "import os, sitecustomize; print(os.environ.get('CHAINED'), sitecustomize.HERE)"
    assert python(code, AUTOLOAD, tmp_path) == (["yes", "1"], "")


def test_processes_that_are_no_ranks_are_left_alone():
    code = (
        "import sys; print('ringside' in sys.modules, len([f for f in sys.meta_path if 'Finder' == type(f).__name__]))"
    )
    assert python(code, AUTOLOAD, RINGSIDE_AUTOLOAD="1")[0][0] == "False"
    assert python(code, AUTOLOAD, RANK="0")[0][0] == "False"
    assert python(code, AUTOLOAD, RINGSIDE_AUTOLOAD="1", RANK="0")[0] == ["True", "0"]


def test_a_rank_that_never_imports_torch_does_not_get_it():
    code = "import sys; print('torch' in sys.modules)"
    assert python(code, AUTOLOAD, RINGSIDE_AUTOLOAD="1", RANK="0") == (["False"], "")


def test_the_class_is_changed_once_when_torch_comes():
    code = (
        "import torch; from torch.nn.parallel import DistributedDataParallel as D; "
        "from ringside.autoload.ringside_autoload import install; first = D.__init__; install(); "
        "print(first._ringside, D.__init__ is first)"
    )
    assert python(code, AUTOLOAD, RINGSIDE_AUTOLOAD="1", RANK="0") == (["True", "True"], "")


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("train.py", "--nproc-per-node=7 --standalone train.py"),
        ("--nproc_per_node 2 train.py --nnodes 3", "--standalone --nproc_per_node 2 train.py --nnodes 3"),
        ("--nnodes=2 --node-rank 1 train.py", "--nproc-per-node=7 --nnodes=2 --node-rank 1 train.py"),
        ("-n 2 train.py -n 3", "--standalone --nproc-per-node 2 train.py -n 3"),
        ("-n2 --nnodes=2 train.py", "--nproc-per-node=2 --nnodes=2 train.py"),
        ("-n=gpu train.py", "--standalone --nproc-per-node=gpu train.py"),
        ("-m pkg.train -x", "--nproc-per-node=7 --standalone -m pkg.train -x"),
        ("--run-dir d --rdzv_backend x -- a.py --run-dir e", "--nproc-per-node=7 --rdzv_backend x a.py --run-dir e"),
        ("--run-dir=d --standalone train.py", "--nproc-per-node=7 --standalone train.py"),
    ],
)  # fmt: skip
def test_flags_are_passed_on_as_they_are(words, given):
    line = parse_command_line(words.split(), ours=("--run-dir",), environ={})
    assert line.with_defaults("7") == given.split()
    assert line.ours == ({"--run-dir": "d"} if words.startswith("--run-dir") else {})


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("PET_NNODES=2 PET_MASTER_ADDR=a PET_NODE_RANK=1", "--nproc-per-node=7 train.py"),
        ("PET_RDZV_ENDPOINT=a:1 PET_NPROC_PER_NODE=4", "train.py"),
        ("PET_NPROC_PER_NODE=4 PETER=1", "--standalone train.py"),
    ],
)
def test_what_the_environment_tells_torchrun_is_not_overridden(option, given):
    environ = dict(word.split("=") for word in option.split())
    assert parse_command_line(["train.py"], environ=environ).with_defaults("7") == given.split()


@pytest.mark.parametrize("words", ["", "--nproc-per-node", "--nproc-per-node 2", "--standalone", "--run-dir d"])
def test_a_command_line_without_a_script_is_refused(words):
    with pytest.raises(UsageError, match="script"):
        parse_command_line(words.split(), ours=("--run-dir",))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-n 1 train.py", "watching 1 rank, recording to a/run (live: ringside top a/run, or ringside serve a/run)"),
        ("-n gpu train.py", "watching all ranks, recording to a/run (live: "),
        ("-n 8 --nnodes 2 --node-rank 0 train.py", "watching 8 ranks on this node, recording all to a/run (live: "),
        ("-n 8 --nnodes 2 --node-rank 1 train.py", "watching 8 ranks on this node; the node of rank 0 records"),
        ("-n 8 --nnodes 2 --rdzv-backend c10d t.py", "on this node; if rank 0 is here, recording to a/run (live: "),
    ],
)
def test_at_the_start_it_is_said_what_is_watched_and_where_it_is_recorded(words, said):
    line = parse_command_line(words.split(), environ={})
    assert said in start_line(line, Path("a/run"))
    assert line.is_without_rank_0 == ("--node-rank 1" in words)


def test_the_page_about_nodes_shows_what_each_node_says():
    page = (Path(__file__).parents[2] / "docs" / "multi-node.md").read_text()
    shown = re.findall(r"^\$ RINGSIDE_ENGINE=native ringside run (.*)\nringside run: (.*)$", page, re.MULTILINE)
    for words, said in shown:
        line = parse_command_line(words.split(), ours=("--run-dir",), environ={})
        assert start_line(line, Path("runs/train")) == said
    assert len(shown) == 2


def test_places_in_the_environment_count_as_well():
    environ = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4"}
    line = parse_command_line(["train.py"], environ=environ)
    assert start_line(line, Path("run")) == "watching 4 ranks on this node; the node of rank 0 records"


@pytest.mark.parametrize(
    ("deaths", "said"),
    [
        ([(2, 0, 0), (3, None, 9), (2, None, 15)], "rank 3 ended first, by SIGKILL"),
        ([(3, 7, 0), (2, None, 15)], "rank 3 ended first, with exit status 7"),
        ([(3, None, 0), (2, None, 15)], ""),  # how it ended, torchrun alone knows
        ([(2, None, 15)], ""),
        ([(2, 0, 0)], ""),
    ],
)
def test_who_failed_first_on_a_node_is_said_only_where_it_is_known(deaths, said):
    line = failure_line([Death(rank, 100 + rank, status, signum) for rank, status, signum in deaths])
    assert line == (f"the job failed: of the ranks on this node, {said}" if said else "")


def test_switches_are_those_of_torchrun():
    from torch.distributed.run import get_args_parser

    actions = [action for action in get_args_parser()._actions if action.option_strings]
    theirs = {name.replace("_", "-") for a in actions if a.nargs == 0 for name in a.option_strings}
    assert theirs == SWITCHES


def test_help_shows_an_example():
    status, out, _ = launched.run("run", "--help")
    assert status == 0
    assert "$ ringside run -n 2 train.py" in out
