"""`ringside --print-completion SHELL`: what makes a shell complete verbs, flags, choices and files."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from ringside.commands.run import OURS
from ringside.errors import UsageError
from ringside.launch.torchrun import PLACES, SWITCHES

PATHS = {
    "directory": frozenset({"DIR", "RUN_DIR", "before", "after"}),
    "file": frozenset({"FILE", "TABLE", "PATH", "words", "command"}),
}
"""Arguments that are paths, by what help calls them."""


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script that a shell is to read.

    Args:
        parser: Of the command line.
        shell: bash, zsh or fish.

    Raises:
        UsageError: shtab, which writes it, is not installed.
    """
    try:
        import shtab
    except ImportError:
        raise UsageError("shell completion needs shtab: pip install 'ringside[completion]'") from None
    verbs = parts_of(parser)
    _add_flags_of_run(verbs["run"])
    for verb in (*verbs.values(), *parts_of(verbs["predict"]).values()):
        _say_what_paths_are(verb._actions, {"directory": shtab.DIRECTORY, "file": shtab.FILE})
    return str(shtab.complete(parser, shell))


def parts_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return a parser's sub-parsers by name."""
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: part for action in found for name, part in action.choices.items()}


def _add_flags_of_run(parser: argparse.ArgumentParser) -> None:
    """Add what `ringside run` takes apart by itself, and torchrun's flags that need no torch to be known."""
    parser.prefix_chars = "-"
    for flag in OURS:
        parser.add_argument(flag, metavar="DIR" if flag == "--run-dir" else "VALUE")
    for flag in sorted(PLACES | {"--nproc-per-node"}):
        parser.add_argument(flag, metavar="VALUE", help="as of torchrun")
    for flag in sorted(SWITCHES - {"-h", "--help"}):
        parser.add_argument(flag, action="store_true", help="as of torchrun")


def _say_what_paths_are(actions: Iterable[argparse.Action], kinds: dict[str, Any]) -> None:
    for action in actions:
        for kind, names in PATHS.items():
            if names & {action.metavar, action.dest}:
                action.complete = kinds[kind]  # type: ignore[attr-defined]
        if action.nargs == argparse.REMAINDER:  # neither these nor arguments without help are completed
            action.nargs, action.help = "*", "the command and its arguments"
