"""Ends that looked good and were not: each lost in silence what was trained, or who was right."""

import importlib
import os
import threading
from pathlib import Path

import msgspec
import pytest
from tests.survive.counting import Counting, count

from ringside.errors import FinalStateError, MismatchError
from ringside.survive.cluster.peers import PeerPlace, own_place
from ringside.survive.cluster.registers import MemoryRegisters
from ringside.survive.cluster.rendezvous import Rendezvous
from ringside.survive.protocol.decision import MemberId, encode
from ringside.survive.state.kept import KEPT, STATE_AT, Head, Kept, Lies, Stage
from ringside.survive.supervisor import Supervisor

torch = pytest.importorskip("torch")

from ringside.survive import final_state  # noqa: E402
from ringside.survive.connection import StoreConnection  # noqa: E402
from ringside.survive.data.samples import Samples, shuffled  # noqa: E402
from ringside.survive.state.checkpoint import Checkpoints  # noqa: E402
from ringside.survive.state.final import Final  # noqa: E402
from ringside.survive.state.state import JobState  # noqa: E402
from ringside.survive.train import agree_on_orders  # noqa: E402


class NoStop:
    signum = 0


# ------------------------------------------------------------------------------------------ no memory to keep it in


def a_state(step=7, filled=3.0):
    model = Counting(8)
    torch.nn.init.constant_(model.counts, filled)
    state = JobState(model, torch.optim.SGD(model.parameters(), lr=1.0))
    state.step = step
    return state


def that_cannot_grow():
    """Return memory of a keeper in which there is no room for a state."""
    import fcntl

    fd = os.memfd_create("ringside-survive-kept", os.MFD_ALLOW_SEALING)
    os.truncate(fd, STATE_AT)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return Kept(fd)


def files(directory):
    return sorted(path.name for path in Path(directory).glob("ringside-final-*"))


def test_without_memory_the_final_state_is_kept_in_a_file_and_found_again_and_goes_with_the_keeper(tmp_path):
    kept, state = that_cannot_grow(), a_state()
    digest = Final(kept, tmp_path).keep(state)
    (name,) = files(tmp_path)
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    again = Final(Kept(kept.fd), tmp_path)  # of a worker that was started again
    assert again.stage is Stage.KEPT
    assert again.tree(digest + 1) is None
    assert (again.tree(digest)["step"], again.tree(digest)["model"]["counts"].tolist()) == (7, [3.0] * 8)
    again.agree(attended=True)
    assert (again.is_over, again.tree()["step"]) == (True, 7)
    kept.close()
    assert files(tmp_path) == []


def test_a_file_that_somebody_was_told_of_stays(tmp_path):
    kept = that_cannot_grow()
    final = Final(kept, tmp_path)
    final.keep(a_state())
    path = final.save()
    kept.close()
    assert [str(tmp_path / name) for name in files(tmp_path)] == [path]
    assert final_state(path)["model"]["counts"].tolist() == [3.0] * 8


def test_before_the_end_there_is_nothing_to_be_written_into_a_file(tmp_path):
    kept = Kept()
    assert Final(kept, tmp_path).save() == Final(None, tmp_path).save() == ""
    assert Final(kept, tmp_path).tree() is None
    Final(kept, tmp_path).agree(attended=True)
    assert (kept.head.stage, files(tmp_path)) == (Stage.TRAINING, [])
    kept.close()


def test_a_worker_that_follows_one_that_was_killed_while_it_kept_the_state_takes_a_file(tmp_path):
    kept = Kept()
    kept.head = Head(progress=7, step=7, size_bytes=4096)  # as it stands while the state is being put there
    Final(kept, tmp_path).keep(a_state())
    assert (kept.head.lies, kept.head.stage, kept.head.progress) == (Lies.IN_FILE, Stage.KEPT, 7)
    assert os.fstat(kept.fd).st_size == STATE_AT
    kept.close()


def test_a_final_state_that_cannot_be_kept_at_all_is_not_acknowledged(tmp_path):
    kept = that_cannot_grow()
    with pytest.raises(FinalStateError, match="can be kept neither in memory"):
        Final(kept, tmp_path / "missing").keep(a_state())
    assert kept.head.stage is Stage.TRAINING
    kept.close()


def test_a_job_whose_final_state_cannot_be_kept_is_not_over(tmp_path, monkeypatch, caplog):
    importlib.import_module("torch._dynamo")  # it makes a directory for temporary files when it is first needed
    kept = that_cannot_grow()
    monkeypatch.setenv(KEPT, str(kept.fd))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(SystemExit, match="76"):
        count(2, tmp_path)
    assert "can be kept neither in memory" in caplog.text
    caplog.clear()  # the error holds all that was under way
    kept.close()


# ------------------------------------------------------------------------------------------ training twice


def test_a_second_training_of_a_script_trains_and_finds_its_own_end_and_the_first_ones_again(tmp_path, capfd):
    script = Path(__file__).parent / "scripts" / "trains_twice.py"
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    kept = Kept()
    assert Supervisor([str(script), str(tmp_path)], environ, kept=kept).run(NoStop()) == 0
    out = capfd.readouterr().out.splitlines()
    assert out == ["1 2 2 [2.0]", "1 2 0 [2.0]", "2 6 6 [8.0]"]


# ------------------------------------------------------------------------------------------ checkpoints of no position


def test_a_checkpoint_that_does_not_say_where_it_is_is_refused_by_name(tmp_path):
    count(10, tmp_path, checkpoint_dir=tmp_path / "kept", checkpoint_every=5)
    tree = Checkpoints(tmp_path / "kept").newest()
    assert tree.pop("position")["passport"]["the batch"] == "24 samples"
    tree["step"] = 20
    Checkpoints(tmp_path / "kept").write(tree)
    with pytest.raises(MismatchError, match=r"step 20 has no position in the samples.*checkpoint_dir"):
        count(30, tmp_path, checkpoint_dir=tmp_path / "kept", batch_size=12)


# ------------------------------------------------------------------------------------------ who is right


def orders(registers, seed, has_elders):
    samples = Samples(8, 4, 1, shuffled(8, seed))
    agree_on_orders(samples, StoreConnection(0, 2, registers, registers), None, has_elders)
    return samples


class Watched(MemoryRegisters):
    """Tells when somebody has looked for an order that does not stand yet."""

    def __init__(self):
        super().__init__()
        self.missed = threading.Event()

    def read(self, key):
        found = super().read(key)
        if found is None and key.startswith("order/"):
            self.missed.set()
        return found


def long_dead(number):
    """Return where a process of this host ran that is no more."""
    return PeerPlace(own_place().machine, 2**30 + number, 1)


@pytest.mark.parametrize("seats", [{}, {1: long_dead(5), 2: long_dead(6)}])
def test_the_only_rank_that_is_not_refused_does_not_train_alone(tmp_path, monkeypatch, seats):
    """The others were refused before they had a seat, or for the order that they drew when they had one."""
    registers = MemoryRegisters()
    rendezvous = Rendezvous(registers, 3)
    for rank in (1, 2):
        rendezvous.refuse(rank, seats.get(rank, long_dead(7)))
        if rank in seats:
            rendezvous.claim(1, rank, seats[rank])
    registers.create("1/founders", encode((MemberId(0, 1),)))
    monkeypatch.setattr(
        "ringside.survive.train.connect", lambda environ, number: StoreConnection(0, 3, registers, registers)
    )
    with pytest.raises(MismatchError, match="rank 0 is the only one left, every other one was refused"):
        count(2, tmp_path)
    assert not any("decided" in key for key in registers.values)


def test_who_is_no_member_leaves_with_a_status_of_its_own_and_says_in_what_it_differs(tmp_path, monkeypatch, caplog):
    registers = MemoryRegisters()
    monkeypatch.setattr("ringside.survive.train.connect", lambda *_: StoreConnection(1, 2, registers, registers))
    registers.create("passport", msgspec.json.encode({"the batch": "7 samples"}))
    with pytest.raises(SystemExit, match="77"):
        count(2, tmp_path)
    assert "rank 1 is refused" in caplog.text
    assert "the batch (24 samples here, 7 samples there)" in caplog.text
    assert Rendezvous(registers, 2).refused(1) == own_place()
    caplog.clear()


def test_who_comes_back_as_somebody_else_does_not_end_the_job_that_it_was_in(tmp_path, monkeypatch):
    registers = MemoryRegisters()
    rendezvous = Rendezvous(registers, 2)
    rendezvous.claim(1, 1, long_dead(5))
    rendezvous.refuse(1, long_dead(6))
    registers.create("1/founders", encode((MemberId(0, 1),)))
    monkeypatch.setattr(
        "ringside.survive.train.connect", lambda environ, number: StoreConnection(0, 2, registers, registers)
    )
    counted = count(2, tmp_path)
    assert (counted["step"], counted["wrong"], counted["left"]) == (2, {}, "")


def test_a_rank_that_has_joined_does_not_begin_an_epoch_before_those_that_were_there():
    registers, left = Watched(), []

    def join():
        try:
            orders(registers, seed=1, has_elders=lambda: True).of_step(0)
        except SystemExit as status:
            left.append(status.code)

    joiner = threading.Thread(target=join)
    joiner.start()
    assert registers.missed.wait(20.0)
    elder = orders(registers, seed=0, has_elders=lambda: False)
    elder.of_step(0)  # today it is this one that is refused
    joiner.join(20.0)
    assert left == [77]
    assert registers.values["order/0"].decode() == elder.order_digest(0)


def test_a_rank_that_has_joined_begins_an_epoch_where_nobody_is_left_who_was_there():
    registers, answers = MemoryRegisters(), [True, True, False]
    joiner = orders(registers, seed=1, has_elders=lambda: answers.pop(0))
    joiner.of_step(0)
    assert (answers, registers.values["order/0"].decode()) == ([], joiner.order_digest(0))


def test_an_order_that_was_only_looked_at_is_agreed_on_with_nobody():
    """A rank that may not go on from a checkpoint has shown nobody its order."""
    registers = MemoryRegisters()
    samples = orders(registers, seed=1, has_elders=lambda: False)
    digest = samples.order_digest(0)
    assert not registers.values
    samples.of_step(1)
    assert {key: value.decode() for key, value in registers.values.items()} == {"order/0": digest}
    registers.values.clear()
    samples.of_step(0)
    assert not registers.values, "of what is known nobody is asked again"
