"""What collectives cost on hardware that is described or was measured, with honest error bars.

`ringside predict score` holds predictions against tables of measurements: your own log of nccl-tests, its JSON, the
output of the OSU micro-benchmarks, or a CSV.

examples:
  $ ringside predict score nccl.log
  $ ringside predict score tables/*.csv --fit-below 16M --json
"""

from __future__ import annotations

import argparse

from ringside.commands import predict_score

HELP = "what collectives cost on hardware that is described or was measured"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands."""
    parts = parser.add_subparsers(dest="part", metavar="PART", required=True)
    for name, part in (("score", predict_score),):
        sub = parts.add_parser(
            name, help=part.HELP, description=part.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        part.prepare_parser(sub)
        sub.set_defaults(part_run=part.run)


def run(args: argparse.Namespace) -> int:
    """Run the sub-command and return its exit status."""
    status: int = args.part_run(args)
    return status
