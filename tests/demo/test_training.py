"""What torchrun would run, on ranks of this machine: the training script, the comparison, the end that all agree on."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from tests.pytorch.training import LIMIT_S, free_port, group
from tests.support.ranks import on_ranks

from ringside.demo import train
from ringside.demo.model import SIZES, ByteGPT
from ringside.demo.size import is_at_bound
from ringside.errors import PeerLostError
from ringside.faults.inject import Slow, parse_fault
from ringside.monitor.run.records import StepRecord
from ringside.monitor.verdict import Verdict


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus"
    path.mkdir()
    for index in range(2):
        shutil.copy(Path(__file__).parents[1] / "test_faults.py", path / f"{index}.py")
    return path


def trained(port: int, run_dir: str, *words: str) -> int:
    os.environ.update(MASTER_PORT=str(port), RINGSIDE_RUN_DIR=run_dir, RINGSIDE="")
    return train.main(words)


def test_two_ranks_train_compare_and_leave_a_whole_run(tmp_path: Path, corpus: Path):
    words = ("--steps=16", "--seed=5", "--size=tiny", f"--corpus={corpus}", "--compare=2", "--inject=none")
    run = tmp_path / "run"
    assert on_ranks(2, trained, free_port(), str(run), *words, limit_s=LIMIT_S) == [0, 0]
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    assert sorted((one["step"], one["rank"]) for one in steps) == [(step, r) for step in range(16) for r in range(2)]
    losses = np.array([one["loss"] for one in sorted(steps, key=lambda one: one["step"])]).reshape(16, 2)
    assert losses[0] == pytest.approx(np.log(256), abs=0.1)
    assert losses[-4:].mean() < losses[0].mean() - 0.5
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    stages = [(one["stage"], one.get("done"), one["of"]) for one in events if one["kind"] == "stage"]
    assert stages == [("training", None, 16), *(("comparison", done, 4) for done in range(4))]
    (found,) = [one for one in events if one["kind"] == "comparison"]
    assert found["steps"] == 2 * (train.BLOCK_STEPS - train.SETTLE_STEPS)
    assert (found["peer"], [one["steps"] for one in events if one["kind"] == "ended"]) == ("gloo", [16])


def test_a_run_with_a_fault_ends_some_steps_after_it(tmp_path: Path, corpus: Path):
    words = ("--steps=400", "--size=tiny", f"--corpus={corpus}", "--inject=pause:rank=1,at_step=3,seconds=0.01")
    run = tmp_path / "run"
    assert on_ranks(2, trained, free_port(), str(run), *words, limit_s=LIMIT_S) == [0, 0]
    ended = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()][-1]
    assert (ended["kind"], ended["steps"]) == ("ended", 3 + train.AFTERWARDS)


def test_a_calibration_leaves_the_training_and_its_record_as_they_are(tmp_path: Path, corpus: Path):
    words = ("--steps=12", "--seed=5", "--size=tiny", f"--corpus={corpus}", "--inject=slow:rank=1,from_step=6")
    losses = []
    for number, more in enumerate(([], ["--calibrate-to=0.3"])):
        run = tmp_path / str(number)
        assert on_ranks(2, trained, free_port(), str(run), *words, *more, limit_s=LIMIT_S) == [0, 0]
        steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
        assert sorted((one["step"], one["rank"]) for one in steps) == [(step, r) for step in range(12) for r in (0, 1)]
        losses.append({(one["step"], one["rank"]): one["loss"] for one in steps})
    assert losses[0] == losses[1]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    kinds = [one["kind"] for one in events if one["kind"] in ("calibrated", "stage")]
    assert kinds == ["calibrated", "stage"]
    (found,) = [one for one in events if one["kind"] == "calibrated"]
    assert found["at_bound"] is is_at_bound(found["factor"], 0.3)
    assert (found["size"], found["steps"]) == (0.3, train.CALIBRATION_BLOCKS * (train.BLOCK_STEPS - 1))


def factor_of_a_rank(port: int, rank: int, effect: float) -> tuple[float, bool, bool]:
    """Return the factor for 30% where `effect` of the work counts; whether that is a bound; whether nothing changed."""
    with group(port):
        events: list[dict[str, Any]] = []
        heard: list[Callable[[StepRecord], None]] = []
        session = SimpleNamespace(
            event=lambda _, **said: events.append(said),
            on_record=heard.append,
            pause=nullcontext,
            clock=SimpleNamespace(flush=list),
        )
        options = argparse.Namespace(size="tiny", inject="none", corpus=None, seed=4)
        trainer = train.Trainer(options, 0, 1)
        now = [0.0]

        def step(*_: object) -> float:
            own = 1.0 + effect * now[0]
            heard[0](StepRecord(step=0, rank=0, ended_unix=0, step_seconds=own, own_seconds=own))
            return 0.0

        class Injector:
            def __init__(self, fault: Slow | None) -> None:
                now[0] = fault.factor - 1 if fault is not None else 0.0

            def step(self, step: int) -> None:
                pass

            def remove(self) -> None:
                now[0] = 0.0

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer, "train_batch", step)
            patch.setattr(train, "inject", lambda fault, *_: Injector(fault))
            patch.setattr(train, "log_ratios", lambda own, who: np.log(own[:, 0]))  # the others need a second
            before = [values.clone() for values in trainer.model.parameters()]
            states = str(trainer.generator.bit_generator.state), torch.get_rng_state().tolist()
            fault = trainer.calibrate(Slow(rank, 1.3, 40), session, 0.3)
        same = all(map(torch.equal, before, trainer.model.parameters()))
        same &= states == (str(trainer.generator.bit_generator.state), torch.get_rng_state().tolist())
    assert (fault.rank, fault.from_step) == (rank, 40)
    return fault.factor, events[-1]["at_bound"], same


@pytest.mark.parametrize(("effect", "factor", "bound"), [(0.7, 1 + 0.3 / 0.7, False), (0.2, 1.75, True)])
def test_the_factor_is_found_by_training_a_copy(effect: float, factor: float, bound: bool):
    ((found, at_bound, same),) = on_ranks(1, factor_of_a_rank, free_port(), 0, effect, limit_s=LIMIT_S)
    assert found == pytest.approx(factor)
    assert at_bound is bound
    assert same


def off(port: int, *words: str) -> str:
    os.environ.update(MASTER_PORT=str(port), RINGSIDE="off")
    with pytest.raises(train.RingsideError) as caught:
        train.main(words)
    return str(caught.value)


def test_without_ringside_there_is_nothing_to_show(corpus: Path):
    words = ("--steps=4", "--size=tiny", f"--corpus={corpus}")
    (said,) = on_ranks(1, off, free_port(), *words)
    assert "RINGSIDE=off" in said


def ended_by(name: str, signals: list[int]) -> tuple[str | int, bool]:
    """Return how the script ends where training is sent signals and raises; and whether SIGTERM is ignored then."""

    def training(_: argparse.Namespace) -> None:
        for number in signals:
            with suppress(KeyboardInterrupt):
                os.kill(os.getpid(), number)
                signal.sigtimedwait([], 5.0)  # until its handler has run
        raise {"lost": PeerLostError("rank 1 is lost", ranks=(1,)), "broken": RuntimeError("no more"),
               "stopped": KeyboardInterrupt()}[name]  # fmt: skip

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "run", training)
        try:
            status: str | int = train.main(["--steps=1"])
        except RuntimeError as error:
            status = str(error)
    return status, signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


@pytest.mark.parametrize(
    ("name", "signals", "status", "ignores"),
    [
        ("lost", [], 1, True),
        ("broken", [], "no more", False),
        ("stopped", [], 0, False),
        ("lost", [signal.SIGINT], 130, False),
        ("broken", [signal.SIGTERM], 143, False),
        ("stopped", [signal.SIGINT, signal.SIGTERM], 130, False),
    ],
)
def test_the_exit_status_says_who_ended_it(name: str, signals: list[int], status: str | int, ignores: bool):
    assert on_ranks(1, ended_by, name, signals) == [(status, ignores)]


def verdict(rank: int, detected: int) -> Verdict:
    return Verdict(kind="slow_rank", ranks=[rank], since_step=40, detected_step=detected, excess_ratio=0.3)


@pytest.mark.parametrize(
    ("spec", "verdicts", "last"),
    [
        ("none", [verdict(1, 50)], 300),
        ("slow:rank=1,from_step=40", [], 300 + 32),
        ("slow:rank=1,from_step=40", [verdict(1, 190), verdict(1, 160)], 160 + 32),
        ("slow:rank=1,from_step=40", [verdict(0, 60)], 300 + 32),  # somebody else
        ("slow:rank=1,from_step=40", [verdict(1, 40)], 300 + 32),  # it had not begun
        ("slow:rank=1,from_step=40", [verdict(1, 41)], 40 + 64),  # until its size is known
        ("kill:rank=1,at_step=50", [verdict(1, 60)], 50 + 32),
        ("pause:rank=1,at_step=50", [verdict(1, 60)], 50 + 32),
        ("pause:rank=1,at_step=50,every=10", [], 300 + 32),
        ("pause:rank=1,at_step=50,every=10", [verdict(1, 70)], 70 + 32),
    ],
)
def test_training_ends_when_the_fault_was_seen_for_long_enough(spec: str, verdicts: list[Verdict], last: int):
    assert train.last_step(parse_fault(spec, 2), SimpleNamespace(verdicts=verdicts), 300) == last


def steps_of_a_rank(corpus: Path) -> tuple[list[float], list[float], list[tuple[int, ...]]]:
    """Return rates and losses of four steps, and the shapes of what was trained on."""
    options = argparse.Namespace(size="tiny", inject="uneven:rank=0,factor=2,from_step=1", corpus=corpus, seed=4)
    trainer = train.Trainer(options, rank=0, ranks=2)
    optimizer = train.make_optimizer(trainer.model)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (train.LEARNING_RATE, (0.9, 0.95), 0.01)
    given: list[tuple[int, ...]] = []
    trainer.model.register_forward_pre_hook(lambda _, text: given.append(tuple(text[0].shape)))
    rates, losses = [], []
    for step in (0, 4, 9, 50):
        trainer.injector.step(step)
        before = [values.detach().clone() for values in trainer.model.parameters()]
        losses.append(trainer.step(trainer.model, optimizer, step))
        rates.append(group["lr"] / train.LEARNING_RATE)
        assert not any(map(torch.equal, before, trainer.model.parameters()))
    return rates, losses, given


def test_the_learning_rate_rises_for_ten_steps_and_a_fault_changes_the_batch(corpus: Path):
    ((rates, losses, given),) = on_ranks(1, steps_of_a_rank, corpus)
    assert rates == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert losses[0] == pytest.approx(np.log(256), abs=0.1)
    size = SIZES["tiny"]
    assert given == [(batch, size.context + 1) for batch in (size.batch, *[2 * size.batch] * 3)]


def test_ranks_begin_alike_and_read_other_text(corpus: Path):
    options = argparse.Namespace(size="tiny", inject="none", corpus=corpus, seed=4)
    one, other = (train.Trainer(options, rank, 2) for rank in range(2))
    assert all(map(torch.equal, one.model.parameters(), other.model.parameters()))
    assert one.corpus.files != other.corpus.files
    assert one.generator.integers(1 << 30) != other.generator.integers(1 << 30)
    changed = train.Trainer(argparse.Namespace(**{**vars(options), "seed": 5}), 0, 2)
    assert not all(map(torch.equal, one.model.parameters(), changed.model.parameters()))


# ------------------------------------------------------------------------------------------------ how sides compare


def test_of_every_step_the_rank_that_waited_for_nobody_counts_and_of_steps_the_middle():
    ours = np.array([[[0.10, 0.02, 0.05]] * 3, [[0.20, 0.01, 0.03]] * 3])
    ours[0, 2] = (9.0, 9.0, 9.0)  # one step that something else disturbed on one rank
    theirs = np.array([[[0.30, 0.06, 0.09]] * 4])
    found = train.summarize(("ringside", ours), ("gloo", theirs))
    assert found["ours"] == pytest.approx(
        {"step_seconds": 0.1, "exposed_seconds": 0.01, "sync_seconds": 0.03, "share": 0.1}
    )
    assert found["theirs"]["share"] == pytest.approx(0.2)
    ratios = [found[f"{name}_ratio"] for name in ("step", "exposed", "sync")]
    assert ratios == pytest.approx([3.0, 6.0, 3.0])
    assert (found["engine"], found["peer"], found["steps"]) == ("ringside", "gloo", 3)


def compared(port: int) -> tuple[list[str], dict[str, Any]]:
    """Return which side made each block, and what was found, of steps that took what this says they did."""
    with group(port):
        heard: list[Callable[[StepRecord], None]] = []
        session = SimpleNamespace(
            event=lambda *_, **__: None, on_record=heard.append, pause=nullcontext, clock=SimpleNamespace(flush=list)
        )
        made: list[object] = []

        def step(model: object, optimizer: object) -> None:
            made.append(model)
            settling = (len(made) - 1) % train.BLOCK_STEPS < train.SETTLE_STEPS
            took = 9.0 if settling else 0.1 if model is made[0] else 0.3
            times = {"step_seconds": took, "own_seconds": took, "sync_seconds": 0.01, "exposed_seconds": 0.001}
            heard[0](StepRecord(step=0, rank=0, ended_unix=0, **times))

        found = train.compare(ByteGPT(SIZES["tiny"]), session, step, 3)
        heard[0](StepRecord(step=0, rank=0, ended_unix=0, step_seconds=5.0, own_seconds=5.0))  # of the run, not of ours
        sides = ["ours" if model is made[0] else "theirs" for model in made[:: train.BLOCK_STEPS]]
        assert len(made) == 6 * train.BLOCK_STEPS
    return sides, found


def test_sides_take_turns_so_that_a_drift_hits_both_alike_and_steps_that_settle_do_not_count():
    ((sides, found),) = on_ranks(1, compared, free_port(), limit_s=LIMIT_S)
    assert sides == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert (found["ours"]["step_seconds"], found["theirs"]["step_seconds"]) == (0.1, 0.3)
    assert found["steps"] == 3 * (train.BLOCK_STEPS - train.SETTLE_STEPS)


def test_the_script_takes_what_its_parent_hands_on():
    assert train.parse(["--steps=3"]) == argparse.Namespace(
        steps=3, seed=0, size="small", inject="none", corpus=None, compare=0, calibrate_to=0.0
    )
    fault = parse_fault("slow:rank=1,factor=1.3,from_step=40", 2)
    assert fault == Slow(1, 1.3, 40) == parse_fault(str(fault), 2)
