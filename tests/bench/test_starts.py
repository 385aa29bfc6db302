"""Every script in bench/ still starts: what it imports is there, and `--help` says what it takes."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
from tests.support.ranks import run_script

ROOT = Path(__file__).parents[2]
START = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.bench.starts import main; main()"


def test_every_script_in_bench_starts():
    (ended,) = run_script(1, START, limit_s=120.0)
    assert ended.status == 0, ended.err
    problems = json.loads(ended.out.splitlines()[-1])
    assert len(problems) == len(list((ROOT / "bench").glob("*.py")))
    assert not {name: problem for name, problem in problems.items() if problem}
