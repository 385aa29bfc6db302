"""`ringside top` by address: against the JSON that `ringside serve` makes, over a real socket."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from tests.recorded_runs import slow_run
from tests.support.waiting import until

from ringside.errors import RingsideError, UsageError
from ringside.view.server.feed import PageFeed
from ringside.view.tui import source as top_remote
from ringside.view.tui.rank_table import SortOrder, Sparks
from ringside.view.tui.source import Local, Remote, take_snapshot
from ringside.view.tui.text import once_lines, rank_detail, verdict_block

Answer = tuple[int, bytes]
VERDICT = {
    "kind": "slow_rank", "ranks": [2], "since_step": 60, "detected_step": 66, "excess_ratio": 0.3,
    "cause": "most of the extra time is in its backward pass", "cost_rank_seconds": 12.0, "advice": "move it",
}  # fmt: skip


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[str, dict[str, str]], Answer]], str]]:
    """Returns a function that answers requests with another one, and returns the address."""
    servers = []

    def start(answer: Callable[[str, dict[str, str]], Answer]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = answer(self.path, dict(self.headers))
                self.send_response(status)
                if status == 303:
                    self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # the client has read enough, and gone
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = slow_run(tmp_path / "run")
    (path / "events.jsonl").write_text(json.dumps({"kind": "verdict", "unix": 1.0, "verdict": VERDICT}) + "\n")
    return path


@pytest.fixture
def feed(run: Path) -> Iterator[PageFeed]:
    feed = PageFeed(run, poll_s=0.01)
    until(lambda: b"slow_rank" in feed.state()[1] and bool(json.loads(feed.rows(0, ""))["rows"]))
    yield feed
    feed.close()


def as_served(feed: PageFeed) -> Callable[[str, dict[str, str]], Answer]:
    def answer(path: str, headers: dict[str, str]) -> Answer:
        parts = urlsplit(path)
        asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if parts.path == "/api/now":
            return 200, feed.state()[1]
        if parts.path == "/api/steps":
            return 200, feed.rows(int(asked["since"]), asked.get("epoch", ""))
        body = feed.rank(int(asked["rank"]))
        return (200, body) if body is not None else (404, b"")

    return answer


def test_a_run_looks_the_same_from_afar(run: Path, feed: PageFeed, serve: Callable[..., str]) -> None:
    far, near = take_snapshot(Remote(serve(as_served(feed))), 2), take_snapshot(Local(run), 2)
    assert far.trouble == ""
    assert [(one.rank, one.host, one.step, one.verdicts) for one in far.ranks] == [
        (one.rank, one.host, one.step, one.verdicts) for one in near.ranks
    ]
    for name in ("own_seconds", "wait_seconds", "excess_ratio"):
        assert [getattr(one, name) for one in far.ranks] == pytest.approx([getattr(one, name) for one in near.ranks])
    assert far.steps.tolist() == near.steps.tolist()
    late = near.own_seconds > np.median(near.own_seconds, axis=1)[:, None]
    assert far.own_seconds[late] == pytest.approx(near.own_seconds[late], rel=0.02)
    assert set(Sparks(far.steps, far.own_seconds, 20).line(2)[-4:]) <= set("▆▇█")
    told = verdict_block(far, 80, 9).plain
    assert told.startswith("● rank 2 is 30% slower than the others since step 60\n")
    assert "move it" in told.lower()
    assert "over its last 120 steps" in rank_detail(far, 2, 80).plain


def test_only_what_is_new_is_asked_for(run: Path, feed: PageFeed, serve: Callable[..., str]) -> None:
    asked: list[str] = []
    served = as_served(feed)

    def answer(path: str, headers: dict[str, str]) -> Answer:
        asked.append(path)
        return served(path, headers)

    remote = Remote(serve(answer))
    until(remote.poll)
    until(lambda: not remote.poll())
    asked.clear()
    assert not remote.poll()
    assert asked == ["/api/now"]
    version = remote.snapshot().version
    with (run / "steps.jsonl").open("a") as file:
        for rank in range(4):
            record = {"step": 120, "rank": rank, "ended_unix": 1.0, "step_seconds": 0.2, "own_seconds": 0.1}
            file.write(json.dumps(record) + "\n")
    until(remote.poll)
    until(lambda: remote.poll() or remote.snapshot().steps[-1] == 120)
    assert remote.snapshot().version > version
    assert len(remote.snapshot().steps) == 121
    assert "since=0" not in " ".join(asked)


@pytest.mark.parametrize(("pages", "requests"), [(1, 1), (3, 3), (20, 8)])
def test_of_what_is_more_than_an_answer_holds_the_rest_is_asked_for_at_once_but_not_for_ever(
    feed: PageFeed, serve: Callable[..., str], pages: int, requests: int
) -> None:
    served, asked = as_served(feed), []

    def answer(path: str, headers: dict[str, str]) -> Answer:
        status, body = served(path, headers)
        if "/api/steps" in path:
            asked.append(path)
            body = json.dumps(json.loads(body) | {"more": len(asked) < pages}).encode()
        return status, body

    assert Remote(serve(answer)).poll()
    assert len(asked) == requests


def test_a_run_that_begins_between_two_requests_is_seen_whole(feed: PageFeed, serve: Callable[..., str]) -> None:
    told = [b'{"ranks": 0, "step": -1}']
    served = as_served(feed)
    remote = Remote(serve(lambda path, headers: (200, told.pop()) if told and "now" in path else served(path, headers)))
    assert not take_snapshot(remote).ranks
    snapshot = take_snapshot(remote)
    assert (len(snapshot.ranks), len(snapshot.steps)) == (4, 120)


def test_the_token_goes_with_the_request_and_not_into_the_picture(feed: PageFeed, serve: Callable[..., str]) -> None:
    def answer(path: str, headers: dict[str, str]) -> Answer:
        return as_served(feed)(path, headers) if headers.get("Authorization") == "Bearer s3cret" else (401, b"")

    address = serve(answer)
    with pytest.raises(RingsideError, match="needs a token"):
        Remote(address).poll()
    for remote in (Remote(f"{address}/?token=s3cret"), Remote(address, "s3cret")):
        snapshot = take_snapshot(remote)
        assert (snapshot.trouble, len(snapshot.ranks)) == ("", 4)
        assert "s3cret" not in remote.where + "".join(once_lines(snapshot, SortOrder(), 200))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, b"<html>another program</html>"), "not as `ringside serve`"),
        ((200, b'{"ranks": -4}'), "is impossible"),
        ((200, b'{"ranks": 10000000000}'), "is impossible"),
        ((200, b'{"ranks": 2, "verdicts": [{"kind": []}]}'), "not as `ringside serve`"),
        ((303, b""), "status 303"),
        ((404, b""), "status 404"),
        ((500, b""), "status 500"),
        ((200, b'{"trouble": "it is on fire"}'), "on fire"),
    ],
)
def test_whoever_answers_otherwise_is_told_in_one_line(serve: Callable[..., str], answer: Answer, said: str) -> None:
    steps = b'{"epoch": "1", "steps": "", "late": "", "lines": {}, "since": 0}'
    address = serve(lambda path, headers: answer if "now" in path else (200, steps))
    snapshot = take_snapshot(Remote(address))
    assert said in snapshot.trouble
    assert "\n" not in snapshot.trouble
    assert said.split()[-1] in verdict_block(snapshot, 300, 9).plain


def test_rows_and_figures_that_do_not_fit_are_left_out(serve: Callable[..., str]) -> None:
    now = b'{"ranks": 3, "name": "x", "step": 9, "figures": {"own_seconds": "AACAPw=="}, "host_of": "/////w=="}'
    steps = b'{"epoch": "1", "steps": "AAAAAAAA8D8=", "late": "AQ==", "lines": {"own": "AACAPw=="}, "since": 4}'
    snapshot = take_snapshot(Remote(serve(lambda path, headers: (200, now if "now" in path else steps))))
    assert [(one.rank, one.host) for one in snapshot.ranks] == [(0, ""), (1, ""), (2, "")]
    assert snapshot.ranks[0].own_seconds == 1.0
    assert not len(snapshot.steps)
    assert list(once_lines(snapshot, SortOrder(), 80))


def test_an_answer_without_end_is_given_up(serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_remote, "MOST_BYTES", 10_000)
    with pytest.raises(RingsideError, match="more than a run has"):
        Remote(serve(lambda path, headers: (200, b" " * 3_000_000))).poll()


def test_nobody_there_is_told_and_what_was_seen_stays(feed: PageFeed, serve: Callable[..., str]) -> None:
    alive = [True]
    served = as_served(feed)
    remote = Remote(serve(lambda path, headers: served(path, headers) if alive else (503, b"")))
    assert len(take_snapshot(remote).ranks) == 4
    alive.clear()
    snapshot = take_snapshot(remote)
    assert "status 503" in snapshot.trouble
    assert len(snapshot.ranks) == 4
    trouble = take_snapshot(Remote("http://127.0.0.1:9")).trouble
    assert "does not answer (Connection refused)" in trouble


@pytest.mark.parametrize(
    "url", ["http://", "ftp://x", "http:///x", "http://[::half", "http://host:99999", "http://host:0"]
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UsageError, match="8777"):
        Remote(url)


def test_rows_of_a_job_of_other_ranks_are_gone_also_where_its_own_do_not_come(serve: Callable[..., str]) -> None:
    packed = {"own": base64.b64encode(np.full(3, 0.1, dtype="<f4").tobytes()).decode()}
    rows = {"epoch": "1", "steps": base64.b64encode(np.arange(3.0).tobytes()).decode(), "lines": packed, "since": 3}
    rows["late"] = base64.b64encode(np.ones(12, dtype="u1").tobytes()).decode()
    ranks = [4, 2]

    def answer(path: str, headers: dict[str, str]) -> Answer:
        if path.startswith("/api/now"):
            return 200, json.dumps({"ranks": ranks[0], "step": 2}).encode()
        return (200, json.dumps(rows).encode()) if ranks[0] == 4 else (500, b"")

    remote = Remote(serve(answer))
    assert take_snapshot(remote).own_seconds.shape == (3, 4)
    ranks.pop(0)
    seen = take_snapshot(remote)
    assert (seen.own_seconds.shape, len(seen.ranks)) == ((0, 2), 2)
    assert "status 500" in seen.trouble
