"""Where alerts go: a URL that gets them as JSON, or a command that gets them on its standard input.

Nothing of an alert ever becomes part of a command line, an address or a header.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ringside.errors import RingsideError, UsageError
from ringside.monitor.alerts.book import Alert
from ringside.monitor.run.directory import finite

WEBHOOK_TIMEOUT_S = 5.0
COMMAND_TIMEOUT_S = 30.0
BUSY = frozenset({408, 425, 429})
"""Answers below 500 after which another try makes sense."""


class DeliveryError(RingsideError):
    """An alert could not be delivered.

    Args:
        message: Why, without any secret that may be in an address.
        again: Whether another try makes sense.
    """

    def __init__(self, message: str, again: bool) -> None:
        super().__init__(message)
        self.again = again


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET without the alert in it."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Webhook:
    """Posts alerts to a URL as JSON; any answer 2xx acknowledges it.

    Args:
        url: `http://` or `https://`; proxies are taken from the environment as usual.
        timeout_s: Longest wait for the connection and for the answer.

    Attributes:
        label: What metrics call it.
        name: What warnings call it; it holds no secret.

    Raises:
        UsageError: There is no such URL.
    """

    label = "webhook"

    def __init__(self, url: str, timeout_s: float = WEBHOOK_TIMEOUT_S) -> None:
        self._url, self._timeout_s = url, timeout_s
        self.name = f"the webhook at {_host(url)}"
        self._opener = urllib.request.build_opener(_NoRedirect)

    def deliver(self, alert: Alert) -> None:
        """Post one alert, within a bounded time.

        Raises:
            DeliveryError: It could not be delivered.
        """
        headers = {"Content-Type": "application/json", "User-Agent": "ringside"}
        request = urllib.request.Request(self._url, encode(alert), headers, method="POST")
        try:
            self._opener.open(request, timeout=self._timeout_s).close()
        except urllib.error.HTTPError as error:
            error.close()
            raise DeliveryError(f"it answered {error.code}", error.code >= 500 or error.code in BUSY) from None
        except TimeoutError:
            raise DeliveryError(f"it did not answer within {self._timeout_s:g} s", again=True) from None
        except (OSError, http.client.HTTPException) as error:
            raise DeliveryError(f"it cannot be reached: {getattr(error, 'reason', error)}", again=True) from None

    def cancel(self) -> None:
        """Do nothing: the timeout ends it."""


class CommandHook:
    """Runs a command per alert, with the alert as JSON on its standard input; no shell is involved.

    What the command writes to stdout is dropped; its stderr is the job's. It is ended, with everything it started in
    its process group, when it takes too long.

    Args:
        words: The command and its arguments.
        timeout_s: How long it may take.

    Attributes:
        label, name: As of `Webhook`.

    Raises:
        UsageError: There are no words.
    """

    label = "command"

    def __init__(self, words: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        if not words or not words[0]:
            raise UsageError("--on-verdict takes a command or a URL, such as: --on-verdict ./page-me.sh")
        self._words, self._timeout_s = list(words), timeout_s
        self.name = f"the command {os.path.basename(words[0])!r}"
        self._guard = threading.Lock()
        self._cancelled = False
        self._child: subprocess.Popen[bytes] | None = None

    def deliver(self, alert: Alert) -> None:
        """Run the command once; as `Webhook.deliver`."""
        with self._guard:  # `cancel` is called on another thread
            if self._cancelled:
                raise DeliveryError("the run has ended", again=False)
            try:
                self._child = child = subprocess.Popen(
                    self._words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    # Nothing by which it would take itself for a rank, and no token.
                    env={key: value for key, value in os.environ.items() if not key.startswith("RINGSIDE")},
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                raise DeliveryError(f"it cannot be started: {error}", again=False) from None
        try:
            child.communicate(encode(alert), timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            raise DeliveryError(f"it took more than {self._timeout_s:g} s and was ended", again=False) from None
        finally:
            with self._guard:
                self._child = None
                _kill_group(child)
            with contextlib.suppress(OSError):
                if child.stdin is not None:
                    child.stdin.close()
            child.wait()
        if child.returncode and not self._cancelled:
            raise DeliveryError(f"it ended with status {child.returncode}", again=False)

    def cancel(self) -> None:
        """End the command that is running, and start none any more."""
        with self._guard:
            self._cancelled = True
            if self._child is not None:
                _kill_group(self._child)


Hook = Webhook | CommandHook
"""A place that alerts are delivered to."""


def parse_hooks(text: str) -> list[Hook]:
    """Return the hooks that a value of `--on-verdict` asks for: one a line, a URL or a command with its arguments.

    Args:
        text: Such as `https://example.com/hook` or `./page-me.sh --team 'night shift'`; quotes group words as in a
            shell, and nothing else of a shell's is understood.

    Raises:
        UsageError: There is none, or one that cannot be.
    """
    hooks: list[Hook] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.lower().startswith(("http://", "https://")):
            hooks.append(Webhook(line))
            continue
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise UsageError(f"--on-verdict {line!r} cannot be split into words ({error}): close the quotes") from None
        if any(words[:1]) and shutil.which(words[0]) is None:
            raise UsageError(
                f"--on-verdict: no command {words[0]!r} can be run from here: give its path, and chmod +x it"
            )
        hooks.append(CommandHook(words))
    return hooks or [CommandHook([])]


def encode(alert: Alert) -> bytes:
    """Return an alert as one line of JSON; numbers that JSON has not are null."""
    return msgspec.json.encode(finite(alert)) + b"\n"


def _host(url: str) -> str:
    """Return the host and port of a URL that alerts may be posted to; warnings show no more of it."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise UsageError(f"the URL of --on-verdict cannot be read: {error}") from None
    if not parts.hostname or not url.isascii() or any(character <= " " or character == "\x7f" for character in url):
        raise UsageError("the URL of --on-verdict needs a host and no spaces, such as https://example.com/hook")
    if "@" in parts.netloc:
        raise UsageError("the URL of --on-verdict contains a user name; put the secret into its path, or use a command")
    return parts.netloc


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)


# -------------------------------------------------------------------------------------------------
# Delivers alerts to a hook on a thread of its own, from a bounded queue: training never waits for a hook.

MOST_WAITING = 64
PAUSES_S = (1.0, 4.0)
"""Before the second and the third try."""

DELIVERED, FAILED, DROPPED = "delivered", "failed", "dropped"

_log = logging.getLogger(__name__)


class HookQueue:
    """Delivers alerts to one hook, in order; the first error is logged as a warning.

    Args:
        hook: Where to deliver.
        most_waiting: Alerts that may wait; beyond it the oldest is dropped.
        pauses_s: How long to wait before each further try.

    Attributes:
        hook: Where to deliver.
        counts: How many alerts were delivered, failed or were dropped.
    """

    def __init__(self, hook: Hook, *, most_waiting: int = MOST_WAITING, pauses_s: Sequence[float] = PAUSES_S) -> None:
        self.hook = hook
        self.counts: Counter[str] = Counter({DELIVERED: 0, FAILED: 0, DROPPED: 0})
        self._most, self._pauses_s = most_waiting, pauses_s
        self._waiting: deque[Alert] = deque()
        self._change = threading.Condition()
        self._busy = self._warned = self._closing = False
        self._thread = threading.Thread(target=self._run, name="ringside-notify", daemon=True)
        self._thread.start()

    def offer(self, alert: Alert) -> None:
        """Have an alert delivered soon; returns at once."""
        with self._change:
            if len(self._waiting) >= self._most:
                self._waiting.popleft()
                self.counts[DROPPED] += 1
                self._warn_once("too many alerts wait for it, the oldest are dropped")
            self._waiting.append(alert)
            self._change.notify_all()

    def close(self, patience_s: float) -> None:
        """Wait until everything is delivered, at most so long; what is left then is dropped."""
        deadline = time.monotonic() + patience_s
        with self._change:
            self._closing = True
            self._change.notify_all()
            done = self._change.wait_for(lambda: not self._waiting and not self._busy, patience_s)
            if not done:
                self.counts[DROPPED] += len(self._waiting)
                self._waiting.clear()
                self._warn_once("not every verdict was sent before the run ended")
        if not done:
            self.hook.cancel()
        self._thread.join(max(deadline - time.monotonic(), 0.5))

    def _run(self) -> None:
        """Deliver what is offered until the queue is closed and empty; runs on a thread of its own."""
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                self._busy, alert = True, self._waiting.popleft()
            outcome = self._deliver(alert)
            with self._change:
                self.counts[outcome] += 1
                self._busy = False
                self._change.notify_all()

    def _deliver(self, alert: Alert) -> str:
        """Deliver one alert, with further tries after an error that may pass; return the outcome."""
        pauses = iter(self._pauses_s)
        while True:
            try:
                self.hook.deliver(alert)
                return DELIVERED
            except DeliveryError as error:
                why, pause = str(error), next(pauses, None) if error.again else None
            except Exception as error:
                why, pause = f"{type(error).__name__}: {error}", None
            with self._change:  # the end of the run leaves no time for another try
                if pause is None or self._change.wait_for(lambda: self._closing, pause):
                    self._warn_once(why)
                    return FAILED

    def _warn_once(self, why: str) -> None:
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        _log.log(level, "%s: a verdict could not be sent (%s); training goes on", self.hook.name, why)
