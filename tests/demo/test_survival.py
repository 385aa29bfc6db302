"""The script of `ringside demo --kill`, on ranks that nobody kills: what it says adds up."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from tests.pytorch.training import LIMIT_S, free_port
from tests.support.ranks import on_ranks

from ringside.demo import survive as survival
from ringside.demo.corpus import Corpus


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus"
    path.mkdir()
    shutil.copy(Path(__file__).parents[1] / "test_faults.py", path / "0.py")
    return path


def survived(port: int, told: str, corpus: str) -> int:
    """Train on this rank; what it says goes to a file."""
    os.environ["MASTER_PORT"] = str(port)
    rank = int(os.environ["RANK"])
    if rank == 0:
        global store
        store = torch.distributed.TCPStore("127.0.0.1", port, None, True, timedelta(seconds=60), wait_for_workers=False)
    with open(f"{told}-{rank}", "w") as file:
        sys.stdout = file
        return survival.main(["--steps=6", "--size=tiny", "--seed=3", f"--corpus={corpus}"])


def test_what_ranks_say_adds_up(tmp_path: Path, corpus: Path):
    assert on_ranks(2, survived, free_port(), str(tmp_path / "told"), str(corpus), limit_s=LIMIT_S) == [0, 0]
    for rank in range(2):
        said = lines(tmp_path / f"told-{rank}")
        assert [one["event"] for one in said] == ["up", *["step"] * 6, "end"]
        assert {one["rank"] for one in said} == {rank}
        assert said[0]["joined"] is False
        assert [one["step"] for one in said[1:-1]] == list(range(6))
        assert all(one["members"] == [0, 1] and 4.0 < one["loss"] < 6.0 for one in said[1:-1])
        assert sorted(one["at"] for one in said) == [one["at"] for one in said]
        assert (said[-1]["step"], said[-1]["lost"], said[-1]["twice"]) == (5, 0, 0)
        assert said[-1]["samples"] == 6 * 2 * survival.SIZES["tiny"].batch
    ends = [lines(tmp_path / f"told-{rank}")[-1] for rank in range(2)]
    assert ends[0]["digest"] == ends[1]["digest"]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(survival.MARK)) for line in path.read_text().splitlines()]


def test_training_ends_when_everybody_is_back_for_a_while():
    def end_of(memberships: list[int], joined: bool) -> int | None:
        end = survival.TrainingEnd(3, joined)
        for number, count in enumerate(memberships):
            if end.reached(SimpleNamespace(members=range(count))):
                return number
        return None

    after = survival.AFTERWARDS
    assert end_of([3] * 200, joined=False) is None  # nobody was ever missing
    assert end_of([3] * 10 + [2] * 5 + [3] * 100, joined=False) == 15 + after
    assert end_of([2] * 5 + [3] * after + [2] + [3] * 100, joined=False) == 6 + 2 * after
    assert end_of([3] * 100, joined=True) == after  # it only saw what came afterwards


def test_windows_cover_the_text_and_know_the_byte_after_each(corpus: Path):
    text = Corpus(corpus, 0, 1, 32)
    windows = survival.Windows(text, 32)
    assert len(windows) == (len(text.text) - 1) // 32
    parts = [windows[index] for index in range(len(windows))]
    assert all(part.dtype == torch.int64 and len(part) == 33 for part in parts)
    assert all(part[-1] == following[0] for part, following in itertools.pairwise(parts))
    assert torch.cat([part[:-1] for part in parts]).tolist() == text.text[: 32 * len(windows)].tolist()


def test_a_loss_is_summed_over_samples():
    batch = torch.zeros(5, 9)
    assert survival.summed_loss(lambda given: given.mean() + 0.5, batch).item() == 2.5


def test_samples_lost_and_counted_twice_are_what_the_decisions_say(monkeypatch: pytest.MonkeyPatch):
    decisions = [
        SimpleNamespace(first=0, samples=4),
        SimpleNamespace(first=4, samples=3),
        SimpleNamespace(first=4, samples=4),
    ]
    t: Any = SimpleNamespace(
        committed=lambda end: decisions[:end],
        samples=SimpleNamespace(of_step=lambda step: range(4 * step, 4 * step + 4)),
        digest=lambda: 0xAB,
    )
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(survival, "emit", lambda **fields: said.append(fields))
    survival._conclude(t, 2)
    assert said == [{"event": "end", "step": 2, "samples": 11, "lost": 1, "twice": 1, "digest": "00000000000000ab"}]
