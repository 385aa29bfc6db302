"""What torch 2.15 recorded of real ranks, as `scripts/record_torch_2_15.py` made them run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from ringside.doctor import examine
from ringside.doctor.flight_recorder.dump import ANYONE, read_dump

from .dumps import call, dump, world, write

RECORDED = Path(__file__).parent / "torch_2_15"
CALLED_S = {"stays_away": 1795765709.0, "from_anyone": 1795765731.1}


def recorded(job: str, folder: Path) -> Path:
    """Copy a job's files, as if written a minute after its last call."""
    shutil.copytree(RECORDED / job, folder / job)
    for path in (folder / job).iterdir():
        os.utime(path, (CALLED_S[job] + 60, CALLED_S[job] + 60))
    return folder / job


def test_the_rank_that_stayed_away_is_named(tmp_path: Path) -> None:
    (verdict,) = examine([recorded("stays_away", tmp_path)]).verdicts
    assert (verdict.kind, verdict.ranks) == ("hang", [1])
    assert verdict.evidence["collective"] == "gloo:all_reduce"


def test_a_receive_from_anyone_blames_no_rank_for_not_sending(tmp_path: Path) -> None:
    """It was read as one from rank 0, which waits in the all-reduce: rank 0 was blamed as well."""
    (verdict,) = examine([recorded("from_anyone", tmp_path)]).verdicts
    assert (verdict.kind, verdict.ranks) == ("hang", [2])
    assert "rank 2 waits for a message from anyone" in verdict.cause
    assert verdict.evidence["victims"] == "0, 1"


def test_a_receive_from_anyone_alone_is_open_and_names_nobody(tmp_path: Path) -> None:
    receive = call(2, "recv 1<-?", p2p=True, done=False, backend="gloo")
    found = examine([write(tmp_path, world(3, {1: [call(1), receive]}, [call(1)]))])
    assert found.verdicts == []
    assert "it takes a message from anyone" in found.unjudged[0].why


def test_who_waits_in_coalesced_messages_waits_for_no_message_from_anyone(tmp_path: Path) -> None:
    messages = call(2, "coalesced", p2p=True, done=False)
    write(tmp_path, world(3, {1: [call(1), messages]}, [call(1), call(2, done=False)]))
    (verdict,) = examine([tmp_path]).verdicts
    assert verdict.ranks == [1]
    assert "anyone" not in verdict.cause


def test_what_is_sent_to_who_receives_from_anyone_may_be_taken(tmp_path: Path) -> None:
    receive = call(2, "recv 1<-?", p2p=True, done=False, backend="nccl2")
    send = call(2, "send 0->1", p2p=True, done=False, backend="nccl2")
    assert examine([write(tmp_path, world(3, {0: [call(1), send], 1: [call(1), receive]}, [call(1)]))]).verdicts == []
    (verdict,) = examine([write(tmp_path, world(3, {0: [call(1), send, send], 1: [call(1)]}, [call(1)]))]).verdicts
    assert verdict.ranks == [1]


@pytest.mark.parametrize("backend", ["nccl2", "nccl-lazy", "c10d", "gloo", "an:odd one"])
def test_backends_by_any_name(tmp_path: Path, backend: str) -> None:
    usual = [call(1, backend=backend), call(2, "all_to_all_single", done=False, backend=backend)]
    write(tmp_path, world(3, {2: usual[:1]}, usual))
    (verdict,) = examine([tmp_path]).verdicts
    assert verdict.ranks == [2]
    assert verdict.evidence["collective"] == f"{backend}:all_to_all_single"
    content = dump([call(1, "recv 3<-?", p2p=True, backend=backend)], {"0": range(4)})
    (received,) = read_dump(content, "x", 3).calls
    assert (received.op, received.backend, received.peer, received.p2p) == ("recv", backend, ANYONE, True)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_uneven_shards_are_no_mismatch_and_another_list_of_them_is(tmp_path: Path, op: str) -> None:
    def shard(rank: int, shards: list[list[int]]) -> dict[str, object]:
        one, all_of_them = ("input_sizes", "output_sizes") if op == "all_gather" else ("output_sizes", "input_sizes")
        return {**call(1, op), one: [shards[rank]], all_of_them: shards}

    right, wrong = [[4, 8], [4, 8], [3, 8]], [[4, 8], [4, 8], [4, 8]]
    write(tmp_path, world(3, {rank: [shard(rank, right)] for rank in range(3)}, []))
    assert examine([tmp_path]).verdicts == []
    write(tmp_path, world(3, {rank: [shard(rank, wrong if rank == 1 else right)] for rank in range(3)}, []))
    (verdict,) = examine([tmp_path]).verdicts
    assert (verdict.kind, verdict.ranks) == ("mismatch", [1])


def test_the_pages_of_the_debug_server(tmp_path: Path) -> None:
    (page,) = RECORDED.glob("stays_away/c10d_health_check_*")
    found = examine([page])
    assert [(note.kind, note.text, note.used) for note in found.notes] == [("c10d health check", "of 3 ranks", True)]
    assert found.unjudged == []
    text = page.read_text().replace("true", "false", 1).replace("[]", json.dumps(["nccl2"]), 1)
    (tmp_path / "page.txt").write_text(text.rpartition("\n")[0] + "\nError: 503")
    found = examine([tmp_path / "page.txt"])
    assert [line.what for line in found.unjudged] == ["why rank 0 is unhealthy", "the health of rank 2"]
    assert "nccl2 timed out or failed" in found.unjudged[0].why
