"""docs/peers.md: what a cell is, which peer is the best, and what is said of those that failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench.allreduce.call_profile import table
from bench.peers import __main__ as run
from bench.peers.page import cells, page

from ringside.bench.messages import Skipped
from ringside.bench.plan import BenchPlan

from .reports import PLAN, SIZE, report


def cell(
    ours_s: list[float], peer_s: list[float], *, size: int = 1024, wrong: int = 0, peer_wrong: int = 0
) -> dict[str, Any]:
    return {
        "size_bytes": size, "cache": "warm", "tensor": "private", "array": "numpy", "ours_s": ours_s, "peer_s": peer_s,
        "ours_single_s": [1e-6, 2e-6], "peer_single_s": [3e-6, 4e-6], "wrong": wrong, "peer_wrong": peer_wrong,
    }  # fmt: skip


def launch(*found: dict[str, Any], failed: str = "") -> dict[str, Any]:
    told = {"failed": failed, "about": "version 1", "took_s": 1.0, "load": 7.2, "date": "2026-11-27"}
    return {"cells": list(found), **told}


def test_a_cell_is_of_neighbouring_turns_beside_the_peer_by_which_ours_looks_worst() -> None:
    ours = [1e-6, 10e-6] * 4
    launches = {
        "all_reduce 2 gloo 0": launch(cell(ours, [2 * t for t in ours])),
        "all_reduce 2 mpich 0": launch(cell(ours, [0.5 * t for t in ours])),
        "all_reduce 2 mpich 1": launch(cell(ours, [0.8 * t for t in ours])),
        "all_reduce 2 impi 0": launch(cell(ours, [0.1 * t for t in ours], peer_wrong=1)),
    }
    (found,) = cells(launches)
    assert (found.peer, found.verdict) == ("mpich", "behind")
    assert found.ratio == pytest.approx((1 / 0.5 + 1 / 0.8) / 2)
    assert (found.low, found.high) == (pytest.approx(1.25), pytest.approx(2.0))
    assert found.times[0] == pytest.approx((5.5e-6, 1e-6, 2e-6))


@pytest.mark.parametrize(("size", "ratio", "verdict"), [(4, 1.08, "even"), (64, 1.08, "behind"), (64, 0.9, "ahead")])
def test_what_is_behind_depends_on_the_size(size: int, ratio: float, verdict: str) -> None:
    (found,) = cells({"all_reduce 2 gloo 0": launch(cell([ratio] * 8, [1.0] * 8, size=size))})
    assert found.verdict == verdict


def test_a_verdict_takes_six_turns_and_right_results_of_ours() -> None:
    def verdict(turns: int, wrong: int = 0) -> str:
        (found,) = cells({"all_reduce 2 gloo 0": launch(cell([0.5] * turns, [1.0] * turns, wrong=wrong))})
        return found.verdict

    assert [verdict(turns) for turns in (3, 5, 6)] == ["undecided", "undecided", "ahead"]
    assert verdict(6, wrong=1) == "wrong"


def test_a_page_alone_keeps_when_and_where_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "peers.json"
    launches = {"all_reduce 2 gloo 0": launch(cell([1.0] * 8, [1.0] * 8))}
    launches["all_reduce 2 gloo 1"] = {**launches["all_reduce 2 gloo 0"], "date": "2026-11-29"}
    file.write_text(json.dumps({"short": True, "cores": 77, "absent": {"vllm": "not there"}, "launches": launches}))
    monkeypatch.setattr("sys.argv", ["bench.peers", "--short", "--launches", "0", "--results", str(file)])
    assert run.main() == 0
    text = capsys.readouterr().out
    assert "77 cores, 2026-11-27 to 2026-11-29." in text
    assert "(load 7 on 77 cores)" in text
    assert "| vLLM | absent: not there |" in text


def test_a_peer_that_hangs_is_asked_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[BenchPlan] = []

    def run_launches(plan: BenchPlan) -> tuple[list[Any], list[Skipped]]:
        asked.append(plan)
        return [[report(0.0)] * 2], [Skipped("gloo", "hung")] if len(asked) == 1 else []

    monkeypatch.setattr(run, "run_launches", run_launches)
    found = run.measure(run.Work("all_reduce", 2, PLAN), "gloo")
    assert (len(asked), len({plan.key for plan in asked})) == (2, 2)
    assert "hung" not in found["failed"]
    assert {cell["size_bytes"] for cell in found["cells"]} == {1024, SIZE}
    assert "limit_share" not in found["cells"][0]


def test_the_page_names_losses_failures_and_wrong_results() -> None:
    results = {
        "short": True, "cores": 2, "absent": {"vllm": "not here"},
        "launches": {
            "all_reduce 4 gloo 0": launch(cell([2e-6] * 8, [1e-6] * 8), failed="hung"),
            "all_reduce 4 impi 0": launch(cell([1e-6] * 8, [1e-6] * 8, peer_wrong=3)),
        },
    }  # fmt: skip
    text = page(results)
    assert "busy with other work (load 7 on 2 cores)" in text
    assert "| 4 ranks (more than cores), 64 B and more | 1 | 0 | 0 | 1 | 0 | 0 |" in text
    assert "- **Wrong**: 3 elements of impi in all_reduce 4 impi 0, 1024 B" in text
    assert "| all_reduce, 4 | 1 KiB | warm | private numpy | 2.00 (2.00 to 2.00) | Gloo | 2 / 1 / 2 |" in text
    assert "| Gloo | version 1 | all_reduce: hung<br> |" in text
    assert "| vLLM | absent: not here |  |" in text


def test_a_layer_costs_what_a_call_loses_without_it() -> None:
    found = {"torch": [100.0] * 4, "array": [70.0] * 4, "host": [50.0] * 4, "core": [30.0] * 4, "python": [10.0] * 4}
    rows = table({**found, "flag": [130.0] * 4})
    assert [(row[0], row[2], row[3]) for row in rows[:2]] == [
        ("torch", "30 (30 to 30)", "100"), ("array", "20 (20 to 20)", "70"),
    ]  # fmt: skip
    assert (rows[-1][0], rows[-1][2]) == ("flag", "100 (100 to 100)")
