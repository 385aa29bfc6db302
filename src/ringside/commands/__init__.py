"""The command line: one module per command, each with `HELP`, `prepare_parser(parser)` and `run(args) -> exit status`.

Exit statuses: 0 fine, 1 the command ran and found something wrong, 2 usage error, 130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from ringside.commands.options import add_processes, add_verbosity, set_verbosity
from ringside.errors import RingsideError, UsageError
from ringside.text import did_you_mean
from ringside.view.tui.console import never_raises, printable_lines

GROUPS = {
    "Watch": ("run", "top", "serve", "report", "compare"),
    "Diagnose": ("doctor", "probe", "nccl-plugin"),
    "Plan": ("predict", "what-if"),
    "Learn and test": ("demo", "draw", "verify", "bench", "lab"),
}
"""The commands, by what a user wants to do."""

VERBS = tuple(verb for verbs in GROUPS.values() for verb in verbs)

DESCRIPTION = "Find out which rank a PyTorch job waits for, since when, why, and what it costs."
EXAMPLE = """\
example:
  $ ringside run -n 2 train.py

`ringside COMMAND --help` says more. Exit status: 0 fine, 1 something is wrong,
2 usage error, 130 interrupted.
"""

SHELLS = ("bash", "zsh", "fish")
COMPLETED = {
    "directory": frozenset({"DIR", "RUN_DIR", "before", "after"}),
    "file": frozenset({"FILE", "TABLE", "PATH", "words", "command"}),
}
"""Arguments that are paths, by what help calls them."""


class Command(Protocol):
    """What a command's module offers; its docstring is the long help: what it does, exit status, examples."""

    HELP: str
    __doc__: str | None

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add this command's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it; return the exit status."""


class _PrintVersion(argparse.Action):
    """Prints the version and what it runs on, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from ringside.installation import describe

        print(describe())
        parser.exit()


class _PrintCompletion(argparse.Action):
    """Prints what makes a shell complete our command line, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, values: object, option: object = "") -> None:
        try:
            print(_completion_script(parser, str(values)))
        except UsageError as error:
            parser.exit(error.exit_status, f"ringside: {error}\n")
        parser.exit()


class _GroupedParser(argparse.ArgumentParser):
    """The parser of `ringside` itself: its help lists the commands in groups."""

    def format_help(self) -> str:
        """Return what `ringside`, `ringside help` and `ringside --help` print."""
        formatter = argparse.HelpFormatter(self.prog)
        formatter.start_section("options")
        formatter.add_arguments([action for action in self._actions if action.option_strings])
        formatter.end_section()
        parts = [f"usage: {self.prog} COMMAND [arguments]", DESCRIPTION]
        for group, verbs in GROUPS.items():
            parts.append("\n".join([f"{group}:", *(f"  {verb:<8} {_module(verb).HELP}" for verb in verbs)]))
        return "\n\n".join([*parts, formatter.format_help().rstrip(), EXAMPLE])


def _module(verb: str) -> Command:
    return cast("Command", importlib.import_module(f"ringside.commands.{verb.replace('-', '_')}"))


def build_parser(verbs: Sequence[str] = VERBS) -> argparse.ArgumentParser:
    """Return the parser for `ringside`, with a sub-parser for each of `verbs`."""
    parser = _GroupedParser(prog="ringside", description=DESCRIPTION)
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print what an issue needs to know, and exit")
    completion_help = "print a completion script for bash, zsh or fish, and exit"
    parser.add_argument("--print-completion", choices=SHELLS, action=_PrintCompletion, help=completion_help)
    subparsers = parser.add_subparsers(
        dest="verb", metavar="COMMAND", required=True, parser_class=argparse.ArgumentParser
    )
    for verb in verbs:
        command = _module(verb)
        sub = subparsers.add_parser(
            verb,
            help=command.HELP,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.prepare_parser(sub)
        sub.set_defaults(command=command, usage_error=sub.error)
    return parser


def _completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script that a shell is to read.

    Args:
        parser: Of the command line.
        shell: bash, zsh or fish.

    Raises:
        UsageError: shtab, which writes it, is not installed.
    """
    from ringside.commands.run import OURS
    from ringside.launch.torchrun import PLACES, SWITCHES

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
            for kind, names in COMPLETED.items():
                if names & {action.metavar, action.dest}:
                    action.complete = kinds[kind]  # type: ignore[attr-defined]
            if action.nargs == argparse.REMAINDER:  # neither these nor arguments without help are completed
                action.nargs, action.help = "*", "the command and its arguments"
    return str(shtab.complete(parser, shell))


def parts_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return a parser's sub-parsers by name."""
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: part for action in found for name, part in action.choices.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    never_raises(sys.stdout)
    never_raises(sys.stderr)
    words = list(sys.argv[1:] if argv is None else argv)
    # `ringside` and `ringside help` are `ringside --help`; `ringside help run` is `ringside run --help`
    if words[:1] in ([], ["help"]):
        words = [*words[1:2], "--help"]
    first = words[0]
    if not first.startswith("-") and first not in VERBS:
        meant = did_you_mean(first, VERBS)
        print(f"ringside: there is no command {first!r}{meant}; `ringside help` lists them", file=sys.stderr)
        return UsageError.exit_status
    # other commands' modules are imported only where they are listed
    args, unknown = build_parser(VERBS if first.startswith("-") else (first,)).parse_known_args(words)
    if unknown:  # argparse itself would show the usage of `ringside`, not of the command
        args.usage_error(f"unrecognized arguments: {' '.join(unknown)}")
    set_verbosity(args.verb, getattr(args, "verbose", 0), quiet=getattr(args, "quiet", False))
    try:
        return cast("Command", args.command).run(args)
    except RingsideError as error:
        # it may quote what somebody else wrote into a file
        print(f"ringside {args.verb}: {printable_lines(str(error))}", file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:
        # The reader of our output went away (`ringside verify | head`): nobody is left to tell.
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print(f"ringside {args.verb}: interrupted", file=sys.stderr)
        return 130
