"""Webhooks and commands: what they are told, and that nothing they do reaches training."""

from __future__ import annotations

import json
import logging
import os
import shlex
import socket
import sys
import threading
from pathlib import Path

import pytest
from tests.support.waiting import until

from ringside.errors import UsageError
from ringside.monitor import Verdict
from ringside.monitor.alerts.book import Alert, AlertBook
from ringside.monitor.alerts.hooks import (
    DELIVERED,
    DROPPED,
    FAILED,
    CommandHook,
    DeliveryError,
    HookQueue,
    Webhook,
    parse_hooks,
)

from .hook_server import hook_server
from .jobs import event

PATIENCE_S = 60.0
APPEND = "import sys; open(sys.argv[1], 'ab').write(sys.stdin.buffer.read())"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def alert(rank: int = 1) -> Alert:
    (made,) = AlertBook("run; touch owned", "/runs/$(touch owned)").record(event(rank=rank))
    return made


def courier_of(hook: object, **how: object) -> HookQueue:
    return HookQueue(hook, **{"pauses_s": (0.0, 0.0), **how})  # type: ignore[arg-type]


class Remembering:
    """A hook that remembers, waits for `gate` and raises what it is given."""

    name, label = "the test", "test"

    def __init__(self, *errors: Exception) -> None:
        self.told: list[int] = []
        self.gate, self.began, self.cancelled = threading.Event(), threading.Event(), threading.Event()
        self._errors = list(errors)

    def deliver(self, alert: Alert) -> None:
        self.began.set()
        self.gate.wait(PATIENCE_S)
        if self._errors:
            raise self._errors.pop(0)
        self.told.append(alert.ranks[0])

    def cancel(self) -> None:
        self.cancelled.set()
        self.gate.set()


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ------------------------------------------------------------------------------------------------ webhook


def test_a_webhook_gets_the_alert_as_json() -> None:
    with hook_server() as server:
        Webhook(server.url).deliver(sent := alert())
        heard = server.hear()
    assert heard["type"] == "application/json"
    assert heard["path"] == "/hook"
    assert heard["json"]["text"] == sent.text
    assert heard["json"]["run"] == "run; touch owned"
    assert Verdict(**heard["json"]["verdict"]) == sent.verdict


@pytest.mark.parametrize(("status", "again"), [(500, True), (503, True), (429, True), (404, False), (302, False)])
def test_a_refusal_says_whether_another_try_makes_sense(status: int, again: bool) -> None:
    with hook_server() as server:
        server.answers = [status]
        with pytest.raises(DeliveryError, match=str(status)) as caught:
            Webhook(server.url).deliver(alert())
        assert server.hear()
        assert server.rest() == []  # a redirect is not followed
    assert caught.value.again is again


def test_a_webhook_that_never_answers_is_given_up() -> None:
    with hook_server() as server:
        server.silent.set()
        with pytest.raises(DeliveryError, match="did not answer within") as caught:
            Webhook(server.url, timeout_s=0.2).deliver(alert())
    assert caught.value.again


def test_a_webhook_that_is_not_there_is_said_without_its_secret() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        hook = Webhook(f"http://127.0.0.1:{port}/secret-token")
        with pytest.raises(DeliveryError, match="cannot be reached") as caught:
            hook.deliver(alert())
    assert "secret" not in hook.name + str(caught.value)
    assert str(port) in hook.name


# ------------------------------------------------------------------------------------------------ command


def test_a_command_gets_the_alert_on_its_standard_input(tmp_path: Path) -> None:
    (hook,) = parse_hooks(shlex.join([sys.executable, "-c", APPEND, str(tmp_path / "told; touch owned")]))
    hook.deliver(sent := alert())
    hook.deliver(sent)
    lines = (tmp_path / "told; touch owned").read_text().splitlines()
    assert [json.loads(line)["fingerprint"] for line in lines] == [sent.fingerprint] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["told; touch owned"]


def test_a_command_is_no_shell_and_inherits_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGSIDE_METRICS_TOKEN", "secret")
    monkeypatch.chdir(tmp_path)
    code = "import os, sys; open('seen', 'w').write(repr((sys.argv[1:], os.environ.get('RINGSIDE_METRICS_TOKEN'))))"
    (hook,) = parse_hooks(f'{sys.executable} -c "{code}" $(touch owned) `touch owned` ; touch owned')
    hook.deliver(alert())
    arguments, token = eval((tmp_path / "seen").read_text())
    assert arguments == ["$(touch", "owned)", "`touch", "owned`", ";", "touch", "owned"]
    assert token is None
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [(["/nonexistent/command"], "cannot be started"), ([sys.executable, "-c", "raise SystemExit(3)"], "status 3")],
)
def test_a_command_that_fails_says_so(words: list[str], why: str) -> None:
    with pytest.raises(DeliveryError, match=why) as caught:
        CommandHook(words).deliver(alert())
    assert not caught.value.again


def test_a_command_that_never_ends_is_ended_with_its_children(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # The child holds the pipe open; that it can be read to its end shows that the child is gone, too.
    script = f"exec 3>{fifo}; sleep 600 & wait"
    reader: list[bytes] = []
    thread = threading.Thread(target=lambda: reader.append(fifo.read_bytes()))
    thread.start()
    with pytest.raises(DeliveryError, match="took more than"):
        CommandHook(["/bin/sh", "-c", script], timeout_s=1.0).deliver(alert())
    thread.join(PATIENCE_S)
    assert reader == [b""]


def test_a_command_that_reads_nothing_is_no_error() -> None:
    CommandHook([sys.executable, "-c", ""]).deliver(alert())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "takes a command or a URL"),
        (" \n ", "takes a command or a URL"),
        ("say 'hello", "close the quotes"),
        ("./page-me.sh --now", "no command './page-me.sh' can be run"),
        ("''", "takes a command or a URL"),
        ("http://", "needs a host"),
        ("https://a b/", "needs a host"),
        ("https://example.com:port/", "cannot be read"),
        ("https://me:secret@example.com/", "user name"),
    ],
)
def test_hooks_that_cannot_be_are_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        parse_hooks(text)
    assert "secret@" not in str(caught.value)


def test_several_hooks_are_given_one_a_line() -> None:
    hooks = parse_hooks("https://example.com/x?token=secret\nsh --now\n")
    assert [(hook.label, hook.name) for hook in hooks] == [
        ("webhook", "the webhook at example.com"),
        ("command", "the command 'sh'"),
    ]


# ------------------------------------------------------------------------------------------------ the queue


def test_alerts_are_delivered_in_order_before_the_end() -> None:
    hook = Remembering()
    courier = courier_of(hook)
    for rank in range(5):
        courier.offer(alert(rank))
    hook.gate.set()
    courier.close(PATIENCE_S)
    assert hook.told == [0, 1, 2, 3, 4]
    assert courier.counts == {DELIVERED: 5, FAILED: 0, DROPPED: 0}


def test_nobody_waits_for_a_hook_that_hangs_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    hook = Remembering()
    courier = courier_of(hook, most_waiting=3)
    courier.offer(alert(0))
    assert hook.began.wait(PATIENCE_S)
    for rank in range(1, 6):
        courier.offer(alert(rank))
    assert courier.counts[DROPPED] == 2
    courier.close(0.0)
    assert hook.cancelled.is_set()
    assert courier.counts[DROPPED] == 5
    (said,) = warnings_in(caplog)
    assert "the oldest are dropped" in said
    assert "training goes on" in said


def test_another_try_is_made_where_it_makes_sense(caplog: pytest.LogCaptureFixture) -> None:
    hook = Remembering(DeliveryError("busy", again=True), DeliveryError("busy", again=True))
    hook.gate.set()
    courier = courier_of(hook)
    courier.offer(alert(7))
    drain(courier)
    courier.close(PATIENCE_S)
    assert hook.told == [7]
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("error", [DeliveryError("no", again=False), RuntimeError("odd")], ids=["refused", "odd"])
def test_what_fails_is_said_once_and_the_next_is_tried(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    hook = Remembering(error, error)
    hook.gate.set()
    courier = courier_of(hook)
    for rank in range(3):
        courier.offer(alert(rank))
    courier.close(PATIENCE_S)
    assert hook.told == [2]
    assert courier.counts == {DELIVERED: 1, FAILED: 2, DROPPED: 0}
    assert len(warnings_in(caplog)) == 1


def drain(courier: HookQueue) -> None:
    """Wait until nothing is left to deliver, while the run still goes on."""
    until(courier.counts.total)


def test_a_server_with_a_bad_day_is_told_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with hook_server() as server:
        server.answers = [500, 503]
        courier = courier_of(Webhook(server.url))
        courier.offer(alert())
        drain(courier)
        courier.close(PATIENCE_S)
        assert len(server.rest()) == 3
    assert courier.counts[DELIVERED] == 1
    assert warnings_in(caplog) == []


def test_the_end_does_not_wait_for_a_command_that_never_ends(caplog: pytest.LogCaptureFixture) -> None:
    before = set(threading.enumerate())
    courier = courier_of(CommandHook([sys.executable, "-c", "import time; time.sleep(600)"], timeout_s=600))
    courier.offer(alert())
    courier.close(0.2)
    until(lambda: not before.symmetric_difference(threading.enumerate()))
    assert len(warnings_in(caplog)) == 1
