"""Commands of README and docs/schedules.md exist, the README's Python blocks run, links and pictures are there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import zygote
from tests.support.pages import anchors, parse

from ringside.commands import GROUPS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SCHEDULES = (ROOT / "docs" / "schedules.md").read_text()
BETWEEN_HOSTS = (ROOT / "docs" / "between-hosts.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README + SCHEDULES, re.DOTALL)
COMMANDS = [
    command[1]
    for language, block in BLOCKS
    if language in ("console", "text")
    for command in re.finditer(r"^\$ (?:[A-Z_]+=\S+ )?(ringside .*)$", block, re.MULTILINE)
]
RUN_HERE = ("verify", "draw")  # the others have tests of their own, and take longer


def outputs(command):
    """Return the lines that are shown below a command."""
    block = next(block for _, block in BLOCKS if f"$ {command}\n" in block)
    after = block.split(f"$ {command}\n")[1]
    return [line for line in re.split(r"^\$ ", after, flags=re.MULTILINE)[0].splitlines() if line]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command):
    parse(command)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.split()[1] in RUN_HERE])
def test_quick_commands_print_what_is_shown(command, tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert [line.rstrip() for line in result.stdout.splitlines() if line] == outputs(command)


def test_every_command_has_its_line():
    groups, name = {}, ""
    for group, verb in re.findall(r"^\| (?:\*\*(.*)\*\* )?\| \[`([\w-]+)`\]", README, re.MULTILINE):
        name = group or name  # the first line of a group names it
        groups.setdefault(name, []).append(verb)
    assert {name: tuple(verbs) for name, verbs in groups.items()} == GROUPS


def test_python_blocks_run(tmp_path):
    """In one process: the DDP block with a model and a store put before it, and the NumPy block of another page."""
    (ddp,) = (block for language, block in BLOCKS if language == "python")
    (alone,) = re.findall(r"```python\n(import numpy.*?)```", BETWEEN_HOSTS, re.DOTALL)
    model = "import torch\nmodel = torch.nn.Linear(3, 3)\n"
    program = f"{model}{ddp}model(torch.ones(1, 3)).sum().backward()\n{alone}print('ENDED', float(x.sum()))\n"
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    result = subprocess.run(
        [zygote.python(), "-c", program],
        cwd=tmp_path,
        env={**os.environ, **place},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "ENDED 0.0" in result.stdout


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "docs/benchmarks.md", "docs/schedules.md"])
def test_links_lead_somewhere(document):
    path = ROOT / document
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", path.read_text()):
        name, _, place = target.partition("#")
        assert (path.parent / name).exists(), target
        assert not place or place in anchors(path.parent / name if name else path), target


def test_the_two_commands_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^\$ make (\w+)$", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
