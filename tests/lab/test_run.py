"""Ranks in a lab: what becomes of them, and of those that do not end."""

from __future__ import annotations

import sys

import pytest

from .factory import LabFactory

REFUSES = "trap '' TERM; echo here; exec sleep 600"

GLOO = """
import time, torch, torch.distributed as dist
since = time.monotonic()
dist.init_process_group("gloo")
took = time.monotonic() - since
tensor = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(tensor)
print(tensor[0].item(), tensor[-1].item(), took)
dist.destroy_process_group()
"""


def test_status_and_output_of_every_rank(lab_factory: LabFactory):
    lines = []
    lab = lab_factory(hosts=2, ranks_per_host=2)
    result = lab.run(
        ["sh", "-c", "echo out $RANK; echo $WORDS >&2; printf unfinished; exit $RANK"],
        env={"WORDS": "err"},
        timeout_s=60,
        sink=lambda place, stream, line: lines.append((place.rank, stream, line)),
    )
    assert [rank.status for rank in result.ranks] == [0, 1, 2, 3]
    assert [rank.stdout for rank in result.ranks] == [f"out {rank}\nunfinished" for rank in range(4)]
    assert [rank.stderr for rank in result.ranks] == ["err\n"] * 4
    wanted = [
        (rank, *rest)
        for rank in range(4)
        for rest in (("stderr", "err"), ("stdout", f"out {rank}"), ("stdout", "unfinished"))
    ]
    assert sorted(lines) == wanted
    assert not result.ok
    assert not result.timed_out
    assert result.exit_status in (1, 2, 3)


def test_much_output_on_both_streams_is_read(lab_factory: LabFactory):
    code = "import sys; sys.stdout.write('o' * 500000); sys.stderr.write('e' * 500000)"
    result = lab_factory(hosts=2).run([sys.executable, "-c", code], timeout_s=60).check()
    assert {(len(rank.stdout), len(rank.stderr)) for rank in result.ranks} == {(500000, 500000)}


def test_ranks_that_do_not_end_are_ended_with_what_they_started(lab_factory: LabFactory):
    result = lab_factory(hosts=2).run(["sh", "-c", "sleep 600 & wait"], timeout_s=0.5)
    assert result.timed_out
    assert [(rank.status, rank.ended) for rank in result.ranks] == [(-15, True)] * 2


def test_a_rank_that_refuses_to_end_is_killed(lab_factory: LabFactory):
    for timeout_s in (0.5, 4.0, 32.0):  # a slow machine may not get as far as ignoring SIGTERM in the first
        result = lab_factory(hosts=1).run(["sh", "-c", REFUSES], timeout_s=timeout_s)
        if result.ranks[0].stdout:
            break
    assert result.timed_out
    assert (result.ranks[0].stdout, result.ranks[0].status, result.ranks[0].ended) == ("here\n", -9, True)


def test_after_a_failure_the_others_have_a_limited_time(lab_factory: LabFactory):
    lab = lab_factory(hosts=2, ranks_per_host=2)
    result = lab.run(["sh", "-c", "test $RANK != 2 || exit 7; exec sleep 600"], timeout_s=100, after_failure_s=0.2)
    assert result.first_failure is not None
    assert result.first_failure.rank == 2
    assert result.exit_status == 7
    assert [rank.ended for rank in result.ranks] == [True, True, False, True]


@pytest.mark.parametrize("wiring", ["star", "mesh"])
@pytest.mark.long
def test_gloo_over_four_hosts(lab_factory: LabFactory, wiring: str):
    pytest.importorskip("torch")
    lab = lab_factory(hosts=4, ranks_per_host=2, wiring=wiring)
    result = lab.run([sys.executable, "-c", GLOO], timeout_s=100).check()
    assert [rank.stdout.split()[:2] for rank in result.ranks] == [["36.0", "36.0"]] * 8
    assert all(received > 4000 and sent > 4000 for received, sent in result.bytes_per_host)
    # Were addresses looked up by name, or a wrong interface tried first, this would be many seconds.
    print("init_process_group took", max(float(rank.stdout.split()[2]) for rank in result.ranks), "s")
