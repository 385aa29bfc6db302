"""What docs/doctor.md shows is what the doctor prints, and every file and field it names exists."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ringside.commands import build_parser
from ringside.doctor.findings import QUESTIONS
from ringside.monitor.verdict import KINDS

from .dumps import call, world, write
from .shared_data import shared

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "doctor.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, re.DOTALL)
SHOWN = [block.split("\n", 1) for language, block in BLOCKS if language == "console"]
PLACES = {"lock_gil_1st": "flight_recorder", "timeline-ST.json.gz": "what_if"}


@pytest.mark.parametrize(("command", "output"), SHOWN)
def test_commands_print_what_is_shown(command: str, output: str):
    words = shlex.split(command.removeprefix("$ "))
    place = shared(PLACES[words[2].split("/")[0]])
    result = subprocess.run(
        [sys.executable, "-m", *words], cwd=place, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 1, result.stderr
    assert result.stdout.startswith(output)


def test_the_line_for_ci_passes_without_files_and_fails_with_verdicts(tmp_path: Path):
    (script,) = [block for language, block in BLOCKS if language == "sh"]
    script = script.replace("ringside", f"{shlex.quote(sys.executable)} -m ringside", 1)

    def status() -> int:
        return subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, timeout=120).returncode

    (tmp_path / "artifacts").mkdir()
    assert status() == 0
    usual = [*map(call, range(1, 6)), call(6, done=False)]
    write(tmp_path / "artifacts", world(4, {2: usual[:5]}, usual))
    assert status() != 0
    content = json.loads((tmp_path / "doctor.json").read_text())
    fields = re.search(r"`--json`: `\{(.*?)\}`\.", TEXT, re.DOTALL)
    assert fields is not None
    assert content.keys() <= set(re.findall(r'"(\w+)"', fields[1]))
    assert content["verdicts"][0]["ranks"] == [2]


def test_names_that_the_guide_gives_exist():
    kinds = set(re.findall(r"`(\w+)`", TEXT[TEXT.index("| kind | from |") : TEXT.index("What could not be judged")]))
    assert {"hang", "mismatch", "broken_ring", "dead_rank", "slow_rank"} <= kinds & set(KINDS)
    assert set(QUESTIONS) <= set(re.findall(r"`(\w+)`", TEXT))
    for target in re.findall(r"\]\(([^)#\s]+)\)", TEXT):
        assert (ROOT / "docs" / target).exists(), target
    build_parser(verbs=("doctor",)).parse_args(["doctor", "x", "--json", "--html", "y"])
