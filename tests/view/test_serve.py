"""The page's server: what it tells, who may read, and what it does with bad input."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest
from tests.recorded_runs import own_times, slow_run, write_run
from tests.support.waiting import until
from tests.view.hostile_run import HOSTILE, hostile_run

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from tests.view.served import LIMIT_S, ask, serving, told

from ringside.commands import main
from ringside.errors import UsageError
from ringside.view.run.live import LiveRun
from ringside.view.server import feed as serve_feed
from ringside.view.server.feed import PageFeed, Runs, key_of, newest_run
from ringside.view.server.guard import check_address, holder, listen
from ringside.view.server.state import page_state, topology

WEB = Path(__file__).parents[2] / "src" / "ringside" / "view" / "static" / "live"


def floats(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype="<f4")


def test_a_recorded_run_is_told_with_its_verdict_first(tmp_path: Path) -> None:
    with serving(slow_run(tmp_path / "run")) as url:
        state = until(lambda: (state := told(url))["verdicts"] and state)
        (verdict,) = state["verdicts"]
        assert verdict["headline"].startswith("Rank 2 is ")
        assert verdict["price"]
        assert (state["name"], state["ranks"], state["step"]) == ("run", 4, 119)
        assert floats(state["figures"]["excess_ratio"])[2] == pytest.approx(0.12, abs=0.03)  # half of the run at 30%
        assert {awaited for _, awaited, _ in state["arrows"]} == {2}
        assert len(state["questions"]) == 4
        steps = told(url, "/api/steps")
        assert (steps["rows"], steps["ranks"], steps["more"]) == (120, 4, False)
        late = np.frombuffer(base64.b64decode(steps["late"]), dtype=np.uint8).reshape(120, 4)
        assert late[80:].argmax(axis=1).tolist() == [2] * 40
        assert told(url, f"/api/steps?since={steps['since']}&epoch={steps['epoch']}")["rows"] == 0
        assert told(url, f"/api/steps?since={steps['since']}&epoch=another")["rows"] == 120
        own = floats(told(url, "/api/rank?rank=2")["own"])
        assert own[80:].mean() / own[:60].mean() == pytest.approx(1.3, abs=0.05)
        assert ask(url, "/api/rank?rank=4")[0] == ask(url, "/api/rank?rank=x")[0] == 404


def events(connection: http.client.HTTPConnection, last: str = "") -> http.client.HTTPResponse:
    connection.request("GET", "/events", headers={"Last-Event-ID": last} if last else {})
    return connection.getresponse()


def next_event(answer: http.client.HTTPResponse) -> tuple[str, dict[str, object]]:
    found = {}
    while "data" not in found:
        name, _, value = answer.readline().decode().strip().partition(": ")
        found[name] = value
    return found["id"], json.loads(found["data"])


def test_events_come_as_the_run_grows_and_go_on_where_they_stopped(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", own_times(20, 2))
    with serving(path) as url:
        until(lambda: told(url)["state"] == "ended")
        place = urlsplit(url)
        first = http.client.HTTPConnection(place.hostname or "", place.port, timeout=LIMIT_S)
        answer = events(first)
        assert answer.headers["content-type"].startswith("text/event-stream")
        identity, state = next_event(answer)
        assert state["step"] == 19
        first.close()
        again = http.client.HTTPConnection(place.hostname or "", place.port, timeout=LIMIT_S)
        answer = events(again, identity)
        line = (path / "steps.jsonl").read_text().splitlines()[-1]
        with (path / "steps.jsonl").open("a") as file:
            file.write(line.replace('"step":19', '"step":20') + "\n" + line[:30])
        following, state = next_event(answer)
        assert (state["step"], following != identity) == (20, True)  # nothing that had been told came again
        again.close()


def test_a_reader_that_does_not_read_holds_up_nobody(tmp_path: Path) -> None:
    with serving(write_run(tmp_path / "run", own_times(20, 2))) as url:
        place = urlsplit(url)
        idle = [socket.create_connection((place.hostname, place.port), timeout=LIMIT_S) for _ in range(24)]
        for one in idle:
            one.sendall(f"GET /events HTTP/1.1\r\nHost: {place.hostname}\r\n\r\n".encode())
        assert until(lambda: told(url)["step"] == 19)
        for one in idle:
            one.close()


def test_it_is_for_reading_only_and_by_our_own_names_only(tmp_path: Path) -> None:
    with serving(write_run(tmp_path / "run", own_times(20, 2)), names=["train.example"]) as url:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert ask(url, "/api/now", method)[0] == 405
        status, headers, body = ask(url, "/", "HEAD")
        assert (status, body) == (200, b"")
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert ask(url, "/api/now", Host="evil.example:8777")[0] == 421
        for name in ("localhost", "127.0.0.1:1", "[::1]:8777", "train.example", "10.1.2.3"):
            assert ask(url, "/api/now", Host=name)[0] == 200
        for path in (
            "/web/../serve.py",
            "/web/%2e%2e%2fserve.py",
            "/web/runs.html",
            "/web/x.js",
            "/run/nowhere/",
            "/etc/passwd",
        ):
            assert ask(url, path)[0] == 404


def test_with_a_token_nothing_is_told_without_it(tmp_path: Path) -> None:
    with serving(write_run(tmp_path / "run", own_times(20, 2)), token="secret é") as url:
        for path in ("/", "/api/now", "/api/steps", "/events", "/metrics", "/runs", "/web/page.js"):
            status, headers, body = ask(url, path)
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
            assert b"token" in body
        assert ask(url, "/?token=wrong")[0] == ask(url, "/", Authorization="Bearer wrong")[0] == 401
        assert ask(url, "/", Cookie="ringside=wrong")[0] == 401
        status, headers, _ = ask(url, "/api/now?a=1&token=secret%20%C3%A9")
        assert (status, headers["location"]) == (303, "./now?a=1")
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert "secret" not in cookie
        assert ask(url, "/api/now", Cookie=cookie.split(";")[0])[0] == 200
        bearer = "Bearer secret é".encode().decode("latin-1")
        assert ask(url, "/api/now", Authorization=bearer)[0] == 200


def test_other_addresses_than_this_hosts_own_need_a_token() -> None:
    with pytest.raises(UsageError, match="--token"):
        check_address("0.0.0.0", "")
    assert check_address("0.0.0.0", "x") == "0.0.0.0"
    assert check_address("localhost", "") in ("127.0.0.1", "::1")
    with pytest.raises(UsageError, match="no address"):
        check_address("no such host", "x")


def test_a_port_that_is_held_says_by_whom_and_the_verb_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path / "run", own_times(20, 2))
    with listen("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        assert main(["serve", str(path), "--port", str(port)]) == 2
        said = capsys.readouterr().err
        assert re.search(rf"port {port} at 127.0.0.1 is used by process \d+ \(.*python", said)
        assert "--port" in said
        assert "process" in holder(port)
    with pytest.raises(UsageError, match="no port 70000"):
        listen("127.0.0.1", 70000)


def test_without_the_extra_one_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("ringside.view.server.app")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(tmp_path)]) == 2
    assert "pip install 'torch-ringside[web]'" in capsys.readouterr().err


def test_what_is_no_run_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["serve", "nowhere"]) == 2
    assert "no directory" in capsys.readouterr().err
    assert main(["serve"]) == 2
    assert "ringside run train.py" in capsys.readouterr().err
    write_run(tmp_path / "runs" / "a", own_times(20, 2))
    assert newest_run(tmp_path / "runs") == tmp_path / "runs" / "a"


def test_what_is_no_rate_in_the_environment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RINGSIDE_PRICE", "cheap")
    assert main(["serve", str(write_run(tmp_path / "run", own_times(20, 2))), "--port", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("RINGSIDE_PRICE: 'cheap' is no rate; give for example 2.5")


def test_hostile_and_torn_runs_are_told_as_far_as_they_are_whole(tmp_path: Path) -> None:
    with serving(hostile_run(tmp_path / "run")) as url:
        state = until(lambda: (state := told(url))["step"] >= 119 and state)
        assert state["name"] == HOSTILE
        assert told(url, "/api/steps")["rows"] == 120
        assert ask(url, "/metrics")[0] == 200
        status, _, page = ask(url, "/")
        assert (status, HOSTILE.encode() in page) == (200, False)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 1}', '{"world_size": 1000000000}', None])
def test_what_is_not_yet_or_never_a_run_is_a_page_that_waits(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "run").mkdir()
    if content is not None:
        (tmp_path / "run" / "run.json").write_text(content)
    with serving(tmp_path / "run") as url:
        assert until(lambda: told(url)["state"] == "waiting")
        assert content is None or until(lambda: "no run that this version can read" in told(url)["trouble"])
        assert ask(url, "/")[0] == 200
        assert ask(url, "/metrics")[0] == 503
        write_run(tmp_path / "run", own_times(20, 3))
        assert until(lambda: told(url)["ranks"] == 3)


def test_a_damaged_number_of_ranks_is_said_on_the_page(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", own_times(20, 2))
    (path / "run.json").write_text(
        (path / "run.json").read_text().replace('"world_size": 2', '"world_size": 1000000000')
    )
    with serving(path) as url:
        assert "damaged" in until(lambda: told(url)["trouble"])


def test_a_run_of_an_older_schema_is_shown(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", own_times(30, 2))
    info = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(
        json.dumps(
            {**{key: info[key] for key in info if key not in ("versions", "algorithm", "pids", "command")}, "schema": 0}
        )
    )
    first_fields = ("step", "rank", "ended_unix", "step_seconds", "own_seconds")
    lines = [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]
    old = [{key: line[key] for key in first_fields} for line in lines]
    (path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    with serving(path) as url:
        assert until(lambda: told(url)["step"] == 29)
        assert told(url, "/api/steps")["rows"] == 30


def test_a_run_is_read_without_a_pause_as_far_as_it_goes_and_then_looked_at_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(tmp_path / "run", own_times(200, 4))
    looks: list[bool] = []
    poll = LiveRun.poll
    monkeypatch.setattr(LiveRun, "poll", lambda live: looks.append(True) or poll(live))
    monkeypatch.setattr(serve_feed, "AT_ONCE", 100)  # of 800 records
    feed = serve_feed.PageFeed(path, poll_s=3600.0)
    until(lambda: json.loads(feed.rows(0, ""))["rows"] == 200)
    feed.close()
    assert len(looks) <= 10


def test_another_job_in_the_same_place_voids_what_was_told(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", own_times(30, 2))
    with serving(path) as url:
        before = until(lambda: (state := told(url))["step"] == 29 and state)
        write_run(path, own_times(9, 3))  # moves the earlier run aside
        after = until(lambda: (state := told(url))["ranks"] == 3 and state["step"] == 8 and state)
        assert after["epoch"] != before["epoch"]
        assert told(url, f"/api/steps?since={before['serial']}&epoch={before['epoch']}")["rows"] == 9


def test_the_index_lists_runs_and_leads_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # no run that goes on in another test
    first = write_run(tmp_path / "runs" / "first", own_times(20, 2))
    other = write_run(tmp_path / "runs" / "<b>x", own_times(20, 3))
    with serving(first, under=tmp_path / "runs") as url:
        page = ask(url, "/runs")[2].decode()
        assert "&lt;b&gt;x" in page
        assert "<b>x" not in page
        assert f'href="run/{key_of(other)}/"' in page
        places = [page.index(text) for text in ("Active runs", "None on this machine.", "Ended runs", ">first<")]
        assert places == sorted(places)
        assert until(lambda: told(url, f"/run/{key_of(other)}/api/now")["ranks"] == 3)
        assert until(lambda: told(url)["ranks"] == 2)
        assert ask(url, f"/run/{key_of(other)}/web/page.js")[0] == 200


def test_the_dashboard_asks_for_metrics_that_there_are(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    path = slow_run(tmp_path / "run")
    verdict = {"kind": "slow_rank", "ranks": [2], "since_step": 60, "detected_step": 66, "excess_ratio": 0.3}
    (path / "events.jsonl").write_text(json.dumps({"kind": "verdict", "verdict": verdict}) + "\n")
    with serving(path) as url:
        until(lambda: told(url)["step"] == 119)
        status, headers, page = ask(url, "/metrics")
        dashboard = json.loads(ask(url, "/grafana.json")[2])
    assert (status, headers["content-type"].startswith("text/plain")) == (200, True)
    exposed = set(re.findall(r"^(ringside_\w+)", page.decode(), re.MULTILINE))
    asked = set(re.findall(r"ringside_\w+", json.dumps([panel["targets"] for panel in dashboard["panels"]])))
    assert len(asked) > 10
    assert asked <= exposed, asked - exposed
    assert 'ringside_verdict_active{kind="slow_rank",rank="2"} 1.0' in page.decode()
    identities = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(identities)) == len(identities)
    assert all(panel["targets"] and panel["title"] for panel in dashboard["panels"])


def test_links_are_told_slowest_first(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", own_times(20, 8))
    line = json.loads((path / "steps.jsonl").read_text().splitlines()[-8])
    wire = {"seconds": 1.0, "sent_bytes": 80_000_000, "wire_seconds": 0.5}
    with (path / "steps.jsonl").open("a") as file:
        for rank, peer, busy in ((0, 4, 0.1), (4, 0, 0.8)):
            one = {**wire, "peer": peer, "wire_seconds": busy}
            file.write(json.dumps({**line, "step": 20, "rank": rank, "wires": [one]}) + "\n")
    with serving(path) as url:
        slow, fast = until(lambda: told(url)["links"])
    assert (slow["src"], slow["dst"], slow["hosts"], slow["rate"]) == (4, 0, "host-1 → host-0", "100 MB/s")
    assert (fast["src"], fast["ratio"], fast["sent"]) == (0, "10.0%", "80 MB")


def test_what_an_algorithm_connects_is_drawn_while_it_can_be() -> None:
    ring = topology("ring", 6)
    assert ring == {"edges": [(0, 1), (0, 5), (1, 2), (2, 3), (3, 4), (4, 5)], "tree": False}
    tree = topology("tree", 8)
    assert tree is not None
    assert tree["tree"]
    assert [topology(name, 8) for name in ("one_shot", "push", "", "no such")] == [None] * 4
    assert topology("ring", 10_000) is None
    assert topology("ring", 65) is None
    widest = topology("ring", 64)
    assert widest is not None
    assert len(widest["edges"]) == 64
    # all with all is no picture, but among three; two are a line and no tree, and one has nobody
    assert topology("direct", 3) == {"edges": [(0, 1), (0, 2), (1, 2)], "tree": False}
    assert topology("direct", 4) is None
    assert topology("ring", 2) == {"edges": [(0, 1)], "tree": False}
    assert topology("ring", 1) is None
    chain = topology("chain", 3)
    assert chain == {"edges": [(0, 1), (1, 2)], "tree": True}


def test_what_a_run_that_goes_on_is_known_by(tmp_path: Path) -> None:
    own = np.tile([0.1, 0.1, 0.2, 0.1], (20, 1))
    path = write_run(tmp_path / "run", own)
    (path / "events.jsonl").write_text("")
    live = LiveRun(path)
    live.poll()

    def tiles() -> list[tuple[str, str, str]]:
        return list(page_state(live, [])["tiles"])

    # the slowest waits for nobody and is blocked for 4 ms of 204, of 20 ms of communication
    assert tiles() == [
        ("lost so far", "nothing", "no verdict has a cost"),
        ("step time", "204 ms", "median, last 16 steps"),
        ("exposed communication", "4.00 ms", "2.0% of a step; median, last 16 steps"),
        ("overlapped with backward", "80.0%", "of 20.0 ms communication"),
        ("wait", "100 ms", "for the last rank to arrive; median rank, last 16 steps"),
    ]
    verdict = {"kind": "slow_rank", "ranks": [2], "since_step": 0, "detected_step": 19, "excess_ratio": 1.0}
    with (path / "events.jsonl").open("w") as file:
        file.write(
            json.dumps({"unix": 1.0, "kind": "verdict", "verdict": {**verdict, "cost_rank_seconds": 8.0}}) + "\n"
        )
    live.poll()
    state = page_state(live, [])
    assert tiles()[0] == ("lost so far", "8.00 rank-seconds", "2.00 s for every rank")
    assert [(one["ranks"], one["cost_rank_seconds"], one["over"]) for one in state["verdicts"]] == [([2], 8.0, False)]
    assert sorted(state["arrows"]) == [(rank, 2, pytest.approx(0.1)) for rank in (0, 1, 3)]


def test_state_of_many_ranks_is_small(tmp_path: Path) -> None:
    from ringside.view.run.live import LiveRun

    live = LiveRun(write_run(tmp_path / "run", own_times(17, 1024)))
    live.poll()
    state = page_state(live, [])
    assert len(msgspec.json.encode(state)) < 64_000
    assert len(floats(state["figures"]["own_seconds"])) == 1024


def test_no_script_of_the_page_is_inline_and_nothing_is_fetched_from_elsewhere() -> None:
    for page in WEB.glob("*.html"):
        text = page.read_text()
        assert not re.search(r"<script(?![^>]*src=)|<style| style=| on\w+=", text)
        assert not re.search(r'(?:src|href)="(?:https?:)?//', text)
    for script in WEB.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", script.read_text()
        ), script


def test_of_a_run_without_a_step_nothing_is_known(tmp_path: Path) -> None:
    live = LiveRun(write_run(tmp_path / "run", own_times(0, 2)))
    live.poll()
    state = page_state(live, [])
    assert state["tiles"] == [
        ("lost so far", "nothing", "no verdict has a cost"),
        ("step time", "–", "median, last 16 steps"),
        ("exposed communication", "–", "median, last 16 steps"),
        ("overlapped with backward", "–", "of – communication"),
        ("wait", "–", "for the last rank to arrive; median rank, last 16 steps"),
    ]
    assert (state["step_seconds"], state["arrows"], state["verdicts"], state["steps"]) == (None, [], [], 0)


class FakeFeed:
    """A feed that follows nothing."""

    def __init__(self, path: Path) -> None:
        self.path, self.asked, self.closed = path, time.monotonic(), False

    def close(self) -> None:
        self.closed = True


def test_a_run_that_nobody_looks_at_is_followed_no_longer_and_of_many_the_longest_idle(tmp_path: Path) -> None:
    """Eight at most; the first run's stays, and those that somebody asked within five minutes while there is room."""
    for number in range(12):
        write_run(tmp_path / f"run-{number:02}", own_times(1, 2))
    keys = [key_of(tmp_path / f"run-{number:02}") for number in range(12)]
    runs = Runs(tmp_path / "run-00", tmp_path, FakeFeed)  # type: ignore[arg-type]
    first: Any = runs.first()
    feeds: list[Any] = [runs.find(key) for key in keys[:8]]
    assert feeds[0] is first is runs.first()
    assert runs.find("nothing") is None
    now = time.monotonic()
    for feed, ago_s in zip(feeds, (9000.0, 30.0, 40.0, 20.0, 310.0, 290.0, 10.0, 5.0), strict=True):
        feed.asked = now - ago_s
    feeds.append(runs.find(keys[8]))  # one more: the idle one goes, and there is room
    assert [feed.closed for feed in feeds] == [n == 4 for n in range(9)]
    feeds.append(runs.find(keys[9]))  # one more: of those that are left the longest idle goes
    assert [feed.closed for feed in feeds] == [n in (4, 5) for n in range(10)]
    assert runs.find(keys[9]) is feeds[9]
    assert runs.find(keys[4]) is not feeds[4], "it is followed anew"
    runs.close()
    assert all(feed.closed for feed in feeds)


def test_what_is_going_on_is_said_by_the_age_of_the_newest_record(tmp_path: Path) -> None:
    def stage(path: Path, quiet_s: float = 1000.0) -> Any:
        feed = PageFeed(path, poll_s=0.01, quiet_s=quiet_s)
        try:
            until(lambda: json.loads(feed.state()[1])["state"] != "reading")
            return json.loads(feed.state()[1])
        finally:
            feed.close()

    assert stage(tmp_path / "none")["state"] == "waiting"
    path = slow_run(tmp_path / "run", steps=20, onset=10)
    for ago_s, state in ((50.0, "live"), (70.0, "stalled")):
        when = time.time() - ago_s
        os.utime(path / "steps.jsonl", (when, when))
        found = stage(path)
        assert (found["state"], found["steps"], found["trouble"]) == (state, 20, "")
        assert found["last_record_unix"] == pytest.approx(when, abs=2.0)
    assert stage(path, quiet_s=60.0)["state"] == "quiet"
    (path / "events.jsonl").write_text('{"unix": 1.0, "kind": "ended", "steps": 20}\n')
    assert stage(path)["state"] == "ended"
