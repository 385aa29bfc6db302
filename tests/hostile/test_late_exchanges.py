"""The thread of an exchange that was given up may wake up whenever it likes: it finds nothing of the next attempt."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

from ringside.survive.attempt import Attempt
from ringside.survive.cluster.peers import GaveUp, Superseded
from ringside.survive.protocol import instructions as i
from ringside.survive.protocol.decision import Tag
from ringside.survive.protocol.generation import Generation

GENERATION = Generation(1, 1, 5)


class Exchange:
    """Writes a number, and may give up; what it was given is kept, as its thread would."""

    def __init__(self, number, failure=None):
        self.number, self.failure = number, failure

    def run(self, step, into):
        self.into = into
        if self.failure is not None:
            raise self.failure
        into[:] = self.number


@pytest.mark.parametrize("failure", [GaveUp(), Superseded()])
def test_what_is_applied_is_what_was_acknowledged(failure):
    flat = SimpleNamespace(size_bytes=64)
    job = SimpleNamespace(work=SimpleNamespace(flat=flat), failpoints=SimpleNamespace(reached=lambda phase: None))
    attempt = Attempt(job, Counter())
    given_up, finished = Exchange(1, failure), Exchange(2)
    attempt.reduce(i.RunExchange(Tag(1, 1, 5, 0), GENERATION), given_up)
    attempt.reduce(i.RunExchange(Tag(1, 2, 5, 1), GENERATION), finished)
    given_up.into[:] = 9  # the thread has got some processor time again
    assert np.array_equal(attempt.total, np.full(64, 2))
