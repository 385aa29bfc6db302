"""Runs that are older, torn, hostile or another host's, in every view that prints: told as far as they are whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.recorded_runs import own_times, slow_run, write_run

from ringside.commands import main
from ringside.monitor.run.registry import register
from ringside.view.run.recorded import Run
from ringside.view.server.guard import holder, listen

STEPS, RANKS = 40, 4
MARKUP = '<img src=x onerror=alert(1)>"\u0000</script>\x1b[2J'
FIRST_FIELDS = ("step", "rank", "ended_unix", "step_seconds", "own_seconds")


def change(path: Path, **fields: object) -> None:
    """Change what `run.json` says."""
    file = path / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def older(path: Path) -> None:
    """As a Ringside that recorded little wrote it."""
    info = json.loads((path / "run.json").read_text())
    kept = {key: value for key, value in info.items() if key not in ("versions", "algorithm")}
    (path / "run.json").write_text(json.dumps({**kept, "schema": 0}))
    lines = [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]
    (path / "steps.jsonl").write_text("".join(json.dumps({k: line[k] for k in FIRST_FIELDS}) + "\n" for line in lines))


def torn(path: Path) -> None:
    """Cut off in the middle of a line, with lines before it that are none."""
    text = (path / "steps.jsonl").read_bytes()
    (path / "steps.jsonl").write_bytes(b"\xff\xfe\n[[[[\n" + text + b'null\n{"step": 1e400}\n{"step": 40, "ra')
    (path / "events.jsonl").write_bytes(b'\xff\n[[[[\n{"kind": 5}\n{"kind": "verdict", "verdict": null}\n{"kind": "ver')


def hostile(path: Path) -> None:
    """Full of what a terminal or a browser would act upon."""
    change(path, name=MARKUP, hosts=[MARKUP] * RANKS, algorithm=MARKUP, command=[MARKUP], future={"x": 1})
    verdict = {
        "kind": "slow_rank", "ranks": [2, -5, 10**30], "since_step": 20, "detected_step": 26, "excess_ratio": 0.3,
        "cause": MARKUP, "advice": MARKUP, "evidence": {"steps": "many", "until_step": MARKUP},
    }  # fmt: skip
    (path / "events.jsonl").write_text(json.dumps({"kind": "verdict", "verdict": verdict}) + "\n")
    (path / "summary.json").write_text(json.dumps({"schema": 1, "verdicts": MARKUP, "ranks": None}))


def foreign(path: Path) -> None:
    """Of another host: its processes are nobody's here, or somebody else's."""
    change(path, hosts=["elsewhere"] * RANKS, pids=[1, 2, 3, 4])


VIEWS = [
    "top --once run", "top --json run", "report run --markdown", "report run --json", "report run",
    "report run --perfetto trace.json", "compare run healthy", "compare healthy run", "doctor run",
]  # fmt: skip


@pytest.mark.parametrize("spoil", [older, torn, hostile, foreign])
def test_every_view_tells_what_is_whole(
    spoil: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "healthy", own_times(STEPS, RANKS))
    spoil(slow_run(tmp_path / "run", steps=STEPS, onset=20))
    for view in VIEWS:
        assert main(view.split()) in (0, 1, 4), (view, capsys.readouterr().err)
        told = capsys.readouterr()
        assert told.out.strip(), view
        assert "\x1b[2J" not in told.out + told.err, view
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Rank 2 is" in page
    assert "<img" not in page
    assert "<img" not in Run("run")._repr_html_()
    assert Run("run").own_seconds.shape == (STEPS, RANKS)


def test_a_port_says_which_job_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert register(write_run(tmp_path / "somebodys", own_times(4, 2)), 2, 1.7e9) is not None
    with listen("127.0.0.1", 0) as held:
        assert str(tmp_path / "somebodys") in holder(held.getsockname()[1])
