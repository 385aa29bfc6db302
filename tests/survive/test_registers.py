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
    MemberId,
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
