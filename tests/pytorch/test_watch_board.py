"""The page on which a rank says where it stands: what is written is what others read, from another process, too."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from tests.support.waiting import Clock  # noqa: E402

from ringside.errors import DeadlineError, MismatchError, PeerLostError, SyncError  # noqa: E402
from ringside.monitor.hang.attribution import LIMIT_S, NORMAL_WAITS, Failure, RankState, WaitingCall  # noqa: E402
from ringside.pytorch.hang_watch.board import CALLS_KEPT, PAGE_BYTES, NoBoard, ProgressPage, ProgressView  # noqa: E402
from ringside.pytorch.hang_watch.host import Observer  # noqa: E402

NUMBERS = {"left": 1, "step": 7, "group_seq": 9, "call_bytes": 1 << 40, "episode": 3, "dumped": 2, "spoken": 5}


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def board(clock: Clock) -> Iterator[ProgressPage]:
    made = ProgressPage(clock)
    yield made
    made.close()


@pytest.fixture
def others(board: ProgressPage) -> Iterator[ProgressView]:
    """The page as another process of the host reads it."""
    view = ProgressView.of_process(4, os.getpid(), board.fd)
    yield view
    view.close()


def test_a_new_page_says_that_nothing_has_happened_yet(board: ProgressPage, others: ProgressView, clock: Clock) -> None:
    clock.now += 2.0
    expected = RankState(rank=4, still_s=2.0, silent_s=2.0)
    assert others.standing(clock.now) == board.view(4).standing(clock.now) == expected
    assert others.standing(999.0) == RankState(rank=4)  # clocks of two processors may differ a little


def test_every_number_and_text_is_read_back(board: ProgressPage, others: ProgressView) -> None:
    for name, number in NUMBERS.items():
        board.put(name, number)
    texts = {"call": "barrier", "where": "train.py:37 in validate, ü", "failure": "{}"}
    for name, text in texts.items():
        board.write(name, text)
    assert {name: others.number(name) for name in NUMBERS} == NUMBERS
    assert [others.text(name) for name in ("call", "where", "failure")] == [
        "barrier",
        "train.py:37 in validate, ü",
        "{}",
    ]
    seen = others.standing(1000.0)
    assert (seen.left, seen.step, seen.group_seq, seen.where) == (True, 7, 9, "train.py:37 in validate, ü")
    board.write("where", "b")
    assert others.text("where") == "b"


def test_a_damaged_text_ends_where_its_room_does(board: ProgressPage, others: ProgressView) -> None:
    damaged = ProgressView(0, b"\xff" * PAGE_BYTES)
    for name in ("call", "where", "failure", "awaited", "counts"):
        board.write(name, "x" * PAGE_BYTES)
        assert len(damaged.text(name)) == len(others.text(name)), name


def test_a_text_has_its_room_and_takes_nobody_elses(board: ProgressPage, others: ProgressView) -> None:
    for name in ("failure", "where", "call"):
        board.write(name, name[0] * 5000)
    assert [len(others.text(name)) for name in ("call", "where", "failure")] == [62, 254, 4094]
    assert [set(others.text(name)) for name in ("call", "where", "failure")] == [{"c"}, {"w"}, {"f"}]
    with mmap.mmap(board.fd, PAGE_BYTES) as page:
        page[2240:2242] = b"\xff\xff"  # half of a change
    assert len(others.text("where")) == 254


def test_a_waiting_rank_stands_in_its_gradients(board: ProgressPage, others: ProgressView, clock: Clock) -> None:
    board.entered(100)
    board.entered(200, op=1)
    clock.now += 1.0
    board.waiting()
    clock.now += 3.0
    seen = others.standing(clock.now)
    assert (seen.entered, seen.synced, seen.waiting_s, seen.still_s, seen.longest_s) == (2, 0, 3.0, 3.0, 0.0)
    assert seen.calls == [WaitingCall(1, "all_reduce", 100), WaitingCall(2, "the script's own hook", 200)]
    board.resumed()
    clock.now += 0.5
    seen = others.standing(clock.now)
    assert (seen.synced, seen.waiting_s, seen.still_s) == (1, 0.0, 0.5)
    board.entered(300)
    assert others.standing(clock.now).still_s == 0.0


def test_a_wait_that_began_just_now_is_one(board: ProgressPage, others: ProgressView, clock: Clock) -> None:
    board.waiting()
    assert 0.0 < others.standing(clock.now).waiting_s < 1e-6


def test_the_newest_calls_are_kept_over_many_rounds(board: ProgressPage, others: ProgressView) -> None:
    for seq in range(1, 3 * CALLS_KEPT + 6):
        board.entered(seq * 10)
    last = 3 * CALLS_KEPT + 5
    assert others.standing(0.0).calls == [WaitingCall(seq, "all_reduce", seq * 10) for seq in range(last - 7, last + 1)]
    with mmap.mmap(board.fd, PAGE_BYTES) as page:
        page[512 + last % CALLS_KEPT * 24] ^= 1  # half of a change
    assert [call.seq for call in others.standing(0.0).calls] == list(range(last - 7, last))
    assert board.handed_over == last


def test_a_script_that_stands_in_a_collective_of_its_own(
    board: ProgressPage, others: ProgressView, clock: Clock
) -> None:
    board.write("call", "barrier")
    board.put("call_bytes", 12)
    assert (others.standing(clock.now).call, others.standing(clock.now).call_bytes) == ("", 0)
    board.put("call_since", clock.now)
    board.put("group_moved_at", clock.now + 1.0)
    seen = others.standing(clock.now + 5.0)
    assert (seen.call, seen.call_bytes, seen.waiting_s, seen.still_s) == ("barrier", 12, 5.0, 4.0)
    board.waiting()  # in the gradients now: the call is of before
    assert others.standing(clock.now).call == ""


def waited(board: ProgressPage, clock: Clock, seconds: float) -> float:
    board.waiting()
    clock.now += seconds
    board.resumed()
    return board.view(0).number("longest_s")


def test_the_longest_normal_wait_leaves_out_the_first_ones_and_hangs(board: ProgressPage, clock: Clock) -> None:
    assert [waited(board, clock, 3.0) for _ in range(3)] == [0.0, 0.0, 3.0]
    assert waited(board, clock, 2.0) == 3.0
    assert waited(board, clock, 3.5) == 3.5
    assert waited(board, clock, NORMAL_WAITS * 3.5) == 3.5
    assert waited(board, clock, NORMAL_WAITS * 3.5 - 0.001) == pytest.approx(NORMAL_WAITS * 3.5 - 0.001)
    assert LIMIT_S > 3.5


def test_a_first_wait_may_last_as_long_as_a_hang_may_not(board: ProgressPage, clock: Clock) -> None:
    for _ in range(2):
        waited(board, clock, 0.0)
    assert waited(board, clock, LIMIT_S) == 0.0
    assert waited(board, clock, LIMIT_S - 0.5) == LIMIT_S - 0.5


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (MismatchError("sizes differ", (2, 1)), Failure("mismatch", [1, 2], "sizes differ")),
        (DeadlineError("late", (3,)), Failure("late", [3], "late")),
        (PeerLostError("gone", (0,)), Failure("lost", [0], "gone")),
        (SyncError("else"), Failure("other", [], "else")),
        (ValueError("x" * 3000), Failure("other", [], "x" * 1000)),
    ],
)
def test_what_went_wrong_is_told(
    board: ProgressPage, others: ProgressView, clock: Clock, error: Exception, failure: Failure
) -> None:
    board.waiting()
    board.failed(error)
    seen = others.standing(clock.now)
    assert seen.failure == failure
    assert seen.waiting_s == 0.0
    board.write("failure", "half a ch")
    assert others.standing(clock.now).failure is None


def test_a_closed_page_is_gone_for_others_and_the_training_thread_writes_on(board: ProgressPage) -> None:
    was = board.fd
    board.put("step", 3)
    board.close()
    board.close()
    assert board.fd == -1
    with pytest.raises(OSError, match="No such file"):
        ProgressView.of_process(0, os.getpid(), was)
    board.entered(8)
    assert (board.view(0).number("step"), board.view(0).number("entered")) == (3, 1)
    board.view(0).close()  # it is this process's own: nothing to unmap


def test_a_number_that_is_another_file_by_now_is_refused(tmp_path: object) -> None:
    fd = os.memfd_create("another")
    try:
        with pytest.raises(OSError, match="rank 3 has no page there"):
            ProgressView.of_process(3, os.getpid(), fd)
    finally:
        os.close(fd)


def test_a_view_can_be_closed(board: ProgressPage) -> None:
    view = ProgressView.of_process(0, os.getpid(), board.fd)
    view.close()
    with pytest.raises(ValueError, match="closed"):
        view.number("step")


def test_where_nobody_watches_nothing_is_said() -> None:
    nowhere = NoBoard()
    nowhere.entered(4)
    nowhere.waiting()
    nowhere.resumed()
    nowhere.failed(ValueError())


def test_groups_of_a_large_job_have_room() -> None:
    page = ProgressPage()
    counts, ranks = {f"group of {number}": 10**6 + number for number in range(500)}, list(range(10_000, 14_096))
    page.show_groups(("group of 7", 123_456, ranks), counts)
    page.write("call", "barrier")
    page.put("call_since", 1.0)
    seen = page.view(3).standing(2.0)
    assert (seen.group, seen.group_number, seen.group_ranks) == ("group of 7", 123_456, ranks)
    assert seen.group_counts == counts
    page.show_groups(("x" * 40_000, 1, []), {})
    seen = page.view(3).standing(2.0)
    assert (seen.group, seen.group_counts) == ("", {}), "what has no room is not known"
    page.close()


def write_stat(root: Path, state: str, ticks: int = 0, started: int = 77, code: int = 0) -> None:
    (root / "9").mkdir(exist_ok=True)
    fields = [state, *["0"] * 10, str(ticks), "0", *["0"] * 6, str(started), *["0"] * 29, str(code)]
    (root / "9" / "stat").write_text(f"9 (a ) name) {' '.join(fields)}\n")


def test_a_process_is_observed(tmp_path: Path) -> None:
    observer = Observer(9, 77, str(tmp_path))
    write_stat(tmp_path, "R", 100)
    assert observer.read(0.0).state == "R"
    write_stat(tmp_path, "R", 190)
    assert observer.read(1.0).cpu_share == pytest.approx(0.9, rel=0.2)
    write_stat(tmp_path, "T", 190)
    assert observer.read(2.0).stopped
    write_stat(tmp_path, "Z", code=9)
    assert observer.read(3.0).signal == 9
    (tmp_path / "9" / "stat").unlink()
    last = observer.read(5.0)
    assert (last.state, last.gone_s, last.signal) == ("gone", 2.0, 9)


def test_a_later_process_of_the_same_id_is_another_one(tmp_path: Path) -> None:
    write_stat(tmp_path, "R", started=78)
    assert Observer(9, 77, str(tmp_path)).read(0.0).gone
