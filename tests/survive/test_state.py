import hashlib
import inspect
import logging
import os
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402

from ringside.errors import MismatchError, RingsideError, UnsupportedError  # noqa: E402
from ringside.survive import connection as passport  # noqa: E402
from ringside.survive.cluster.peers import own_place  # noqa: E402
from ringside.survive.cluster.shared_memory import OwnArena, read_only  # noqa: E402
from ringside.survive.data.samples import Samples, shuffled  # noqa: E402
from ringside.survive.state.checkpoint import Checkpoints  # noqa: E402
from ringside.survive.state.kept import DIGEST_BYTES, STATE_AT, Head, Kept, Lies, Stage  # noqa: E402
from ringside.survive.state.state import (  # noqa: E402  # noqa: E402
    JobState,
    digest_of,
    pack,
    packed_size,
    put_together,
    take_apart,
    unpack,
    unpack_checked,
)


def trained(seed=0, steps=3, width=4):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    state = JobState(model, optimizer, scheduler)
    state.step = steps
    return state


def test_a_tree_survives_being_packed_and_its_digest_sees_every_bit():
    tree = {"a": [torch.arange(5), (1, 2.5, None)], 3: {"b": torch.tensor(-0.0), "c.d": b"x"}, "e": torch.empty(0, 2)}
    memory = np.zeros(packed_size(tree), dtype=np.uint8)
    pack(tree, memory)
    again = unpack(memory)
    assert digest_of(again) == digest_of(tree)
    assert again[3]["c.d"] == b"x"
    again[3]["b"] = torch.tensor(0.0)
    assert digest_of(again) != digest_of(tree)
    assert put_together(*take_apart(tree))["a"][1] == [1, 2.5, None]


def test_names_that_read_alike_are_kept_apart():
    tree = {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2)}
    again = put_together(*take_apart(tree))
    assert (int(again["a"]["b"]), int(again["a.b"])) == (1, 2)


@pytest.mark.parametrize("damage", ["head", "cut", "length", "start"])
def test_a_damaged_state_is_refused(damage):
    tree = trained().tree()
    memory = np.zeros(packed_size(tree), dtype=np.uint8)
    pack(tree, memory)
    if damage == "head":
        memory[40:80] = 255
    elif damage == "length":
        memory[:8] = 255
    memory = memory[: len(memory) // 2] if damage == "cut" else memory[4:] if damage == "start" else memory
    with pytest.raises(RingsideError, match="not whole"):
        unpack(memory)


def test_what_is_no_plain_value_is_named():
    with pytest.raises(UnsupportedError, match=r"optimizer\.x is a object"):
        take_apart({"optimizer": {"x": object()}})


def test_a_state_is_taken_over_from_a_peer_bit_for_bit_and_only_the_one_agreed_on():
    ours, other = trained(0), trained(1, steps=5)
    assert ours.digest() != other.digest()
    given = OwnArena(packed_size(ours.tree()))
    pack(ours.tree(), given.bytes)
    with pytest.raises(RingsideError, match="not what was written"):
        unpack_checked(read_only(given.address), ours.digest() ^ 1)
    other.load(unpack_checked(read_only(given.address), ours.digest()))
    assert other.digest() == ours.digest()
    assert other.step == 3
    with pytest.raises(MismatchError, match="another model"):
        trained(width=5).load(unpack_checked(given.bytes, ours.digest()))
    given.close()


def test_a_worker_with_another_model_is_refused_by_name():
    def own(width, batch=4):
        state = trained(width=width)
        return passport.fingerprint(state.model, state.optimizer, range(20), Samples(20, batch, 2, shuffled(20, 0)), 0)

    passport.check_fingerprint(own(4), msgspec.json.encode(own(4)), "rank 2")
    with pytest.raises(MismatchError, match=r"rank 2 is refused.*the batch \(8 samples.*the model \("):
        passport.check_fingerprint(own(5, batch=8), msgspec.json.encode(own(4)), "rank 2")
    with pytest.raises(MismatchError, match="another job"):
        passport.check_fingerprint(own(4), b"\xff", "rank 2")


@pytest.mark.skipif(
    "no_dist" not in inspect.signature(dcp.load).parameters, reason="torch 2.4's own `dcp.load` needs a process group"
)
def test_a_checkpoint_is_read_back_by_us_and_by_dcp_alone(tmp_path):
    state, other = trained(0), trained(1)
    checkpoints = Checkpoints(tmp_path / "new")
    assert checkpoints.newest() is None
    checkpoints.begin(state.copied())
    checkpoints.finish(60)
    digest = state.digest()
    other.load(checkpoints.newest())
    assert other.digest() == digest
    third = trained(2).model.state_dict()
    with pytest.warns(UserWarning, match="single process"):
        dcp.load({"model": third}, checkpoint_id=tmp_path / "new" / "step-00000003", no_dist=True)
    assert digest_of(dict(third)) == digest_of(dict(state.model.state_dict()))


def test_a_torn_checkpoint_is_skipped_for_the_one_before(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path)
    state = trained()
    paths = []
    for step in (1, 2, 3, 4):
        state.step = step
        paths.append(checkpoints.write(state.copied()))
    assert [path.exists() for path in paths] == [False, False, True, True]
    (data,) = paths[3].glob("*.distcp")
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    assert checkpoints.newest()["step"] == 3
    assert "is skipped" in caplog.text
    (paths[2] / ".metadata").write_bytes(b"")
    assert checkpoints.newest() is None


def test_a_disk_that_is_full_is_told_once_until_there_is_room_and_leaves_nothing(tmp_path, caplog, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    checkpoints, state = Checkpoints(tmp_path), trained()

    def written(step):
        state.step = step
        checkpoints.begin(state.copied())
        checkpoints.finish(60)

    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr(dcp.FileSystemWriter, "write_data", full)
        written(1)
        written(2)
    assert [record.name for record in caplog.records] == ["ringside.survive.state.checkpoint"]
    assert "No space left on device" in caplog.text
    assert list(tmp_path.iterdir()) == []
    written(3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_what_stands_in_the_way_of_a_checkpoint_is_set_aside_and_old_ones_go(tmp_path, caplog):
    checkpoints, state = Checkpoints(tmp_path), trained()

    def written(step):
        state.step = step
        return checkpoints.write(state.copied())

    def names():
        return sorted(path.name for path in tmp_path.iterdir())

    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002" / "half").write_bytes(b"")
    (tmp_path / "step-2").mkdir()  # not one of ours
    path = written(2)
    assert names() == ["step-00000002", "step-2", "torn-step-00000002"]
    assert "is written anew, and lies in torn-step-00000002 now" in caplog.text
    at = path.stat().st_ino
    assert written(2) == path
    assert path.stat().st_ino == at, "it is there already"
    written(3)
    assert names() == ["step-00000002", "step-00000003", "step-2", "torn-step-00000002"]
    written(4)
    assert names() == ["step-00000003", "step-00000004", "step-2"]
    (tmp_path / "step-00000004" / "ringside.json").write_bytes(b"{}")
    assert checkpoints.newest()["step"] == 3
    written(5)
    assert names() == ["step-00000003", "step-00000004", "step-00000005", "step-2"], "a torn one does not count"


def test_what_dead_writers_left_is_removed_and_what_others_write_is_not(tmp_path):
    checkpoints, state = Checkpoints(tmp_path), trained()
    place = own_place()
    here, there = (hashlib.blake2b(name.encode(), digest_size=4).hexdigest() for name in (place.machine, "elsewhere"))
    old, fresh = time.time() - 3700, time.time() - 3500
    left = {
        f".step-00000001-{here}-{place.pid}-{place.started}-00000000": (old, True),  # this process still writes
        f".step-00000001-{here}-{place.pid}-1-00000000": (fresh, False),  # a process of that number that is over
        f".step-00000001-{there}-7-8-00000000": (fresh, True),
        f".step-00000001-{there}-7-9-00000000": (old, False),
        ".gone-12": (fresh, False),
        ".step-1-x": (old, True),
        ".other": (old, True),
    }
    for name, (at, _) in left.items():
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (at, at))
    checkpoints.write(state.copied())
    assert {name: (tmp_path / name).exists() for name in left} == {name: stays for name, (_, stays) in left.items()}


def test_parts_of_what_is_kept_lie_behind_each_other_at_pages(tmp_path):
    kept = Kept()
    assert (kept.newest.offset, os.fstat(kept.fd).st_size) == (0, STATE_AT)
    head = Head(3, Stage.KEPT, 3, 0xABCD, 5000, str(tmp_path))
    kept.head = head
    assert kept.newest.offset == 0, "what is not over yet is what is trained now"
    for size, lies, behind in ((0, 0, 1), (1, 0, 2), (STATE_AT, 0, 2), (STATE_AT + 1, 0, 3), (5000, Lies.IN_FILE, 1)):
        kept.head = replace(head, size_bytes=size, lies=Lies(lies))
        assert kept.behind().offset == behind * STATE_AT
    kept.head = replace(head, stage=Stage.OVER)
    assert kept.newest.offset == 0, "nobody has begun another"
    kept.behind().head = Head(1)
    assert (kept.newest.offset, kept.newest.head) == (3 * STATE_AT, Head(1))
    os.pwrite(kept.fd, bytes(range(250)) * 20, STATE_AT)
    path = kept.save()
    assert os.path.dirname(path) == str(tmp_path)
    assert os.path.basename(path).startswith("ringside-final-step-00000003-")
    assert Path(path).read_bytes() == bytes(range(250)) * 20 + (0xABCD).to_bytes(DIGEST_BYTES, "little")
    assert os.stat(path).st_mode & 0o777 == 0o600
    file = tmp_path / "a"
    file.write_bytes(b"")
    kept.head = replace(head, lies=Lies.IN_FILE, directory=str(file))
    assert (kept.save(), kept.head.lies) == (str(file), Lies.SAVED)
    kept.head = replace(kept.head, lies=Lies.IN_FILE)
    kept.close()
    assert not file.exists(), "it goes with the keeper"


def test_a_worker_takes_what_its_keeper_gave_it_and_nothing_else(tmp_path):
    kept = Kept()
    given = Kept.of_environment({"RINGSIDE_SURVIVE_KEPT": str(kept.fd)})
    assert given is not None
    assert (given.number, given.offset) == (kept.number, 0)
    assert not os.get_inheritable(kept.fd)
    with (tmp_path / "file").open("wb") as other:
        for words in ("", "x", "99999", str(other.fileno())):
            assert Kept.of_environment({"RINGSIDE_SURVIVE_KEPT": words}) is None
    kept.close()
