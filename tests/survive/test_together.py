"""Whole jobs of threads: what every rank sees of them, step by step, and what is decided."""

import gc
import socket

import pytest
from tests.survive.counting import BATCH, SAMPLES
from tests.survive.crew import Crew

from ringside.errors import StoreGoneError
from ringside.survive import final_state
from ringside.survive.cluster.registers import MemoryRegisters
from ringside.survive.protocol.decision import decode_decided
from ringside.survive.protocol.events import DrainWanted, QuotasWanted
from ringside.survive.protocol.generation import Generation, decode_generation
from ringside.survive.state.checkpoint import Checkpoints
from ringside.survive.state.kept import Kept, Stage

pytest.importorskip("torch")

PER_EPOCH = SAMPLES // BATCH


def holds(crew, steps, ranks=None, committed_since=0, drained=-1):
    """Assert that a job has trained so many steps, each sample as often as it should be, alike on all ranks."""
    ranks = set(range(crew.ranks)) if ranks is None else ranks
    assert crew.errors == {}
    assert set(crew.ended) == ranks
    for rank, ended in crew.ended.items():
        assert ended.step == steps
        assert sum(ended.counts) == steps * BATCH
        assert set(ended.counts) <= {float(steps // PER_EPOCH), float(-(-steps // PER_EPOCH))}
        assert [(each.first, each.samples, each.divisor) for each in ended.committed] == [
            (BATCH * step, BATCH, 1) for step in range(committed_since, steps)
        ]
        numbers = [step.number for step in ended.steps]
        left = steps if rank != drained else numbers[-1] + 1
        assert numbers == list(range(left - len(numbers), left))
        assert all(step.samples == BATCH and step.seconds >= 0.0 for step in ended.steps)
    assert len({ended.digest for ended in crew.ended.values()}) == 1


@pytest.mark.parametrize("hosts", [False, True])
def test_an_undisturbed_job_is_one_generation_and_every_rank_sees_every_step(monkeypatch, hosts):
    crew = Crew(monkeypatch, steps=6, hosts=hosts).run()
    holds(crew, 6)
    for ended in crew.ended.values():
        assert (ended.joined, ended.reason, len(ended.steps)) == (False, "", 6)
        assert {(step.members, step.generation) for step in ended.steps} == {((0, 1, 2), 1)}
    assert len({tuple(step.loss for step in ended.steps) for ended in crew.ended.values()}) == 1


@pytest.mark.parametrize("hosts", [False, True])
@pytest.mark.parametrize("phase", ["compute", "after_send", "after_ack", "before_apply", "before_decide"])
def test_who_dies_in_a_step_is_done_without_and_comes_back_with_the_state_of_the_others(monkeypatch, phase, hosts):
    rank = 0 if phase == "before_decide" else 1
    crew = Crew(monkeypatch, steps=8, hosts=hosts, traps=f"kill:rank={rank},step=2,phase={phase}").run()
    holds(crew, 8)
    assert [ended.joined for _, ended in sorted(crew.ended.items())] == [each == rank for each in range(3)]
    assert crew.ended[2].steps[-1].generation > 1


def at(rank, step, phase, epoch=1):
    return f"kill:rank={rank},step={step},phase={phase},epoch={epoch}"


@pytest.mark.parametrize("hosts", [False, True])
def test_the_phases_of_an_undisturbed_job_are_these(monkeypatch, hosts):
    crew = Crew(monkeypatch, ranks=2, steps=2, hosts=hosts).run()
    exchange = ["before_send", "after_send", "mid_chunk", "after_sum", "after_receive"]
    for rank in (0, 1):
        vote = ["before_decide", "after_decide"] if rank == 0 else ["after_ack"]
        step = [*["compute"] * 3, *exchange, *vote, "before_apply", "after_apply"]
        found = [phase for _, phase in crew.reached[rank]]
        pairs = zip(["", *found], found, strict=False)
        found = [phase for before, phase in pairs if phase != before or phase != "after_ack"]  # it may be repeated
        expected = [*step, *step, "before_keep", "after_keep", *["after_ack"] * rank, "after_end"]
        # between hosts one comes later or earlier than the other
        assert (sorted(found) if hosts else found) == (sorted(expected) if hosts else expected)


def test_what_stands_in_the_registers_after_a_job(monkeypatch):
    crew = Crew(monkeypatch, ranks=2, steps=3).run()
    stands = crew.registers.values
    record = decode_generation(stands["1/generation"])
    final = f"{crew.ended[0].digest:016x}"
    assert record == Generation(1, 2, 3, over=True, last=3, final=final)
    decided = decode_decided(stands["1/decided/1"])
    assert (decided.first, decided.last, decided.position, decided.abort) == (0, 2, 0, None)
    places = {f"1/{kind}/{rank}/1" for kind in ("place", "arena/1") for rank in (0, 1)}
    job = {"passport", "1/generation", "1/founders", "1/decided/1", "order/0"}
    assert {key for key in stands if "/beat/" not in key and "/mail/" not in key} == places | job


def test_a_rank_that_leaves_the_loop_ends_the_job_for_all(monkeypatch):
    crew = Crew(monkeypatch, steps=None, look=lambda t, step: (t.rank, step.number) == (1, 3)).run()
    steps = crew.ended[1].step
    assert steps >= 4
    holds(crew, steps)
    other = f"another rank ended the job after {steps} steps"
    assert [crew.ended[rank].reason for rank in range(3)] == [other, "", other]


def test_where_all_die_the_job_goes_on_from_the_newest_checkpoint_and_no_step_counts_twice(monkeypatch, tmp_path):
    traps = ";".join(at(rank, 5, "after_send") for rank in range(3))
    given = {"checkpoint_dir": tmp_path, "checkpoint_every": 2}

    def look(t, step):
        if step.number in (2, 4):
            t._driver.job.checkpoints.finish(60.0)  # what the leader has begun, so that the next one is not left out

    crew = Crew(monkeypatch, steps=8, traps=traps, look=look, given=given).run()
    holds(crew, 8)
    record = decode_generation(crew.registers.values["1/generation"])
    assert (record.closed, record.over) == (True, False)
    begun = [step for step, _ in crew.reached[0]].index(5)
    again = next(step for step, phase in crew.reached[0][begun + 1 :] if phase == "before_send" and step < 5)
    assert again == 4
    assert all(step.generation for step in crew.ended[0].steps)
    more = Crew(monkeypatch, ranks=2, steps=11, given=given).run()
    first = min(step.number for step in more.ended[0].steps)
    assert first in (4, 6, 8)  # a checkpoint that is due while another is written is left out
    holds(more, 11, committed_since=first)


@pytest.mark.parametrize("phase", ["before_keep", "after_keep", "after_end"])
def test_who_dies_around_the_end_has_the_final_state_all_the_same(monkeypatch, phase):
    kept = {rank: Kept() for rank in range(3)}
    crew = Crew(monkeypatch, steps=3, traps=at(1, 2, phase), kept=kept).run()
    holds(crew, 3)
    assert {memory.head.stage for memory in kept.values()} == {Stage.OVER}
    assert {(memory.head.step, memory.head.digest) for memory in kept.values()} == {(3, crew.ended[0].digest)}
    assert crew.ended[1].steps == []
    for memory in kept.values():
        memory.close()


def test_a_rank_that_was_drained_waits_and_has_the_final_state(monkeypatch):
    def look(t, step):
        if (t.rank, step.number) == (0, 1):
            t._driver.handle(DrainWanted(2))

    crew = Crew(monkeypatch, steps=7, look=look).run()
    holds(crew, 7, drained=2)
    assert crew.ended[2].steps[-1].number < 6
    assert [step.members for step in crew.ended[0].steps][-1] == (0, 1)
    assert crew.ended[2].joined
    assert decode_generation(crew.registers.values["1/generation"]).without == ()


def test_quotas_that_are_wanted_are_those_of_the_steps_after(monkeypatch):
    def look(t, step):
        if (t.rank, step.number) == (0, 1):
            t._driver.handle(QuotasWanted(((0, 1), (1, 4), (2, 1))))

    crew = Crew(monkeypatch, steps=5, look=look).run()
    holds(crew, 5)
    computed = {rank: [step for step, phase in crew.reached[rank] if phase == "compute"] for rank in range(3)}
    assert [computed[rank].count(0) for rank in range(3)] == [2, 2, 2]
    assert [computed[rank].count(4) for rank in range(3)] == [1, 4, 1]
    assert {step.generation for step in crew.ended[0].steps} == {1, 2}


def errors_told(caplog):
    """Return how many errors ranks have logged."""
    return sum(record.levelname == "ERROR" for record in caplog.records)


def test_who_is_refused_after_it_came_back_is_not_waited_for_and_the_state_is_in_a_file(monkeypatch, tmp_path, caplog):
    """Rank 0 dies and never comes again: nobody can run its last lines."""
    kept = {rank: Kept() for rank in range(3)}
    given = {"checkpoint_dir": tmp_path, "checkpoint_every": 100}
    crew = Crew(monkeypatch, steps=4, traps=at(0, 2, "compute"), comes_back=False, kept=kept, given=given).run()
    holds(crew, 4, ranks={1, 2})
    assert {kept[rank].head.stage for rank in (1, 2)} == {Stage.UNATTENDED}
    (path,) = tmp_path.glob("ringside-final-step-00000004-*")
    assert final_state(path)["model"]["counts"].tolist() == crew.ended[1].counts
    assert crew.registers.values["final"].decode() == f"it lies in {path} on {socket.gethostname()}"
    assert errors_told(caplog) == 2, "both say so"
    for memory in kept.values():
        memory.close()


class Lost(MemoryRegisters):
    """Registers of a store that is lost at some moment."""

    lost = False

    def _found(self):
        if self.lost:
            raise StoreGoneError("the store is gone")

    def create(self, key, value):
        self._found()
        return super().create(key, value)

    def read(self, key):
        self._found()
        return super().read(key)

    def swap(self, key, expected, new):
        self._found()
        return super().swap(key, expected, new)


def lost_when(registers, phase, times):
    """Return a hook that loses the store when ranks have come to a phase so many times."""
    come = []

    def hook(_, reached):
        come.append(reached)
        registers.lost |= come.count(phase) == times

    return hook


def test_where_the_store_is_lost_after_the_last_step_nobody_needs_it_any_more(monkeypatch):
    registers, kept = Lost(), {rank: Kept() for rank in range(2)}
    hook = lost_when(registers, "after_keep", times=2)
    crew = Crew(monkeypatch, ranks=2, steps=3, registers=registers, hook=hook, kept=kept).run()
    assert crew.errors == {}
    assert {(ended.step, sum(ended.counts)) for ended in crew.ended.values()} == {(3, 3 * BATCH)}
    assert {memory.head.stage for memory in kept.values()} == {Stage.OVER}
    for memory in kept.values():
        memory.close()


def test_where_the_store_is_lost_before_that_the_ranks_save_and_end_with_its_status(monkeypatch, tmp_path, caplog):
    registers = Lost()
    given = {"checkpoint_dir": tmp_path, "checkpoint_every": 100}
    hook = lost_when(registers, "after_apply", times=4)
    crew = Crew(monkeypatch, ranks=2, steps=9, registers=registers, hook=hook, given=given).run()
    assert {repr(error) for error in crew.errors.values()} == {"SystemExit(75)"}
    saved = Checkpoints(tmp_path).newest()
    assert 1 <= saved["step"] < 9
    assert sum(saved["model"]["counts"].tolist()) == saved["step"] * BATCH
    crew.errors.clear()  # they hold all that was under way
    caplog.clear()
    gc.collect()


def test_where_nothing_is_kept_it_is_said_which_rank_has_it(monkeypatch, caplog):
    crew = Crew(monkeypatch, steps=4, traps=at(2, 2, "compute"), comes_back=False).run()
    holds(crew, 4, ranks={0, 1})
    assert crew.registers.values["final"] == b"rank 0 has it"
    assert errors_told(caplog) == 0, "rank 0 runs its last lines"
