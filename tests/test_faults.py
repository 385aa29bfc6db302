import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.quotas import quota_or_skip
from tests.support import zygote
from tests.support.waiting import Clock

from ringside.commands import demo
from ringside.errors import UnsupportedError, UsageError
from ringside.faults import quota
from ringside.faults.inject import (
    KINDS,
    Diverge,
    Hang,
    Input,
    Kill,
    Link,
    Pause,
    Quota,
    Slow,
    Stop,
    Uneven,
    first_step,
    inject,
    parse_fault,
    work,
)

torch = pytest.importorskip("torch")

RANKS = st.integers(0, 10_000)
STEPS = st.integers(0, 10**9)
FACTORS = st.floats(1.0, 1000.0, exclude_min=True)
SECONDS = st.floats(0.0, 1e6, exclude_min=True)
FAULTS = st.one_of(
    st.builds(Slow, RANKS, FACTORS, STEPS),
    st.builds(Input, RANKS, SECONDS, STEPS),
    st.builds(Uneven, RANKS, FACTORS, STEPS),
    st.builds(Quota, RANKS, st.floats(0.01, 64.0), STEPS),
    st.builds(lambda rank, factor, step: Link(rank, rank + 1, factor, step), RANKS, FACTORS, STEPS),
    st.builds(Pause, RANKS, STEPS, SECONDS),
    st.builds(Hang, RANKS, STEPS),
    st.builds(Stop, RANKS, STEPS),
    st.builds(Diverge, RANKS, STEPS, SECONDS),
    st.builds(Kill, RANKS, STEPS),
)


class WorkClock(Clock):
    """Time that passes only when somebody works."""

    def __init__(self):
        super().__init__()
        self.burnt = []

    def burn(self, seconds):
        self.burnt.append(seconds)
        self.now += seconds
        return seconds


class Timed(torch.nn.Module):
    """A layer whose forward and backward take known times on a `WorkClock`."""

    def __init__(self, clock, forward, backward):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.clock, self.seconds, self.back = clock, forward, backward

    def forward(self, x):
        self.clock.now += self.seconds
        y = x * self.weight
        if y.requires_grad:
            y.register_hook(self.went_back)
        return y

    def went_back(self, gradient):
        self.clock.now += self.back


class Model(torch.nn.Module):
    def __init__(self, clock, forward=2.0, backward=4.0, layers=3):
        super().__init__()
        self.layers = torch.nn.Sequential(*(Timed(clock, forward, backward) for _ in range(layers)))

    def forward(self, x):
        return {"loss": self.layers(x).sum()}


def train(model, injector, steps, clock=None):
    """Return the time each step took on the clock."""
    times = []
    for step in steps:
        begin = clock.now if clock else 0.0
        injector.step(step)
        model(torch.ones(3))["loss"].backward()
        times.append(clock.now - begin if clock else 0.0)
        if clock:
            clock.now += 1000.0  # waiting for others, the optimizer: not this rank's forward or backward
    return times


@given(FAULTS)
def test_a_fault_is_read_back_from_its_words(fault):
    assert parse_fault(str(fault)) == fault
    assert parse_fault(str(fault), ranks=fault.rank + 2) == fault
    assert str(fault.rank) in fault.describe()
    assert f"step {first_step(fault)}" in fault.describe()


@given(FAULTS)
def test_a_rank_outside_the_world_is_refused(fault):
    if fault.rank:
        with pytest.raises(UsageError, match=f"no rank {fault.rank} among"):
            parse_fault(str(fault), ranks=fault.rank)


@given(st.text(max_size=40).filter(lambda text: "none" not in text))
def test_any_other_text_is_refused_with_what_exists(text):
    with pytest.raises(UsageError, match=r"(?s)slow:rank=1,factor=1\.3,from_step=40.*kill:rank=1,at_step=60.*none"):
        parse_fault(text)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("", "no fault ''"),
        ("fast:rank=1", "no fault 'fast'"),
        ("slow", "needs rank="),
        ("slow:rank=1,factor=1", "more than 1"),
        ("slow:rank=1,factor=0.5", "more than 1"),
        ("slow:rank=1,factor=1000.5", "at most 1000"),
        ("uneven:rank=1,factor=1001", "at most 1000"),
        ("slow:rank=2", "there is no rank 2 among 2 ranks \\(0 to 1\\)"),
        ("none:rank=1", "no fault 'none'"),
        ("slow:rank=1,factor=nan", "0 or more, and finite"),
        ("slow:rank=1,factor=inf", "0 or more, and finite"),
        ("slow:rank=-1", "0 or more, and finite"),
        ("slow:rank=1,from_step=-3", "0 or more, and finite"),
        ("slow:rank=one", "no whole number"),
        ("slow:rank=1,rank=0", "given twice"),
        ("slow:rank=1,at_step=4", "takes rank=, factor=, from_step="),
        ("pause:rank=1", "needs at_step="),
        ("pause:rank=1,at_step=3,seconds=0", "more than 0 seconds"),
        ("kill:at_step=3", "needs rank="),
        ("uneven:rank=1,factor=1", "more than 1"),
        ("input:rank=1,seconds=0", "more than 0 seconds"),
        ("diverge:rank=1,at_step=3,by=0", "changes nothing"),
        ("quota:rank=1,cpus=0.005", "at least 0.01 CPUs"),
        ("link:rank=1", "needs to="),
        ("link:rank=1,to=1", "another rank, not from 1 to 1"),
        ("link:rank=1,to=2", "another rank, not from 1 to 2"),
        ("link:rank=0,to=1,factor=1", "more than 1"),
        ("hang:rank=1", "needs at_step="),
        ("stop:rank=1,from_step=3", "takes rank=, at_step="),
        ("kill:rank", "takes rank="),
    ],
)
def test_impossible_faults_are_refused(spec, why):
    with pytest.raises(UsageError, match=why):
        parse_fault(spec, ranks=2)


def test_what_is_not_said_is_as_the_guide_says_and_blanks_do_not_matter():
    assert parse_fault(" slow: rank = 1 , factor=1000 ,") == Slow(1, 1000.0, 0)
    assert parse_fault("slow:rank=1") == Slow(1, 1.3, 0)
    assert parse_fault("input:rank=1") == Input(1, 0.02, 0)
    assert parse_fault("uneven:rank=1") == Uneven(1, 1.5, 0)
    assert parse_fault("pause:rank=1,at_step=0") == Pause(1, 0, 3.0, 0)
    assert parse_fault("diverge:rank=1,at_step=0") == Diverge(1, 0, 0.01)
    assert parse_fault("quota:rank=1") == Quota(1, 0.6, 0)
    assert parse_fault("link:rank=0,to=1") == Link(0, 1, 4.0, 0)


def test_none_is_no_fault():
    assert parse_fault("none") is None
    assert parse_fault("slow:rank=0").factor == pytest.approx(1.3)


@given(factor=st.floats(1.01, 5.0), forward=st.floats(0.1, 9.0), backward=st.floats(0.1, 9.0))
def test_forward_and_backward_take_the_factor_longer_and_nothing_else_does(factor, forward, backward):
    clock = WorkClock()
    model = Model(clock, forward, backward)
    injector = inject(Slow(0, factor, from_step=2), model, 0, clock=clock, burn=clock.burn)
    times = train(model, injector, range(5), clock)
    healthy = 3 * (forward + backward)
    assert times[:2] == pytest.approx([healthy] * 2)
    assert times[2:] == pytest.approx([healthy * factor] * 3)
    injector.remove()
    assert train(model, injector, range(5, 7), clock) == pytest.approx([healthy] * 2)


@dataclass
class Output:
    """As the frameworks' models return it."""

    loss: torch.Tensor


@pytest.mark.parametrize(
    "shape",
    [lambda loss: loss, lambda loss: {"a": [loss]}, lambda loss: (None, Output(loss))],
    ids=["bare", "nested", "dataclass"],
)
def test_backward_begins_where_it_reaches_an_output_however_nested(shape):
    clock = WorkClock()

    class Shaped(Model):
        def forward(self, x):
            self.loss = super().forward(x)["loss"]
            return shape(self.loss)

    model = Shaped(clock, forward=1.0, backward=2.0)
    injector = inject(Slow(0, 2.0), model, 0, clock=clock, burn=clock.burn)
    injector.step(0)
    model(torch.ones(3))
    clock.now += 1000.0  # the loss, beside the model
    model.loss.backward()
    assert sum(clock.burnt) == pytest.approx(3 * (1.0 + 2.0))


def test_a_pause_is_told_with_when_it_comes():
    assert Pause(1, 60).describe() == "rank 1 paused for 3 s in step 60"
    assert Pause(1, 60, 0.5, every=7).describe() == "rank 1 paused for 0.5 s every 7 steps from step 60 on"


def test_what_was_burnt_too_much_is_taken_off_later():
    clock = WorkClock()
    model = Model(clock, forward=1.0, backward=1.0)

    def coarse(seconds):
        return clock.burn(math.ceil(seconds))

    injector = inject(Slow(0, 1.25), model, 0, clock=clock, burn=coarse)
    times = train(model, injector, range(40), clock)
    assert sum(times) == pytest.approx(40 * 6 * 1.25, rel=0.02)


def test_another_rank_and_the_time_before_carry_no_hooks():
    clock = WorkClock()
    model = Model(clock)
    for fault in (
        None,
        Slow(1),
        Input(1),
        Uneven(1),
        Pause(1, 0),
        Kill(1, 0),
        Hang(1, 0),
        Stop(1, 0),
        Diverge(1, 0),
        Link(0, 1),
    ):
        injector = inject(fault, model, 0, clock=clock, burn=clock.burn)
        injector.step(5)
        assert injector.batch(8) == 8
    inject(Slow(0, from_step=9), model, 0, clock=clock, burn=clock.burn).step(8)
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_evaluation_is_slowed_in_forward_only_and_does_not_confuse_backward():
    clock = WorkClock()
    model = Model(clock, forward=1.0, backward=1.0)
    injector = inject(Slow(0, 2.0), model, 0, clock=clock, burn=clock.burn)
    with torch.no_grad():
        train_free = model(torch.ones(3))
    injector.step(0)
    with torch.no_grad():
        model(torch.ones(3))
    assert not train_free["loss"].requires_grad
    assert sum(clock.burnt) == pytest.approx(3.0)
    clock.now += 500.0
    assert train(model, injector, [1], clock) == pytest.approx([12.0])


def test_work_is_done_until_its_time_is_up():
    ticks = iter(range(1000))
    assert work(7.0, clock=lambda: float(next(ticks))) == 7.0
    assert next(ticks) == 8  # one look at the clock after each piece of arithmetic
    assert work(0.0, clock=lambda: float(next(ticks))) == 0.0


def test_work_uses_the_processor():
    import time

    begin = time.thread_time()
    work(0.05, clock=time.thread_time)
    assert time.thread_time() - begin >= 0.05


def test_a_pause_stalls_once_in_its_step():
    clock = WorkClock()
    model = Model(clock)
    stalls = []
    injector = inject(Pause(0, at_step=2, seconds=3.5), model, 0, stall=stalls.append)
    for step in range(5):
        injector.step(step)
        model(torch.ones(3))
        model(torch.ones(3))  # gradient accumulation: still one pause
        assert stalls == ([3.5] if step >= 2 else [])
    injector.remove()
    assert not model._forward_pre_hooks


def test_a_pause_that_comes_again_and_again():
    fault = parse_fault("pause:rank=0,at_step=2,seconds=0.5,every=3")
    assert parse_fault(str(fault)) == fault
    assert fault.describe() == "rank 0 paused for 0.5 s every 3 steps from step 2 on"
    model, stalls = Model(WorkClock()), []
    injector = inject(fault, model, 0, stall=lambda seconds: stalls.append((step, seconds)))
    for step in range(10):
        injector.step(step)
        model(torch.ones(3))
    assert stalls == [(2, 0.5), (5, 0.5), (8, 0.5)]
    injector.remove()
    assert not model._forward_pre_hooks


def test_a_loader_keeps_its_rank_waiting_in_every_step_from_its_first_on():
    stalls = []
    injector = inject(Input(0, seconds=0.5, from_step=2), torch.nn.Linear(1, 1), 0, stall=stalls.append)
    for step in range(5):
        injector.step(step)
        assert stalls == [0.5] * max(step - 1, 0)
    injector.remove()
    injector.step(5)
    assert len(stalls) == 3


def test_a_quota_holds_its_rank_from_its_first_step_on_and_leaves_nothing():
    with quota_or_skip(1.0) as beside:
        groups = beside.home.parent
        beside.close()
        injector = inject(Quota(0, cpus=0.5, from_step=2), torch.nn.Linear(1, 1), 0)
        (group,) = groups.glob(f"{quota.PREFIX}*")
        members = []
        for step in range(4):
            injector.step(step)
            members.append((group / "cgroup.procs").read_text().split() == [str(os.getpid())])
        injector.remove()
        assert members == [False, False, True, True]
        assert not list(groups.glob(f"{quota.PREFIX}*"))
        injector.step(2)


def test_a_quota_of_a_process_that_was_killed_is_removed_by_the_next():
    with quota_or_skip(1.0) as beside:
        process = subprocess.Popen([sys.executable, "-c", "pass"])
        process.wait()
        left = beside.home.parent / f"{quota.PREFIX}{process.pid}-x"
        left.mkdir()
        quota.remove_leftovers()
        assert not left.exists()
        assert beside.members.parent.exists(), "its process lives"


def test_a_process_may_hold_two_quotas():
    with quota_or_skip(1.0) as first, quota_or_skip(0.5) as second:
        assert first.members != second.members
        second.close()
        assert first.members.exists()


def test_where_no_quota_can_be_it_is_said_in_a_line(monkeypatch, tmp_path):
    monkeypatch.setattr(quota, "homes", lambda: iter([tmp_path / "none"]))
    assert "cgroup" in quota.unavailable()
    assert "\n" not in quota.unavailable()
    with pytest.raises(UnsupportedError):
        inject(Quota(0), torch.nn.Linear(1, 1), 0)
    monkeypatch.setattr(quota, "homes", lambda: iter([tmp_path]))

    def refuse(**_):
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(quota, "mkdtemp", refuse)
    assert "no cgroup with a CPU quota can be made here" in quota.unavailable()


@given(factor=st.floats(1.0, 9.0, exclude_min=True), size=st.integers(1, 512))
def test_a_batch_is_larger_from_its_first_step_on(factor, size):
    injector = inject(Uneven(0, factor, from_step=2), torch.nn.Linear(1, 1), 0)
    sizes = []
    for step in range(4):
        injector.step(step)
        sizes.append(injector.batch(size))
    assert sizes[:2] == [size, size]
    assert sizes[2] == sizes[3] > size
    assert sizes[2] == pytest.approx(size * factor, abs=1)
    injector.remove()
    assert injector.batch(size) == size


def test_a_batch_is_that_of_all_before_the_first_step_and_rounded():
    injector = inject(Uneven(0, 1.2), torch.nn.Linear(1, 1), 0)
    assert injector.batch(8) == 8
    injector.step(0)
    assert [injector.batch(size) for size in (1, 2, 8, 10)] == [2, 3, 10, 12]


def test_one_number_is_changed_once():
    model = torch.nn.Linear(3, 2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    injector = inject(Diverge(0, at_step=1, by=0.25), model, 0)
    injector.step(0)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    for step in range(1, 4):
        injector.step(step)
    before[0][0, 0] += 0.25
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("fault", [Kill(0, at_step=1), Hang(0, at_step=1), Stop(0, at_step=1)])
def test_a_halt_comes_in_the_middle_of_backward(fault):
    clock = WorkClock()
    model = Model(clock)
    seen = []
    injector = inject(fault, model, 0, halt=lambda: seen.append([p.grad is not None for p in model.parameters()]))
    for step in range(3):
        model.zero_grad()
        train(model, injector, [step])
    assert seen == [[False, True, True]]
    seen.clear()
    model = Model(clock, layers=4)
    injector = inject(fault, model, 0, halt=lambda: seen.append([p.grad is not None for p in model.parameters()]))
    train(model, injector, [1])
    assert seen == [[False, False, True, True]]
    injector.step(1)
    injector.remove()
    injector.step(1)
    train(model, injector, [])
    model(torch.ones(3))["loss"].backward()
    assert len(seen) == 1, "it was taken off"


def injected_process(spec, python=sys.executable):
    command = [python, Path(__file__).parent / "scripts" / "injected.py", spec]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_kill_is_sigkill():
    process = injected_process("kill:rank=0,at_step=0", zygote.python())
    out, _ = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert b"alive" not in out


def test_a_stop_is_sigstop_and_can_be_undone():
    process = injected_process("stop:rank=0,at_step=0")
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert b"alive" in out


def test_a_rank_that_hangs_still_hears_sigterm():
    process = injected_process("hang:rank=0,at_step=0", zygote.python())
    assert process.stdout.readline() == b"ready\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.terminate()
    out, _ = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGTERM
    assert b"alive" not in out


def test_a_wrapped_model_is_slowed_inside():
    clock = WorkClock()

    class DistributedDataParallel(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            clock.now += 50.0  # waiting for other ranks
            return self.module(x)

    model = DistributedDataParallel(Model(clock, forward=1.0, backward=1.0))
    injector = inject(Slow(0, 1.5), model, 0, clock=clock, burn=clock.burn)
    assert train(model, injector, [0], clock) == pytest.approx([50.0 + 6.0 * 1.5])


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.kind)
def test_every_fault_is_in_the_guide_and_in_the_demos_help(kind):
    assert f"`{kind.example}`" in (Path(__file__).parents[1] / "docs" / "faults.md").read_text()
    assert f"  {kind.example} " in demo.__doc__
