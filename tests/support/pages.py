"""Pages of Markdown, as tests read them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ringside.commands import build_parser
from ringside.commands import run as run_command
from ringside.launch.torchrun import parse_command_line


def anchors(page: Path) -> set[str]:
    """Return the places in a page that a link can lead to, as GitHub names them."""
    text = page.read_text()
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    named = {
        re.sub(r"[^\w\- ]", "", re.sub(r"<[^>]*>", "", title)).strip().lower().replace(" ", "-") for title in titles
    }
    return named | set(re.findall(r'<a id="([\w-]+)">', text))


def parse(command: str) -> None:
    """Parse a command line that a page shows, of `ringside run` torchrun's part by torchrun's own parser.

    Raises:
        SystemExit: It does not parse.
    """
    words = shlex.split(command, comments=True)[1:]
    args = build_parser(verbs=words[:1]).parse_args(words)
    if words[0] == "run":
        torchrun = pytest.importorskip("torch.distributed.run", reason="torch is not installed")
        switches = (run_command.NCCL, run_command.SURVIVE, *run_command.VERBOSE, *run_command.QUIET)
        line = parse_command_line(args.words, ours=run_command.OURS, switches=switches)
        line.check_ranks()
        torchrun.get_args_parser().parse_args(line.with_defaults("2"))
