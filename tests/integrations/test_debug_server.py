"""PyTorch's debug server with our page: the example's, while it trains, and what the page says in other cases."""

from __future__ import annotations

import html
import importlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch.distributed.debug", reason="the debug server came with torch 2.13")
pytest.importorskip("jinja2", reason="PyTorch's debug server needs jinja2: pip install jinja2")
from tests.integrations.frameworks import EXAMPLES
from tests.recorded_runs import slow_run
from tests.support.waiting import free_port

from ringside.errors import UsageError
from ringside.monitor.run.registry import register
from ringside.monitor.verdict import Verdict

PATIENCE_S = 90.0
NOBODY = "● there is nobody to wait for: one rank is all there is"


def page(port: int, shows: str) -> str:
    """Return the page once it shows something; there is no event to wait for."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://localhost:{port}/ringside", timeout=10) as answer:
                text = str(answer.read().decode())
        except (urllib.error.URLError, ConnectionError):
            text = ""
        if shows in text:
            return text
        time.sleep(0.1)
    raise AssertionError(f"{shows!r} was not shown: {text}")


def test_the_example_shows_its_ranks_beside_pytorchs_pages(tmp_path: Path) -> None:
    pytest.importorskip("tabulate", reason="PyTorch's debug server needs tabulate: pip install tabulate")
    port, place = free_port(), {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, str(EXAMPLES / "integrations_debug_server.py"), "--steps", "100000000"]
    with subprocess.Popen(
        [*command, "--port", str(port)],
        env={**os.environ, **place, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as trains:
        try:
            text = page(port, NOBODY)
        finally:
            os.killpg(trains.pid, signal.SIGTERM)  # PyTorch's server is a process of its own
    assert re.search(r"^ +0 +\S+", text, re.MULTILINE), text  # the one rank's line
    assert 'href="/ringside"' in text
    assert 'href="/stacks"' in text


def test_verdicts_stand_in_the_page_and_in_dumps_and_names_are_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend = importlib.import_module("torch.distributed.debug._frontend")
    ours = importlib.import_module("ringside.integrations.debug_server")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    handler = ours.RingsidePage()
    assert handler.dump() == ours.NOT_YET
    run = slow_run(tmp_path / "<b>run")
    verdict = Verdict(
        kind="slow_rank", ranks=[2], since_step=60, detected_step=70, excess_ratio=0.3, cause="<i>it works longer</i>"
    )
    event = msgspec.json.encode({"unix": 1.7e9, "kind": "verdict", "verdict": verdict})
    (run / "events.jsonl").write_bytes(event + b"\n")
    register(run, 4, time.time())
    assert "<b>run" in handler.dump()
    assert "● rank 2 is 30% slower than the others since step 60\n  why    <i>it works longer</i>" in handler.dump()
    assert handler.dump_filename() == "ringside"
    try:
        server = frontend.FrontendServer(0, [handler])
    except OSError as error:
        pytest.skip(f"no IPv6, which PyTorch's server needs: {error}")
    try:
        text = page(server._server.server_port, "● rank 2 is 30% slower than the others since step 60")
    finally:
        server._server.shutdown()
        server._server.server_close()
    for written in ("<b>run", "<i>it works longer</i>"):
        assert html.escape(written) in text
        assert written not in text


def test_what_is_missing_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = importlib.import_module("ringside.integrations.debug_server")
    monkeypatch.delitem(sys.modules, "torch.distributed.debug._debug_handlers", raising=False)
    monkeypatch.setitem(sys.modules, "tabulate", None)
    with pytest.raises(UsageError) as raised:
        ours.handlers()
    assert str(raised.value) == ("PyTorch's debug server needs tabulate, which is not installed: pip install tabulate")
