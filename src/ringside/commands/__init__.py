"""The command line: one module per verb, each with `HELP`, `prepare_parser(parser)` and `run(args) -> exit status`.

Exit statuses: 0 fine, 1 the command ran and found something wrong, 2 it was asked for something that cannot be,
130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from ringside.errors import RingsideError, UsageError
from ringside.view.tui.console import never_raises, printable_lines

VERBS = (
    "demo",
    "run",
    "report",
    "top",
    "compare",
    "serve",
    "bench",
    "verify",
    "draw",
    "lab",
    "probe",
    "doctor",
    "predict",
    "what-if",
)

SHELLS = ("bash", "zsh", "fish")


class Command(Protocol):
    """What a verb's module offers; its docstring is the long help and holds an example."""

    HELP: str
    __doc__: str | None

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add this verb's arguments."""

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
        from ringside.commands.completion import completion_script

        try:
            print(completion_script(parser, str(values)))
        except UsageError as error:
            parser.exit(error.exit_status, f"ringside: {error}\n")
        parser.exit()


def build_parser(verbs: Sequence[str] = VERBS) -> argparse.ArgumentParser:
    """Return the parser for `ringside`, with a sub-parser for each of `verbs`."""
    parser = argparse.ArgumentParser(
        prog="ringside", description="A ringside seat for gradient synchronisation: run it, see it, predict it."
    )
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print what an issue needs to know, and exit")
    parser.add_argument("--print-completion", choices=SHELLS, action=_PrintCompletion, help="for a shell to read")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in verbs:
        # a verb is a module of the same name
        command = cast("Command", importlib.import_module(f"ringside.commands.{verb.replace('-', '_')}"))
        sub = subparsers.add_parser(
            verb,
            help=command.HELP,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.prepare_parser(sub)
        sub.set_defaults(command=command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    never_raises(sys.stdout)
    never_raises(sys.stderr)
    args = build_parser().parse_args(argv)
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
