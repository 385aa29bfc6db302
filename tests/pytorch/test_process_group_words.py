"""Messages of a process group's errors have Gloo's words: the table in docs/process-group.md, each case provoked."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from tests.support.ranks import ROOT, Team, on_ranks  # noqa: E402

from .groups import meeting_point  # noqa: E402
from .process_groups import LIMIT_S, OF_TODAY, backend  # noqa: E402

pytestmark = [pytest.mark.native, pytest.mark.thorough, OF_TODAY]

OWN, BRIEF, LONG = timedelta(seconds=1), timedelta(milliseconds=100), timedelta(seconds=30)
NOTHING = timedelta(0)


def reduce(group: Any, async_op: bool = False) -> Any:
    return dist.all_reduce(torch.ones(3), group=group, async_op=async_op)


def limited(group: Any) -> None:
    options = dist.AllreduceOptions()
    options.timeout = BRIEF
    group.allreduce([torch.ones(3)], options).wait()


def set_to(timeout: timedelta) -> Callable[[Any], None]:
    def barrier(group: Any) -> None:
        group.set_timeout(timeout)
        dist.barrier(group)

    return barrier


def receive(group: Any) -> None:
    dist.recv(torch.ones(3), 1, group=group)


def destroyed(group: Any) -> None:
    group.set_timeout(BRIEF)
    dist.destroy_process_group(group)
    group.allreduce([torch.ones(3)]).wait()


class Case(NamedTuple):
    """How rank 0 gets an error.

    Args:
        call: What it calls, with a group of both ranks.
        other: What rank 1 does meanwhile, with that group; None: nothing.
        timeout: Of the group.
        pattern: What code in the wild, torch's own tests first of all, looks for in the message; "": nothing is known.
    """

    call: Callable[[Any], Any]
    other: Callable[[Any], Any] | None = None
    timeout: timedelta = LONG
    pattern: str = ""


DIFFERENT = "different collectives (Gloo: with `TORCH_DISTRIBUTED_DEBUG=DETAIL`)"

# By the first cell of their rows; the rows that follow need rank 1 to stay away from making a group, or to die.
CASES = {
    "a rank misses a collective": Case(reduce, None, OWN, "Timed out waiting"),
    "a rank misses a barrier": Case(dist.barrier, None, OWN, " (Timed out|closed|timeout) "),
    "a call's own timeout": Case(limited),
    "`barrier(timeout=...)`": Case(
        lambda group: dist.barrier(group, timeout=BRIEF), None, LONG, "Timed out waiting 100ms"
    ),
    "`set_timeout`": Case(set_to(BRIEF)),
    "`work.wait(timeout)`": Case(lambda group: reduce(group, True).wait(BRIEF), None, LONG, "Operation timed out"),
    "`barrier` with a timeout of 0": Case(lambda group: dist.barrier(group, timeout=NOTHING)),
    "`set_timeout` to 0": Case(set_to(NOTHING)),
    "`new_group` with a timeout of 0": Case(dist.barrier, None, NOTHING),
    "`recv` of what is not sent": Case(receive, None, OWN, "Timed out waiting 1000ms for recv operation"),
    "a rank misses `monitored_barrier`": Case(
        lambda group: dist.monitored_barrier(group, BRIEF), None, LONG, "Rank 1 failed to pass monitoredBarrier"
    ),
    "... with `wait_all_ranks`": Case(
        lambda group: dist.monitored_barrier(group, BRIEF, True), None, LONG, "Ranks 1 failed to pass monitoredBarrier"
    ),
    "... with a timeout of 0": Case(
        lambda group: dist.monitored_barrier(group, NOTHING), None, LONG, "Rank 0 timed out in monitoredBarrier"
    ),
    DIFFERENT: Case(dist.barrier, reduce, LONG, "Detected mismatch between collectives on ranks"),
    "a rank destroys its group": Case(reduce, dist.destroy_process_group, OWN),
    "a method of a destroyed group": Case(destroyed),
}


def of_root(options: Any, root: int) -> Any:
    options.rootRank = root
    return options


def gather(lists: list[Any], root: int) -> Callable[[Any], Any]:
    return lambda group: group.gather(lists, [TWO], of_root(dist.GatherOptions(), root)).wait()


def scatter(lists: list[Any], root: int) -> Callable[[Any], Any]:
    return lambda group: group.scatter([TWO], lists, of_root(dist.ScatterOptions(), root)).wait()


TWO, DOUBLES = torch.ones(2), torch.ones(2, dtype=torch.float64)

# By the first cell of their rows: what rank 0 of two calls, alone, since it is refused before anything is sent.
REFUSED: dict[str, Callable[[Any], Any]] = {
    "a root that there is not": lambda group: group.broadcast([TWO], of_root(dist.BroadcastOptions(), 2)).wait(),
    "`group.reduce` of two tensors": lambda group: group.reduce([TWO, TWO], dist.ReduceOptions()).wait(),
    "`group.gather` of two tensors": lambda group: group.gather(
        [], [TWO, TWO], of_root(dist.GatherOptions(), 1)
    ).wait(),
    "`group.gather` without a list on the root": gather([], 0),
    "`group.gather` with a list on another rank": gather([[TWO, TWO]], 1),
    "`group.gather` with a short list": gather([[TWO]], 0),
    "`group.scatter` without a list on the root": scatter([], 0),
    "`group.scatter` with a list on another rank": scatter([[TWO, TWO]], 1),
    "`group.scatter` with a short list": scatter([[TWO]], 0),
    "`all_gather` with a short list": lambda group: dist.all_gather([TWO], TWO, group=group),
    "`all_gather` into another size": lambda group: dist.all_gather([torch.ones(3)] * 2, TWO, group=group),
    "`all_gather` into another dtype": lambda group: group.allgather([[DOUBLES] * 2], [TWO]).wait(),
    "`group.allgather` of more tensors than lists": lambda group: group.allgather([[TWO] * 2], [TWO] * 2).wait(),
    "`group.reduce_scatter` of more lists than tensors": lambda group: group.reduce_scatter(
        [TWO], [[TWO] * 2] * 2, dist.ReduceScatterOptions()
    ).wait(),
    "`reduce_scatter` with a short list": lambda group: dist.reduce_scatter(TWO, [TWO], group=group),
    "`all_to_all` with short lists": lambda group: dist.all_to_all([TWO], [TWO], group=group),
    "`all_to_all_single` with wrong splits": lambda group: dist.all_to_all_single(
        torch.ones(4), torch.ones(4), [1, 1], [1, 1], group=group
    ),
    "a bitwise reduction of floats": lambda group: dist.all_reduce(TWO, dist.ReduceOp.BAND, group=group),
    "the maximum of sparse tensors": lambda group: dist.all_reduce(TWO.to_sparse(), dist.ReduceOp.MAX, group=group),
    "a sum of uint16": lambda group: dist.all_reduce(TWO.to(torch.uint16), group=group),
}


NO_RUNTIME_ERROR = {"a bitwise reduction of floats", "the maximum of sparse tensors", "a sum of uint16"}
"""Of these: refused by an `UnsupportedError`."""


def error_of(call: Callable[..., Any], *args: Any) -> tuple[bool, str]:
    """Return whether it raised a RuntimeError, and the message."""
    try:
        call(*args)
    except Exception as error:
        return isinstance(error, RuntimeError), str(error)
    return False, ""


def every_error(path: str, name: str) -> dict[str, tuple[bool, str]]:
    """Have rank 0 run into every case; at the end rank 1 dies."""
    heard = {}
    with backend(path, name) as rank:
        dist.barrier()  # the first group is made within a second
        for case, (call, other, timeout, _) in CASES.items():
            checked = case == DIFFERENT and name == "gloo"
            dist.set_debug_level(dist.DebugLevel.DETAIL if checked else dist.DebugLevel.OFF)
            group = dist.new_group([0, 1], timeout=timeout)
            if rank == 0:
                heard[case] = error_of(call, group)
            elif other is not None:
                error_of(other, group)
            dist.barrier()
        group = dist.new_group([0, 1])
        if rank == 0:
            heard["a rank does not come when the group is made"] = error_of(lambda: dist.new_group([0, 1], timeout=OWN))
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        heard["a rank dies"] = error_of(dist.broadcast, torch.ones(3), 1, group)
        heard["a rank that was to send dies"] = error_of(receive, group)
    return heard


def every_refusal(path: str, name: str) -> dict[str, tuple[bool, str]]:
    """Have rank 0 call what is refused; a group of ours goes on afterwards, one of Gloo's has lost count."""
    with backend(path, name) as rank:
        group = dist.group.WORLD
        heard = {case: error_of(call, group) for case, call in REFUSED.items()} if rank == 0 else {}
        if name == "ringside":
            dist.all_reduce(x := torch.ones(1))
            assert x.item() == 2
    return heard


def rows(first: str = "case") -> dict[str, tuple[str, str]]:
    """Return what Gloo and what Ringside says, by case; `first` is the head of the table's first column."""
    text = (ROOT / "docs" / "process-group.md").read_text()
    table = text.partition(f"| {first} | Gloo says | Ringside says |\n")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[1:]]
    return {case: (theirs, ours) for case, theirs, ours in cells}


def has(text: str, cell: str) -> bool:
    """Tell whether a message has what a cell says, of which "..." leaves something out."""
    return bool(re.search(".*".join(map(re.escape, cell.replace("`", "").split("..."))), text, re.DOTALL))


@pytest.mark.noisy  # torch's own groups are made within a second, or fail
def test_messages_are_as_the_table_says_and_have_the_words_that_code_looks_for():
    with meeting_point() as path, Team(2) as ours, Team(2) as stock:
        ours.start(every_error, path, "ringside")
        stock.start(every_error, path, "gloo")
        heard = [team.finish_one(0, LIMIT_S) for team in (ours, stock)]
    assert all(outcome.ok for outcome in heard), [outcome.trace for outcome in heard]
    table, said, gloo_said = rows(), heard[0].value, heard[1].value
    assert list(table) == list(said) == list(gloo_said)
    for case, (theirs, own) in table.items():
        (_, text), (_, gloos) = said[case], gloo_said[case]
        assert said[case][0] == gloo_said[case][0], case
        assert has(gloos, theirs), (case, gloos)
        assert has(text, theirs if own == "the same" else own), (case, text)
        assert own == "the same" or "\n" not in text, text
        for words in re.findall("`(.*?)`", theirs):
            assert has(text, words), (case, text)
        pattern = CASES[case].pattern if case in CASES else "Wait timeout|Connection (closed|reset) by peer"
        assert re.search(pattern, gloos), (case, gloos)
        assert re.search(pattern, text), (case, text)


@pytest.mark.noisy  # torch's own groups are made within a second, or fail
def test_what_is_refused_is_refused_in_words_of_gloo():
    with meeting_point() as path:
        ours, _ = on_ranks(2, every_refusal, path, "ringside", limit_s=LIMIT_S)
        theirs, _ = on_ranks(2, every_refusal, path, "gloo", limit_s=LIMIT_S)
    table = rows("refused")
    assert list(table) == list(REFUSED)
    for case, (words, own) in table.items():
        (is_runtime_error, text), (is_theirs, gloos) = ours[case], theirs[case]
        assert has(gloos, words), (case, gloos)
        assert has(text, own), (case, text)
        assert "\n" not in text, text
        assert is_runtime_error == (is_theirs and case not in NO_RUNTIME_ERROR), (case, text)
        for part in re.findall("`(.*?)`", words):
            assert has(text, part), (case, text)
