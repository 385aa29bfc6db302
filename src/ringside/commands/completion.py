"""`ringside --print-completion SHELL`: what makes a shell complete verbs, flags, choices and files."""

from __future__ import annotations

import argparse

from ringside.commands.options import add_processes, add_verbosity
from ringside.commands.run import OURS
from ringside.errors import UsageError
from ringside.launch.torchrun import PLACES, SWITCHES

PATHS = {
    "directory": frozenset({"DIR", "RUN_DIR", "before", "after"}),
    "file": frozenset({"FILE", "TABLE", "PATH", "words", "command"}),
}
"""Arguments that are paths, by what help calls them."""


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
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
        raise UsageError("shell completion needs shtab: pip install 'torch-ringside[completion]'") from None
    # shtab reads the parsers: add what they leave to `take_apart`, and which arguments are paths.
    verbs = parts_of(parser)
    # What `ringside run` parses by itself, and torchrun's flags that need no torch to be known.
    run_parser = verbs["run"]
    run_parser.prefix_chars = "-"
    for flag in OURS:
        run_parser.add_argument(flag, metavar="DIR" if flag == "--run-dir" else "VALUE")
    add_processes(run_parser, "ranks on this node")
    add_verbosity(run_parser)
    for flag in sorted(PLACES):
        run_parser.add_argument(flag, metavar="VALUE", help="as of torchrun")
    for flag in sorted(SWITCHES - {"-h", "--help"}):
        run_parser.add_argument(flag, action="store_true", help="as of torchrun")
    for verb in (*verbs.values(), *parts_of(verbs["predict"]).values()):
        kinds = {"directory": shtab.DIRECTORY, "file": shtab.FILE}
        for action in verb._actions:
            for kind, names in PATHS.items():
                if names & {action.metavar, action.dest}:
                    action.complete = kinds[kind]  # type: ignore[attr-defined]
            if action.nargs == argparse.REMAINDER:  # neither these nor arguments without help are completed
                action.nargs, action.help = "*", "the command and its arguments"
    return str(shtab.complete(parser, shell))


def parts_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return a parser's sub-parsers by name."""
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: part for action in found for name, part in action.choices.items()}
