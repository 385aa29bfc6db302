"""What several commands share: their options, and writing the file that an option names."""

from __future__ import annotations

import argparse
import logging
import os
import re
from pathlib import Path

from ringside.errors import RingsideError, UsageError
from ringside.files import write_user_file
from ringside.monitor.price import RATE, hourly_rate

_LINK = re.compile(r"^(\d+)[:>](\d+)=([0-9.]+)x?$")


def add_processes(parser: argparse.ArgumentParser, help_text: str) -> None:
    """Add `-n`, and torchrun's spellings, to a command that starts ranks on this machine; None where not given."""
    parser.add_argument("-n", "--nproc-per-node", "--nproc_per_node", type=int, metavar="N", help=help_text)


def host_count(text: str) -> int:
    """Return the number of hosts that `--hosts` stands for.

    Raises:
        argparse.ArgumentTypeError: It is none; a list of hosts of unequal size is for another option.
    """
    try:
        return int(text)
    except ValueError:
        hint = "for hosts of unequal size: --ranks-per-host 3,2,4"
        raise argparse.ArgumentTypeError(f"{text!r} is no number of hosts; {hint}") from None


def algorithm_name(text: str) -> str:
    """Return an algorithm's name as the registry spells it: `Two-Tree` is two_tree."""
    return text.lower().replace("-", "_")


def link_of(text: str) -> tuple[int, int, float]:
    """Return (sender, receiver, times) of `7:8=4`; raise `UsageError` for anything else."""
    match = _LINK.match(text.strip())
    if match is None:
        raise UsageError(f"--slow-link {text}: from rank, to rank, and how many times slower, such as 7:8=4")
    return int(match[1]), int(match[2]), float(match[3])


def add_price(parser: argparse.ArgumentParser) -> None:
    """Add `--price` to a command that tells what verdicts cost; see `ringside.monitor.price`."""
    help_text = "what an hour of one rank costs, in your currency: costs in money too"
    parser.add_argument("--price", type=rate_of, metavar="RATE", help=help_text)


def rate_of(text: str) -> float:
    """Return the rate that `--price` gives.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    try:
        return hourly_rate(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate; give for example 2.5") from None


def use_price(rate: float | None) -> None:
    """Tell prices in money from here on, in this process and in those that it starts, where a rate was given.

    Raises:
        UsageError: None was, and the environment's is none.
    """
    if rate is not None:
        os.environ[RATE] = repr(rate)
    elif text := os.environ.get(RATE):
        try:
            rate_of(text)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"{RATE}: {error}") from None


def add_verbosity(parser: argparse.ArgumentParser) -> None:
    """Add `-v` and `-q` to a command that logs or shows progress."""
    how = parser.add_mutually_exclusive_group()
    how.add_argument("-v", "--verbose", action="count", default=0, help="log more on stderr; -vv: for debugging")
    how.add_argument("-q", "--quiet", action="store_true", help="no progress, no warnings: only results and errors")


def set_verbosity(verb: str, verbose: int, *, quiet: bool) -> None:
    """Set from which level on messages of the loggers `ringside.*` are shown: warnings, or what -v and -q say.

    Args:
        verb: The command, which begins each line on stderr.
        verbose: How often -v was given.
        quiet: Only errors.
    """
    logging.basicConfig(format=f"ringside {verb}: %(message)s")
    level = logging.ERROR if quiet else {0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG)
    logging.getLogger("ringside").setLevel(level)


def write_output(path: Path, text: str, error: type[RingsideError] = RingsideError) -> None:
    """Write a text to the file that the user named; raise `error` where that fails."""
    try:
        write_user_file(path, text)
    except OSError as failure:
        raise error(f"cannot write {path}: {failure.strerror}") from failure
