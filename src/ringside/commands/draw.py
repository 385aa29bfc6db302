"""Draw an algorithm: who sends which chunk to whom in every round, and what every chunk already contains.

Writes one HTML file that steps and plays through the rounds and needs nothing else (arrow keys, space, #round=3).
The last line on stdout is its path.

example:
  $ ringside draw ring -n 4
  ring-4.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ringside.errors import RingsideError
from ringside.schedule import ALGORITHMS, by_name
from ringside.view.drawing import refuse_crowds, schedule_html
from ringside.view.drawing_words import schedule_text

HELP = "draw an algorithm as a picture that steps through its rounds"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    parser.add_argument("algorithm", metavar="ALGO", help=f"one of {', '.join(ALGORITHMS)}")
    parser.add_argument("-n", "--ranks", type=int, required=True, metavar="N", help="number of ranks, at most 64")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="the file to write (default: ALGO-N.html)")
    parser.add_argument("--text", action="store_true", help="print it for the terminal instead")


def run(args: argparse.Namespace) -> int:
    """Write the picture and print its path, or print the terminal form."""
    schedule = by_name(args.algorithm, args.ranks)
    refuse_crowds(schedule)
    if args.text:
        _deliver(schedule_text(schedule), args.output)
    else:
        _deliver(schedule_html(schedule), args.output or Path(f"{schedule.name}-{schedule.ranks}.html"))
    return 0


def _deliver(content: str, output: Path | None) -> None:
    if output is None:
        print(content, end="")
        return
    try:
        output.write_text(content, encoding="utf-8")
    except OSError as error:
        raise RingsideError(f"cannot write {output}: {error.strerror}") from error
    print(output)
