"""The page about the lab: its commands parse, its Python runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ringside.commands import build_parser
from ringside.lab import Lab

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "lab.md").read_text()


@pytest.mark.parametrize("command", re.findall(r"^\$ ringside (.*)$", PAGE, re.MULTILINE))
def test_commands_parse(command: str):
    words = shlex.split(command)
    assert build_parser(verbs=(words[0],)).parse_args(words).command_line[-2:] == ["python", "train.py"]


@pytest.mark.skipif(bool(Lab.unavailable()), reason=Lab.unavailable())
def test_the_python_block_runs(tmp_path: Path):
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "train.py").write_text("print('trained')\n")
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(eval(done.stdout)) == 3
