"""One line (or none) in a framework's script: every step of every rank is recorded, and our engine carries it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
from tests.integrations.frameworks import EXAMPLES, check, installed_with_entry_points, train

STEPS = 8


def needs(*packages: str) -> None:
    """Skip where a framework is not installed."""
    for name in packages:
        pytest.importorskip(name, reason=f"{name} is not installed: pip install 'torch-ringside[integrations]'")


def test_accelerate_under_ringside_run_is_attached_once(tmp_path: Path) -> None:
    needs("accelerate")
    start = ("-m", "ringside", "run", "--run-dir", str(tmp_path / "run"))
    trained = train(EXAMPLES / "integrations_accelerate.py", tmp_path / "run", steps=STEPS, start=start)
    check(trained, STEPS)
    assert {record.samples for record in trained.records} == {16}
    assert all(record.loss is not None for record in trained.records)
    assert f"recorded in {tmp_path / 'run'}" in trained.out


def test_transformers(tmp_path: Path) -> None:
    needs("accelerate", "transformers")
    trained = train(EXAMPLES / "integrations_transformers.py", tmp_path / "run", steps=STEPS)
    check(trained, STEPS)
    # Two micro-batches of four sentences, each as long as its longest (4 to 39 tokens).
    work = {record.samples for record in trained.records}
    assert min(work) >= 2 * 4 * 4
    assert max(work) <= 2 * 4 * 39
    assert len(work) > 2
    assert not any(tokens % 4 for tokens in work)
    by_step = {record.step: record.loss for record in trained.records}
    assert all(record.loss == by_step[record.step] for record in trained.records)  # the trainer logs the mean
    assert (by_step[STEPS - 1] or 9) < (by_step[0] or 0)


def test_lightning_with_its_callback(tmp_path: Path) -> None:
    needs("lightning")
    found = installed_with_entry_points(tmp_path / "site")  # the callback that is found gives way to the script's
    trained = train(EXAMPLES / "integrations_lightning.py", tmp_path / "run", steps=STEPS, **found)
    check(trained, STEPS)
    assert {record.samples for record in trained.records} == {2 * 16}
    assert all(0 < (record.loss or 0) < 9 for record in trained.records)


def test_lightning_without_a_line(tmp_path: Path) -> None:
    needs("lightning")
    lines = (EXAMPLES / "integrations_lightning.py").read_text().splitlines(keepends=True)
    unmodified = "".join(line for line in lines if "RingsideCallback" not in line)
    assert "import ringside" not in unmodified
    assert "from ringside" not in unmodified
    (tmp_path / "train.py").write_text(unmodified)
    found = installed_with_entry_points(tmp_path / "site")
    trained = train(tmp_path / "train.py", tmp_path / "run", steps=STEPS, **found)
    check(trained, STEPS)
    assert {record.samples for record in trained.records} == {2 * 16}
