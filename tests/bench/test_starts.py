"""Every module of bench/ still starts: what it imports is there, and `--help` says what it takes."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
from tests.support.ranks import run_script

ROOT = Path(__file__).parents[2]


def test_every_module_of_bench_starts():
    (ended,) = run_script(1, Path(__file__).parent / "starts.py", limit_s=120.0)
    assert ended.status == 0, ended.err
    problems = json.loads(ended.out.splitlines()[-1])
    assert len(problems) == len(list((ROOT / "bench").rglob("*.py")))
    assert not {name: problem for name, problem in problems.items() if problem}
