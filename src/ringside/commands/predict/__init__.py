"""What all-reduce costs on hardware that is described or was measured.

Time, busbw, what bounds it, which algorithm is fastest at which size,
efficiency from one host to N, the best bucket size, the effective batch, and
whether the model fits in a rank's memory at all. A number has its 95% band,
and is called extrapolated where no published table supports it.

`ringside predict score` compares predictions with tables of measurements: your
own log of nccl-tests, its JSON, the output of the OSU micro-benchmarks, or a
CSV. `ringside predict fit` writes your own hardware from such tables, for
--topology. `ringside predict simulate` plays a schedule, with pictures.

exit status: 0 fine, 1 the model fits in no way (score: no table could be
scored), 2 usage error.

examples:
  $ ringside predict --preset dgx-h100 --hosts 16 --model 70B
  $ ringside predict --preset ethernet-10g --hosts 8 --bytes 100MB \\
        --compute-seconds 0.25 --all
  $ ringside predict --system h200 --gpus 8 --nccl 2.29 --model 7B
  $ ringside predict --topology probe.json --bytes 25MiB --json
  $ ringside predict --run runs/demo-1 --topology probe.json --html plan.html
  $ ringside predict fit nccl.log -o fabric.toml
  $ ringside predict --topology fabric.toml --hosts 64 --model 7B
  $ ringside predict simulate ring --preset dgx-h100 --hosts 2 --html ring.html
  $ ringside predict score nccl.log
  $ ringside predict score tables/*.csv --fit-below 16M --json
"""

from __future__ import annotations

import argparse

from ringside.commands.predict import fit, plan, score, simulate

HELP = "what collectives cost on hardware that is described or was measured"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a plan, and the sub-commands."""
    plan.prepare_parser(parser)
    parts = parser.add_subparsers(dest="part", metavar="PART", required=False)
    for name, part in (("fit", fit), ("score", score), ("simulate", simulate)):
        sub = parts.add_parser(
            name, help=part.HELP, description=part.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        part.prepare_parser(sub)
        sub.set_defaults(command=part)


run = plan.run
