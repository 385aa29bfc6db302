"""Registers agree, whatever they rest on; a silent store is told of; hostile records are refused."""

import threading

import pytest

from ringside.errors import RingsideError, StoreGoneError, UsageError
from ringside.survive.cluster.registers import NOBODY_WRITES, MemoryRegisters, StoreRegisters
from ringside.survive.protocol.decision import (
    MOST_BYTES,
    Abort,
    Commit,
    Decided,
    Decisions,
    MemberId,
    Tag,
    decisions_key,
    decode_decided,
    encode,
)
from ringside.survive.protocol.generation import Generation, assign_micro_batches, decode_generation

SEATS = (MemberId(0, 1), MemberId(2, 5))
COMMIT = Commit(SEATS, 8, 4, 4, "ab12")


def hash_store(tmp_path):
    return pytest.importorskip("torch.distributed").HashStore()


def file_store(tmp_path):
    return pytest.importorskip("torch.distributed").FileStore(str(tmp_path / "store"), 1)


def prefixed_tcp_store(tmp_path):
    dist = pytest.importorskip("torch.distributed")
    return dist.PrefixStore("job", dist.TCPStore("127.0.0.1", 0, is_master=True))


@pytest.mark.parametrize("store", [None, hash_store, file_store, prefixed_tcp_store])
def test_registers_are_written_once_or_compared_and_set(store, tmp_path):
    registers = MemoryRegisters() if store is None else StoreRegisters(store(tmp_path), timeout_s=60)
    assert registers.read("a") is None
    assert registers.create("a", b"\xff\x00first") == b"\xff\x00first"
    assert registers.create("a", b"second") == b"\xff\x00first"
    assert registers.swap("a", b"second", b"third") == b"\xff\x00first"
    assert registers.swap("a", b"\xff\x00first", b"third") == registers.read("a") == b"third"
    assert registers.swap("a", b"third", b"third") == b"third"
    assert registers.swap("b", b"anything", b"new") is registers.read("b") is None
    assert registers.swap("b", None, b"new") == b"new"
    assert registers.swap("b", None, b"newer") == b"new"
    for value in (b"", NOBODY_WRITES):
        with pytest.raises(UsageError, match="at least one byte"):
            registers.create("c", value)
    if store is not None:
        registers.close()


class Stalled:
    """A store whose host is stopped, until it is told to go on."""

    def __init__(self):
        self.goes_on = threading.Event()

    def compare_set(self, key, expected, desired):
        assert self.goes_on.wait(60)
        return desired


class Gone:
    def compare_set(self, key, expected, desired):
        raise RuntimeError("Broken pipe")


def test_a_store_that_is_silent_or_gone_is_told_of():
    store = Stalled()
    registers = StoreRegisters(store, timeout_s=0.01)
    with pytest.raises(StoreGoneError, match=r"did not answer within 0\.01 s .*host"):
        registers.read("a")
    store.goes_on.set()
    registers.close()
    gone = StoreRegisters(Gone(), timeout_s=60)
    with pytest.raises(StoreGoneError, match="cannot be asked for 'a' any more: Broken pipe"):
        gone.create("a", b"x")
    gone.close()


DECIDED = Decided().after(40, COMMIT)
GENERATION = Generation(1, 7, 40, 2, SEATS, (0, 2, 2), joining=(2,), broken=((0, 2),), unsettled=((5, 39), (6, 40)))


def test_records_come_back_as_they_went():
    for decided in (DECIDED, Decided(abort=Abort(9)), DECIDED.after(41, Abort(9))):
        assert decode_decided(encode(decided)) == decided
    assert decode_generation(encode(GENERATION)) == GENERATION


@pytest.mark.parametrize("decode", [decode_decided, decode_generation])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91" * 5000,
        bytes(MOST_BYTES + 1),
        encode(DECIDED)[:-1],
        encode(DECIDED).replace(b"commit", b"commix"),
        encode(GENERATION).replace(b"owners", b"ownerz"),
        encode(GENERATION) + b"x",
    ],
    ids=["empty", "no message pack", "deep", "long", "torn", "other kind", "other field", "more behind"],
)
def test_hostile_records_are_refused_in_one_line(decode, data):
    with pytest.raises(RingsideError, match="store") as told:
        decode(data)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Commit((), 0, 1, 1, ""),
        lambda: Commit((SEATS[1], SEATS[0]), 0, 1, 1, ""),
        lambda: Generation(1, 1, 0, members=(MemberId(1, 1), MemberId(1, 2))),
        lambda: Generation(1, 1, 0, members=SEATS, owners=(0, 1)),
        lambda: assign_micro_batches((0, 1), {0: 1}),
    ],
)
def test_records_that_make_no_sense_cannot_be_made(make):
    with pytest.raises(UsageError):
        make()


def test_survivors_keep_their_micro_batches():
    assert assign_micro_batches((0, 0, 1, 1, 2, 2, 3, 3), {0: 3, 1: 3, 2: 2}) == (0, 0, 1, 1, 2, 2, 0, 1)
    assert assign_micro_batches((0, 0, 0, 0), {0: 1, 1: 3}) == (0, 1, 1, 1)
    assert assign_micro_batches((0, 1), {0: 0, 1: 2}) == (1, 1)


def commit(step, digest="x"):
    return Commit(SEATS, 8 * step, 8, 8, digest)


def test_the_newest_commit_stands_for_those_before_it_and_an_abort_for_all_that_follow():
    decided = Decided().after(40, commit(40)).after(41, commit(41, "y"))
    assert (decided.first, decided.position, decided.last, decided.abort) == (40, 320, 41, None)
    assert [decided.answer(step) for step in (39, 40, 41, 42)] == [
        commit(41, ""), commit(41, ""), commit(41, "y"), None,
    ]  # fmt: skip
    ended = decided.after(42, Abort(9))
    assert (ended.answer(41), ended.answer(42), ended.answer(99)) == (commit(41, "y"), Abort(9), Abort(9))
    for step, wrong in ((43, commit(42)), (42, commit(43)), (41, commit(42))):
        with pytest.raises(UsageError, match=f"step {step} from sample {wrong.first} on cannot be committed after"):
            decided.after(step, wrong)
    for made in ({"last": 0}, {"commit": COMMIT}, {"commit": COMMIT, "first": 3, "last": 2}):
        with pytest.raises(UsageError, match="names its newest COMMIT"):
            Decided(**made)


class Raced(MemoryRegisters):
    """Registers into which somebody else writes right after they were read, once."""

    def __init__(self):
        super().__init__()
        self.reads, self.then = 0, None

    def read(self, key):
        self.reads += 1
        found, then, self.then = super().read(key), self.then, None
        if then is not None:
            then()
        return found


def test_of_two_decisions_the_first_one_stands_for_both():
    registers = Raced()
    one, other = Decisions(registers), Decisions(registers)
    tag = Tag(1, 1, 40, 0)
    registers.then = lambda: other.decide(tag, Abort(2))
    assert one.decide(tag, commit(40)) == other.read(tag) == Abort(2)
    tag = Tag(1, 2, 40, 0)
    registers.then = lambda: other.decide(tag, commit(40))
    ended = one.end(1, 2, Abort(3))
    assert (ended.commit, ended.abort) == (commit(40), Abort(3)), "and not only what it had read"
    assert one.end(1, 2, Abort(4)) == ended == decode_decided(registers.values[decisions_key(1, 2)])
    assert one.end(1, 3, Abort(4)) == Decided(first=0, position=0, last=-1, commit=None, abort=Abort(4))
    assert one.read(Tag(1, 4, 40, 0)) is None


def test_a_leader_knows_what_it_has_written_and_reads_what_it_has_not():
    registers = Raced()
    leader = Decisions(registers)
    for step in range(40, 45):
        assert leader.decide(Tag(1, 1, step, 0), commit(step)) == commit(step)
    assert registers.reads == 1
    assert leader.decide(Tag(1, 1, 42, 0), Abort(7)) == commit(44, ""), "that was decided long ago"
    assert leader.decide(Tag(1, 2, 45, 0), commit(45)) == commit(45)
    assert registers.reads == 3
