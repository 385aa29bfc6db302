"""Scripts as users write them: under `ringside run` each does what it does under torchrun.

None of those in ZOO knows of Ringside. Each runs on two ranks under both launchers: the same exit status, the same
words, the same files. What it saves is equal to the bit where it is float32 (a sum of two numbers has one order, and
DDP's half of each is exact), and loads where Ringside cannot be imported.

The SURVIVORS are written for `ringside.survive`. Killed in the middle, each saves what it saves undisturbed.
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.support import zygote
from tests.zoo.ran import TORCHRUN, Ran, differences, differences_in, has_small_shm, run, run_forked

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(400)  # of two launches, each with its own bound


@dataclass(frozen=True)
class Row:
    """One script with its arguments.

    Args:
        words: The script and its arguments.
        kind: What users do there.
        mark: Where it runs, besides `make test-long`, which runs all: "thorough": in `make test-all`.
        quick: In `make test`, too, beside stock DDP on forked ranks.
        status: torchrun's exit status.
        ours: That of `ringside run`, where the documentation says that it is another one.
        ulps: How far halves may lie apart, in units in the last place.
        why: Why they may.
        shm: Size of the /dev/shm it runs in; "": the machine's.
        flags: torchrun's flags.
        signum: What the launcher is sent in the middle.
        forked: Ranks are forked, and launchers alone are started.
        only_watched: Gradients are not carried by Ringside's engine, as the script has put a hook of its own there.
    """

    words: str
    kind: str
    mark: str = "long"
    quick: bool = False
    status: int = 0
    ours: int | None = None
    ulps: int = 0
    why: str = ""
    shm: str = ""
    flags: str = ""
    signum: int = 0
    forked: bool = False
    only_watched: bool = False


HALVED_FIRST = """DDP halves each rank's gradient before Gloo adds them, Ringside adds first and rounds once. Half of a
float16 below 2**-13 may lie between two float16, so that the two sums are up to 2**-24 apart before they are rounded:
at most one unit in the last place of any float16. A bfloat16 has the exponents of a float32, and no such case here."""

ZOO = (
    Row("ema.py", "an exponential moving average of the DDP model", quick=True),
    Row("swa.py", "stochastic weight averaging, update_bn, the average saved whole"),
    Row("copies.py", "deepcopy of the DDP model; copies train"),
    Row("whole.py", "torch.save and pickle of everything, and the way back", quick=True),
    Row("gan.py", "two DDP models, two optimizers", quick=True),
    Row("accumulate.py", "gradient accumulation, clipping, a graph that is kept", quick=True),
    Row("accumulate.py views", "the same with gradients as views of buckets"),
    Row("amp.py", "autocast to bfloat16, GradScaler, an overflow on one rank"),
    Row("resume.py", "checkpoint and resume, a second process group"),
    Row("loaders.py fork 1024", "DataLoader workers by fork, in docker's /dev/shm", "thorough", shm="64m", forked=True),
    Row("loaders.py spawn 256", "DataLoader workers by spawn"),
    Row("compiled.py aot_eager", "torch.compile outside and inside of DDP"),
    Row("uneven.py all", "Join, divided by all ranks"),
    Row("uneven.py present", "Join, divided by the ranks that still take part", quick=True),
    Row("hooks.py", "hooks on tensors, parameters, modules and the optimizer"),
    Row("own_hook.py fp16", "PyTorch's fp16_compress_hook", only_watched=True),
    Row("own_hook.py power", "PyTorch's PowerSGD hook", only_watched=True),
    Row("own_hook.py builtin", "DDP's builtin hook for halves", only_watched=True),
    Row("own_hook.py sum", "a communication hook of the script's own", only_watched=True),
    Row("sparse.py", "sparse gradients", quick=True),
    Row("groups.py", "several groups and models, collectives beside"),
    Row("evaluate.py", "evaluation between steps, by all ranks and by rank 0 alone"),
    Row("caught.py loader", "exceptions before a step, caught"),
    Row("caught.py forward", "exceptions in forward, caught"),
    Row("caught.py loss", "exceptions in the loss, caught"),
    Row("caught.py backward", "exceptions in backward, caught"),
    Row("interrupted.py step all", "Ctrl-C between steps, then a last save", status=1, mark="thorough"),
    Row("interrupted.py step 1", "Ctrl-C of one rank between steps", status=1),
    Row("interrupted.py backward all", "Ctrl-C in backward", status=1),
    Row("interrupted.py backward 0", "Ctrl-C of one rank in backward", status=1),
    Row("options.py unused", "find_unused_parameters"),
    Row("options.py static", "static_graph, ignored parameters, checkpointed activations"),
    Row("options.py views", "gradient_as_bucket_view"),
    Row("options.py all", "all options"),
    Row("buffers.py", "buffers: batch norm, one that is replaced, with and without broadcasts"),
    Row("views.py", "gradients through NumPy, DLPack and flat views that are held"),
    Row("views.py buckets", "the same with gradients as views of buckets"),
    Row("forked.py", "forks in mid-training that evaluate and train on their own"),
    Row("ends.py plain", "the process group is never destroyed"),
    Row("ends.py tidy", "it is"),
    Row("ends.py status", "exit status 3", status=1),
    Row("ends.py raises", "an exception at the end", status=1),
    Row("ends.py words", "sys.exit with words", status=1),
    Row("ends.py at-once", "os._exit(0)"),
    Row("ends.py signal", "SIGTERM to itself", status=1),
    Row("asked_to_stop.py 1", "Ctrl-C at the launcher, then a last save", status=1, ours=130, signum=signal.SIGINT),
    Row("asked_to_stop.py 16", "preemption, a save that takes long", status=1, ours=143, signum=signal.SIGTERM),
    Row(
        "asked_to_stop.py 0",
        "Slurm's signal before the end",
        status=1,
        ours=128 + signal.SIGUSR1,
        flags="--signals-to-handle=SIGTERM,SIGUSR1",
        signum=signal.SIGUSR1,
    ),
    Row("habits.py subclass", "a subclass of DDP"),
    Row("habits.py strict", "warnings are errors"),
    Row("habits.py sharded", "ZeroRedundancyOptimizer"),
    Row("habits.py thread", "training in another thread"),
    Row("habits.py closure", "LBFGS, which calls backward several times in a step"),
    Row("habits.py replaced", "gradients that are replaced by others"),
    Row("habits.py doubles", "double precision, after DDP was made"),
    Row("habits.py anomaly", "autograd's anomaly mode"),
    Row("habits.py search", "one model after the other"),
    Row("halves.py float16", "a float16 model", ulps=1, why=HALVED_FIRST),
    Row("halves.py bfloat16", "a bfloat16 model"),
)


@dataclass(frozen=True)
class Survivor:
    """A script for `ringside.survive`.

    Args:
        script: Its name.
        kill: Who dies, and where: `place:rank:step`, with commas between.
        kind: What happens.
        returns: Whoever died is back before the job is over.
    """

    script: str
    kill: str
    kind: str
    returns: bool = True


SURVIVORS = (
    Survivor(
        "survive_sampler.py", "step:1:7", "RandomSampler(generator=...), rank 1 dies in a step of the second epoch"
    ),
    Survivor(
        "survive_norm.py", "step:0:9,loop:1:26", "batch norm, dropout, a schedule; both ranks die, one after the other"
    ),
    Survivor("survive_late.py", "loop:0:14", "rank 0, which saves, dies two steps before the end", returns=False),
    Survivor("survive_late.py", "end:0:16", "rank 0, which saves, dies after the last step", returns=False),
    Survivor("survive_resume.py", "loop:0:17,step:1:17", "all die, and go on from a checkpoint"),
)


@pytest.mark.zoo
@pytest.mark.parametrize("row", [pytest.param(row, id=row.words, marks=getattr(pytest.mark, row.mark)) for row in ZOO])
def test_a_script_does_what_it_does_under_torchrun(row: Row, tmp_path: Path) -> None:
    if row.shm and not has_small_shm():
        pytest.skip("this machine does not let us mount a /dev/shm")
    words, record = row.words.split(), tmp_path / "record"
    how = {"shm": row.shm, "flags": row.flags.split(), "signum": row.signum}
    if row.forked:
        how["environ"] = {"PYTHON_EXEC": zygote.python()}
    stock = run(TORCHRUN, words, tmp_path / "torchrun", **how)
    assert stock.status == row.status, stock.err
    ours = run(("ringside", "run", "--run-dir", str(record)), words, tmp_path / "ringside", **how)
    assert str(record) in ours.lines, ours.err
    ours.lines.remove(str(record))  # the last line on stdout is the run directory
    check(row, stock if row.ours is None else replace(stock, status=row.ours), ours, record)


@pytest.mark.core
@pytest.mark.parametrize("row", [pytest.param(row, id=row.words) for row in ZOO if row.quick])
def test_a_quick_script_does_what_it_does_without_us(row: Row, tmp_path: Path) -> None:
    """On forked ranks, without a launcher: `tests/commands/test_run.py` has an unmodified script under ours."""
    words, record = row.words.split(), tmp_path / "record"
    stock = run_forked(words, tmp_path / "forked")
    check(row, stock, run_forked(words, tmp_path / "ringside", record), record)


def check(row: Row, stock: Ran, ours: Ran, record: Path) -> None:
    """Compare a script's run that Ringside watched, and its record, with one that it did not."""
    found = list(differences(stock, ours, row.ulps))
    assert not found, "\n".join([*found, ours.err])
    assert "is not watched" not in ours.err, ours.err  # or it would have been equal because nothing was done
    assert ("only watches" in ours.err) is row.only_watched, ours.err
    assert json.loads((record / "run.json").read_text())["engine"] == "ringside"


@pytest.mark.long
@pytest.mark.parametrize("row", SURVIVORS, ids=lambda row: f"{row.script} {row.kill}")
def test_a_survivor_saves_what_it_saves_undisturbed(row: Survivor, tmp_path: Path) -> None:
    launcher = ("ringside", "run", "--survive")
    calm = run(launcher, [row.script], tmp_path / "calm")
    assert calm.status == 0, calm.err
    struck = run(launcher, [row.script], tmp_path / "struck", environ={"KILL": row.kill})
    assert struck.status == 0, struck.err
    assert [name for name in struck.files if name.startswith("struck.")] == [
        f"struck.{each}" for each in sorted(row.kill.split(","))
    ]
    dead = {each.split(":")[1] for each in row.kill.split(",")}
    assert not row.returns or {f"back.{rank}" for rank in dead} <= struck.files.keys(), struck.err
    found = list(differences_in(["final.pt"], calm, struck))
    assert not found, "\n".join([*found, struck.err])
    assert orders(struck) == orders(calm)
    assert all(sorted(epoch) == list(range(64)) for epoch in orders(struck))
    epochs = {line for rank in (0, 1) for line in text(struck, f"epochs.{rank}.txt").splitlines()}
    assert epochs == {f"{epoch} {epoch} {epoch}" for epoch in range(1, len(orders(calm)) + 1)}


def orders(ran: Ran) -> list[list[int]]:
    """Return the samples of every epoch, as all ranks that took part were handed them."""
    told: dict[int, list[int]] = {}
    for rank in (0, 1):
        for line in text(ran, f"orders.{rank}.txt").splitlines():
            step, *samples = map(int, line.split())
            assert told.setdefault(step, samples) == samples, f"ranks disagree about step {step}"
    assert sorted(told) == list(range(len(told)))
    return [[sample for step in range(first, first + 4) for sample in told[step]] for first in range(0, len(told), 4)]


def text(ran: Ran, name: str) -> str:
    return ran.files.get(name, b"").decode()
