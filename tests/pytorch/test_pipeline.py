"""Buckets that are started before the one before them is done: order, ends and errors."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from ringside.engine.buffers import flatten  # noqa: E402
from ringside.errors import SyncError  # noqa: E402
from ringside.pytorch.ddp.reducers import BucketOutcomes  # noqa: E402
from ringside.pytorch.ddp.ringside_reducer import BucketAllReduce  # noqa: E402


class Bucket(BucketAllReduce):
    """Starts by a call of the test's, which returns what waits for it, and reports how it was completed."""

    def __init__(
        self,
        start: Callable[[], Callable[[], None] | None],
        completed: Callable[[Exception | None], None],
        before: BucketAllReduce | None,
        *,
        last: bool,
    ) -> None:
        def start_storage(*_: Any, **__: Any) -> Any:
            wait = start()
            return None if wait is None else SimpleNamespace(wait=wait)

        communicator: Any = SimpleNamespace(start_storage=start_storage)
        outcomes, buffer = BucketOutcomes(), torch.zeros(1)
        outcomes.will_wait = True
        super().__init__(communicator, flatten(buffer), None, 1.0, 0, buffer, outcomes, last, before)
        self._completed = completed

    def complete(self, error: Exception | None) -> None:
        if not self.is_complete:
            self._completed(error)
        super().complete(error)
        assert self.result.done()


class Buckets:
    """Starts and waits for buckets by name and writes down what happened."""

    def __init__(self, at_once: str = "", fails_in_begin: str = "", fails_in_finish: str = "") -> None:
        self.said: list[str] = []
        self._at_once, self._begin, self._finish = at_once, fails_in_begin, fails_in_finish
        self._open: Bucket | None = None

    def add(self, name: str, *, last: bool = False) -> None:
        def begin() -> Callable[[], None] | None:
            self.said.append(f"begin {name}")
            if name in self._begin:
                raise RuntimeError(name)
            return None if name in self._at_once else finish

        def finish() -> None:
            self.said.append(f"finish {name}")
            if name in self._finish:
                raise RuntimeError(name)

        def done(error: Exception | None) -> None:
            self.said.append(f"{name} failed by {error}" if error else f"{name} done")

        bucket = Bucket(begin, done, self._open, last=last)
        self._open = None if last else bucket
        bucket.execute()


def test_each_is_begun_before_the_one_before_it_is_finished() -> None:
    buckets = Buckets()
    for name in "ab":
        buckets.add(name)
    buckets.add("c", last=True)
    said = "begin a, begin b, finish a, a done, begin c, finish b, b done, finish c, c done"
    assert ", ".join(buckets.said) == said


def test_one_that_is_done_at_once_is_told_at_once_and_in_order() -> None:
    buckets = Buckets(at_once="b")
    for name in "abc":
        buckets.add(name)
    assert ", ".join(buckets.said) == "begin a, begin b, finish a, a done, b done, begin c"


def test_a_backward_that_was_broken_off_is_finished_by_the_next() -> None:
    buckets = Buckets()
    buckets.add("a")
    buckets.add("b", last=True)
    assert buckets.said[-1] == "b done"
    buckets.add("c")
    buckets.add("d", last=True)
    assert buckets.said[-4:] == ["finish c", "c done", "finish d", "d done"]


@pytest.mark.parametrize("where", ["begin", "finish"])
def test_an_error_reaches_all_that_are_open(where: str) -> None:
    buckets = Buckets(fails_in_begin="b" if where == "begin" else "", fails_in_finish="a" if where == "finish" else "")
    buckets.add("a")
    with pytest.raises(RuntimeError):
        buckets.add("b")
    culprit = "b" if where == "begin" else "a"
    assert {f"a failed by {culprit}", f"b failed by {culprit}"} <= set(buckets.said)
    assert len([line for line in buckets.said if "failed" in line]) == 2
    buckets.add("d", last=True)
    assert buckets.said[-1] == "d done"


@pytest.mark.parametrize("where", ["begin", "finish"])
def test_ctrl_c_is_raised_and_told_as_an_error(where: str) -> None:
    told = list[Exception | None]()

    def interrupted() -> None:
        raise KeyboardInterrupt

    def begin() -> Callable[[], None]:
        if where == "begin":
            interrupted()
        return interrupted

    first = Bucket(lambda: lambda: None, told.append, None, last=False)
    first.execute()
    with pytest.raises(KeyboardInterrupt):
        Bucket(begin, told.append, first, last=True).execute()
    assert [type(error) for error in told if error is not None] == [SyncError] * (2 if where == "begin" else 1)
    assert len(told) == 2
    Bucket(lambda: None, told.append, first, last=True).execute()  # and nothing of it is left
    assert told[2:] == [None]
