"""Every reader gets real files that are damaged: a few in `make test`, for a minute each in `make test-long`.

`RINGSIDE_FUZZ_SEED` is another seed, `RINGSIDE_FUZZ_SECONDS` another time, `RINGSIDE_FUZZ_KEEP` a folder for the
damaged files of what is found. What was found once stands in `test_fuzz_findings.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("RINGSIDE_FUZZ_SEED", "19"))
SECONDS = float(os.environ.get("RINGSIDE_FUZZ_SECONDS", "60"))
READERS = {
    "doctor": ("dumps", "traces", "logs", "errors", "calls", "ras", "timelines", "archives", "runs-doctor"),
    "runs": ("runs-report", "runs-value", "runs-live"),
    "predict": ("tables", "topologies"),
    "jobs": ("checkpoints", "states", "messages", "pages"),
}


def damage(readers: Sequence[str], seed: int, *more: str) -> None:
    """Fuzz readers in a process of their own, which has bounds; fail with what was found."""
    command = [sys.executable, "-m", "tests.hostile.fuzz_run", *readers, "--seed", str(seed), *more]
    if keep := os.environ.get("RINGSIDE_FUZZ_KEEP"):
        command += ["--keep", keep]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-5000:]}"
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["reader"] for result in results] == list(readers)
    found = [told(result, kind, one) for result in results for kind, one in result["found"].items()]
    assert not found, "\n\n".join(found)
    assert all(result["cases"] > 0 for result in results)


def told(result: dict[str, Any], kind: str, found: dict[str, Any]) -> str:
    """One finding in words: where it can be seen again, how, and the smallest files that show it."""
    where = f"{result['reader']}: seed {result['seed']}, case {found['case']}, {found['count']} of {result['cases']}"
    files = "\n".join(f"{name}: {content}" for name, content in found["files"].items())
    return f"{kind} ({where})\n{found['stack']}\n{files}"


@pytest.mark.parametrize("kind", READERS)
def test_damaged_files_are_read_or_refused_in_words(kind: str) -> None:
    damage(READERS[kind], 2, "--cases", "5")


@pytest.mark.long
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("reader", [reader for readers in READERS.values() for reader in readers])
def test_a_minute_of_damaged_files(reader: str) -> None:
    damage([reader], SEED, "--seconds", str(SECONDS))


def test_every_reader_is_fuzzed() -> None:
    from tests.hostile.fuzz_readers import READERS as all_readers

    assert sorted(reader for readers in READERS.values() for reader in readers) == sorted(all_readers)
