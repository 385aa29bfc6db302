"""What is told, written and agreed on are values: nobody changes one, equal ones are one, and their bytes stay."""

import dataclasses
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

import ringside.survive as survive
from ringside.errors import RingsideError
from ringside.survive import connection as connecting
from ringside.survive.cluster import links, peers, rendezvous
from ringside.survive.cluster.peers import PeerPlace
from ringside.survive.cluster.shared_memory import Address
from ringside.survive.protocol import events, instructions, settings
from ringside.survive.protocol.decision import (
    Abort,
    Commit,
    Decided,
    MemberId,
    Tag,
    decode_decided,
    encode,
)
from ringside.survive.protocol.events import Acknowledgement, RankOffered
from ringside.survive.protocol.generation import Generation, decode_generation
from ringside.survive.state.kept import Head, Kept, Lies, Stage

CHANGE = {"SurviveJob", "HostSums", "Supervisor", "PeerWait", "Failpoints", "Samples", "Stragglers", "HostView"} | {
    "AttemptExchange",
    "HostExchange",
    "NetExchange",
}
"""What is no value: parts of a worker."""


def defined():
    """Yield every class that a module of survive defines."""
    for found in pkgutil.walk_packages(survive.__path__, "ringside.survive."):
        if found.name.endswith("__main__"):
            continue
        module = importlib.import_module(found.name)
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ == found.name:
                yield kind


def test_whatever_is_a_value_is_frozen():
    structs = [kind for kind in defined() if issubclass(kind, msgspec.Struct) and kind.__name__[0] != "_"]
    assert len(structs) > 50
    assert [kind.__name__ for kind in structs if not kind.__struct_config__.frozen] == []
    kept_by_hand = {
        kind.__name__ for kind in defined() if dataclasses.is_dataclass(kind) and not kind.__dataclass_params__.frozen
    }
    assert kept_by_hand == CHANGE


def test_what_a_member_hears_and_is_told_to_do_is_all_that_there_is():
    told = {kind for kind in vars(events).values() if inspect.isclass(kind) and issubclass(kind, msgspec.Struct)}
    assert {kind for kind in told if kind.__module__ == events.__name__ and not issubclass(kind, events.Event)} == {
        Acknowledgement,
        RankOffered,
    }
    done = {kind for kind in vars(instructions).values() if inspect.isclass(kind) and issubclass(kind, msgspec.Struct)}
    own = {kind for kind in done if kind.__module__ == instructions.__name__}
    assert all(issubclass(kind, instructions.Instruction) for kind in own)


A, B = MemberId(0, 1), MemberId(1, 2)
TAG = Tag(1, 2, 3, 4)
WRITTEN = {
    "seat": (A, b"\x92\x00\x01"),
    "tag": (TAG, b"\x94\x01\x02\x03\x04"),
    "ack": (Acknowledgement(TAG, B, "d", "s"), b"\x94\x94\x01\x02\x03\x04\x92\x01\x02\xa1d\xa1s"),
    "offer": (RankOffered(TAG, B, "d"), b"\x93\x94\x01\x02\x03\x04\x92\x01\x02\xa1d"),
    "abort": (Abort(7), b"\x82\xa4type\xa5abort\xaageneration\x07"),
}


@pytest.mark.parametrize("what", WRITTEN)
def test_bytes_stay_as_they_are_so_that_a_worker_of_another_version_reads_them(what):
    value, data = WRITTEN[what]
    assert encode(value) == data
    assert msgspec.msgpack.decode(data, type=type(value)) == value


def test_records_are_read_back_and_what_they_do_not_have_is_refused():
    commit = Commit((A, B), 24, 8, 8, "x")
    decided = Decided(2, 16, 3, commit, Abort(5))
    assert decode_decided(encode(decided)) == decided
    record = Generation(
        *(1, 5, 3, 2, (A, B), (0, 1, 1), (1,), ((0, 1),), (2,), (MemberId(3, 1),), ((4, 3),)),
        over=True, last=9, final="f", without=(2,)
    )  # fmt: skip
    assert decode_generation(encode(record)) == record
    for read, data in ((decode_decided, encode(decided)), (decode_generation, encode(record))):
        plain = msgspec.msgpack.decode(data)
        with pytest.raises(RingsideError):
            read(msgspec.msgpack.encode({**plain, "more": 1}))
        with pytest.raises(RingsideError):
            read(data[:-1])
    place = PeerPlace("machine", 7, 8, 1, 2, (3, 4))
    assert msgspec.msgpack.decode(encode(place), type=PeerPlace) == place
    assert (peers.own_place().life, peers.own_place().step, peers.own_place(2).life) == (0, 0, 2)
    assert PeerPlace("machine", 7, 8) == PeerPlace("machine", 7, 8, 0, 0, (0, 0))
    message = rendezvous.Offered(RankOffered(TAG, B, "d"), Address(1, 2, 3, 4))
    assert msgspec.msgpack.decode(encode(message), type=rendezvous.Message) == message


def test_the_head_of_what_a_keeper_keeps_is_read_as_it_was_written():
    kept = Kept()
    heads = [
        Head(),
        Head(7, Stage.OVER, 6, 2**64 - 1, 2**40, "/a/ü", Lies.SAVED),
        Head(1, Stage.KEPT, 2, 3, 4, "x" * 4000, Lies.IN_FILE),
    ]
    for head in heads:
        kept.head = head
        assert kept.head == head
    kept.head = Head(directory="y" * 5000)
    assert kept.head == Head(), "a name that does not fit is that of the directory for temporary files"
    kept.progressed(5)
    kept.progressed(4)
    assert kept.head.progress == 5
    kept.close()


TOLD = [
    (r"its host is silent\) is waited for (\d+) s", settings.ProtocolSettings(1, lambda step: (0, 1)).end_patience_s),
    (r"the others go on after some (\d+) s", peers.BEATS_S),
    (r"Its worker says why after (\d+) s", connecting.CALL_S),
    (r"asks to join again in (\d+) s", links.FIRST_PAUSE_S),
    (r"knock after 5, 10, 20 ... up to (\d+) s", links.LONGEST_PAUSE_S),
    (r"gone around, with all ranks, after some (\d+) s", 5 * connecting.JOINING_S),
    (r"within some (\d+) s a stopped", peers.STOPPED_S),
]


def test_the_numbers_that_the_manual_tells_are_those_of_the_code():
    text = (Path(__file__).parents[2] / "docs/survive.md").read_text()
    for words, number in TOLD:
        found = re.search(words, text)
        assert found is None or abs(float(found[1]) - number) <= 0.5, words
    assert sum(re.search(words, text) is not None for words, _ in TOLD) >= 6
