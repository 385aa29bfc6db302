"""One truth per number: every view of a finished run shows the same verdicts, prices, steps and times."""

from __future__ import annotations

import base64
import html
import io
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.recorded_runs import own_times, slow_run, write_run
from tests.support.waiting import until
from tests.view.served import serving, told

from ringside.commands import main
from ringside.text import duration, percent, rank_time, signed_percent
from ringside.view.terminal import closing_summary
from ringside.view.tui.console import SafeConsole
from ringside.view.verdict_text import verdict_text

ONSET = 60


def healthy(path: Path) -> Path:
    return write_run(path, own_times(300, 4))


def slow(path: Path) -> Path:
    """Noticed when it was 20 % slower, and 40 % slower later on: the event knows only the beginning."""
    own = own_times(200, 4)
    own[ONSET:120, 2] *= 1.2
    own[120:, 2] *= 1.4
    write_run(path, own)
    first = {
        "kind": "slow_rank", "ranks": [2], "since_step": ONSET, "detected_step": 66, "excess_ratio": 0.2,
        "cause": "", "cost_rank_seconds": 0.6, "evidence": {"own_seconds": 0.12, "others_own_seconds": 0.1},
    }  # fmt: skip
    with (path / "events.jsonl").open("a") as events:
        events.write(json.dumps({"kind": "verdict", "unix": 1.0, "verdict": first}) + "\n")
    return path


def killed(path: Path) -> Path:
    """Cut off before any event, in the middle of a line."""
    slow_run(path)
    with (path / "steps.jsonl").open("a") as steps:
        steps.write('{"step":120,"ra')
    return path


def undecided(path: Path) -> Path:
    return write_run(path, own_times(40, 4, jitter=0.3))


def old_schema(path: Path) -> Path:
    """Written by a version that had less to say: records, events and summary lack what came later."""
    slow_run(path, rank=1)
    lines = []
    for line in (path / "steps.jsonl").read_text().splitlines():
        fields = json.loads(line)
        for later in ("wire_seconds", "sync_seconds", "busy_seconds", "latency_seconds", "collectives"):
            fields.pop(later, None)
        lines.append(json.dumps(fields) + "\n")
    (path / "steps.jsonl").write_text("".join(lines))
    (path / "events.jsonl").write_text('{"unix": 1.0, "kind": "ended?"}\n')
    (path / "summary.json").write_text('{"schema": 1, "verdicts": []}')
    return path


def resumed(path: Path) -> Path:
    """Resumed from a checkpoint: its first record is of step 500."""
    return write_run(path, own_times(300, 4), first=500)


MAKERS = (healthy, slow, killed, undecided, old_schema, resumed)


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: str(make.__name__))
def test_all_views_of_a_finished_run_agree(
    make: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # no other job of this machine
    path = make(tmp_path / "run")
    long_ago = time.time() - 60
    os.utime(path / "steps.jsonl", (long_ago, long_ago))

    def printed(*words: str) -> str:
        assert main([words[0], str(path), *words[1:]]) == 0
        return capsys.readouterr().out

    # `top` and `serve` come first: what `report` writes must not be needed.
    top, top_json = printed("top", "--once", "--all"), json.loads(printed("top", "--json"))
    with serving(path) as url:
        until(lambda: (now := told(url))["questions"] and now["state"] not in ("reading", "waiting"), "the judgement")
        served = told(url)
    summary = json.loads(printed("report", "--json"))
    report, markdown = printed("report"), printed("report", "--markdown")
    page = _text((path / "report.html").read_text())
    texts = [verdict_text(content, summary) for content in summary["verdicts"]]
    stream = io.StringIO()
    SafeConsole(file=stream, width=1000).print(closing_summary(summary, [text.verdict for text in texts]))
    terminal = stream.getvalue()

    # Which verdicts, of which ranks, by how much, at what price.
    assert bool(texts) == (make in (slow, killed, old_schema))
    kinds = [(text.verdict.kind, text.verdict.ranks, text.verdict.since_step) for text in texts]
    for verdicts in (top_json["verdicts"], served["verdicts"], summary["verdicts"]):
        assert [(found["kind"], found["ranks"], found["since_step"]) for found in verdicts] == kinds
        assert [found["cost_rank_seconds"] for found in verdicts] == [text.verdict.cost_rank_seconds for text in texts]
    assert [verdict["headline"] for verdict in served["verdicts"]] == [text.headline for text in texts]
    assert [verdict["excess_ratio"] for verdict in top_json["verdicts"]] == [
        text.verdict.excess_ratio for text in texts
    ]
    for text in texts:
        slower, price = percent(text.verdict.excess_ratio), rank_time(text.verdict.cost_rank_seconds)
        assert all(f"{slower} slower" in view for view in (top, report, page, markdown, terminal))
        assert all(price in view for view in (top, report, page, markdown, served["cost"]))
        assert f"{rank_time(text.verdict.cost_rank_seconds)} lost, summed over ranks" in terminal
        assert all(text.why in view for view in (" ".join(report.split()), page))
    if not texts:
        sure = make in (healthy, resumed)
        words = "No straggler detected." if sure else "No verdict."
        assert all(words in view for view in (top, report, page, markdown, terminal))
        assert (served["calm"][0], served["calm"][2]) == (words, sure)

    # A count of steps is that of the recorded ones; the last step's number is counted from the training's first, 0.
    count = f"{summary['steps']} steps"
    assert served["steps"] == summary["steps"]
    assert top_json["step"] == served["step"] == summary["steps"] - 1 + (500 if make is resumed else 0)
    assert ("(steps 500 to 799)" in top) == (make is resumed)
    assert all(count in view for view in (top, page, terminal))
    assert f"| steps | {summary['steps']} |" in markdown

    # Step time and exposed time, with their window and statistic.
    tiles = {name: (value, more) for name, value, more in served["tiles"]}
    step, exposed = (
        duration(summary["step_seconds"]["median"]), duration(summary["sync"]["exposed_seconds_per_step"])
    )  # fmt: skip
    assert served["step_seconds"] == summary["step_seconds"]["median"]
    for name, value in (("step time", step), ("exposed communication", exposed)):
        assert tiles[name][0] == value
        assert "median, whole run" in tiles[name][1]
        assert re.search(rf"{name} {re.escape(value)} [^;]*;? ?median, whole run", page)
    assert f"Medians, whole run: {count} of {step}; " in terminal
    assert f"exposed {exposed} " in terminal
    assert all(value in markdown for value in (step, exposed))
    questions = summary["questions"]["communication_dominates"]["numbers"]
    assert questions["exposed_seconds"] == summary["sync"]["exposed_seconds_per_step"]
    assert questions["step_seconds"] == summary["step_seconds"]["median"]

    # Every rank's row.
    assert all("medians, whole run" in view for view in (top, page, markdown))
    assert served["window"] == "whole run"
    excess = np.frombuffer(base64.b64decode(served["figures"]["excess_ratio"]), np.float32)
    by_rank = {rank["rank"]: rank for rank in top_json["ranks"]}
    for rank in summary["ranks"]:
        assert by_rank[rank["rank"]]["excess_ratio"] == rank["excess_ratio"]
        assert by_rank[rank["rank"]]["own_seconds"] == rank["own_seconds_median"]
        assert excess[rank["rank"]] == np.float32(rank["excess_ratio"])
        cells = (duration(rank["own_seconds_median"]), duration(rank["wait_seconds_median"]))
        row = rf"{re.escape(cells[0])} +{re.escape(cells[1])}"
        excess_of = rf" .*{re.escape(signed_percent(rank['excess_ratio']))}"
        # A rank that is no slower than the others has no excess in what is kept; `top` shows it as it varies.
        assert re.search(row + excess_of, top)
        slower = excess_of if rank["excess_ratio"] > 0 else ""
        assert all(re.search(row + slower, view) for view in (report, page, terminal))


def _text(page: str) -> str:
    """A page's words, with single spaces."""
    body = re.sub(r"<(style|script|svg)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).replace("\u00a0", " ").split())
