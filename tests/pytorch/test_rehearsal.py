"""What the first all-reduce of its kind works out can be worked out before it is timed."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.pytorch.groups import communicator, meeting_point  # noqa: E402
from tests.support.ranks import on_ranks  # noqa: E402

from ringside.engine.algorithm import AlgorithmSpec  # noqa: E402
from ringside.engine.net.exchange import ordering as message_order  # noqa: E402
from ringside.engine.net.reduction import Reduction  # noqa: E402

pytestmark = pytest.mark.native

HOSTS = [0, 0, 1, 1, 2, 2]
FORMS = ("tree", "halving_doubling", "hosts/tree", "hosts/halving_doubling", "leaders/tree*4", "hosts/ring", "ring*2")
COUNTS = (1_000, 150_000, 1_200_001, 5_000_000)  # in one message, in one go, in a few pieces, in blocks or many pieces


def worked_out(path: str, rehearses: bool) -> list[int]:
    """Return how many orders of messages each all-reduce had to work out."""
    found = []
    message_order.find_order.cache_clear()  # processes are used again for one test after another
    with communicator(path, HOSTS) as comm:
        across = comm._between.across
        for form in FORMS:
            comm.all_reduce(torch.zeros(4), algorithm=form)
            for count in COUNTS:
                if rehearses:
                    across.rehearse(count, Reduction(0, 0), AlgorithmSpec.parse(form))
                before = message_order.find_order.cache_info().misses
                comm.all_reduce(torch.zeros(count), algorithm=form)
                found.append(message_order.find_order.cache_info().misses - before)
    return found


def test_after_a_rehearsal_nothing_is_left_to_be_worked_out() -> None:
    with meeting_point() as path:
        plain = on_ranks(len(HOSTS), worked_out, path, False, limit_s=100)
    with meeting_point() as path:
        rehearsed = on_ranks(len(HOSTS), worked_out, path, True, limit_s=100)
    assert all(sum(counts) >= 8 for counts in plain), "there is something to be worked out"
    assert rehearsed == [[0] * len(FORMS) * len(COUNTS)] * len(HOSTS)
