"""What if a rank were slower, a link, a rail? More hosts, another algorithm?

The step that is changed is described (--preset or --topology, with --model or
--bytes and --compute-seconds) or was recorded (a run directory): then the own
times of all ranks are replayed step by step, over the links that the run
recorded. Several changes are made at once. A difference has its 95% band, is
called extrapolated where no data supports it, and what the run did not show is
named.

exit status: 0 fine, 1 the run cannot be read, 2 usage error.

examples:
  $ ringside what-if --preset dgx-h100 --hosts 16 --bytes 1GB \\
        --compute-seconds 0.25 --slow-rank 3=12%
  $ ringside what-if --preset dgx-a100 --hosts 4 --slow-link 7:8=4 \\
        --html slow-link.html
  $ ringside what-if --preset p5 --hosts 8 --lose-rail 2 \\
        --compute-seconds 0.2 --price 2.5 --watts 700
  $ ringside what-if runs/demo-1 --repair 2
  $ ringside what-if runs/hosts-1 --link-rate 2x --wire-dtype bfloat16
  $ ringside what-if runs/hosts-1 --to-hosts 4 --json
  $ ringside what-if runs/demo-1 --topology probe.json --bucket 50MB --json
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ringside.commands.options import algorithm_name, link_of
from ringside.commands.predict.plan import add_hardware, add_size, gradient_bytes, hardware, hardware_of, write_page
from ringside.errors import UsageError
from ringside.predict.laws.calibrate import Band
from ringside.predict.plan.options import AUTO, option
from ringside.predict.simulation.timeline import Timeline
from ringside.predict.what_if import WIRE_BYTES, Answer, PredictedStep, StepChange, lawful, played, what_if
from ringside.text import size_bytes
from ringside.view.html.predictions import what_if_page
from ringside.view.predict_text import Rates, answer_lines, change_text
from ringside.view.run.recorded import Run
from ringside.view.run.training_step import host_sizes, link_rate, recorded_step
from ringside.view.tui.console import printable_lines

HELP = "what a slow rank or link, or more hosts, would change"
SCHEMA = 1
DEFAULT_BUCKET = 25 * 2**20  # as of DistributedDataParallel
_TIMES = re.compile(r"^([0-9]*\.?[0-9]+)x?$")
_SLOWER = re.compile(r"^(\d+)=([+-]?[0-9.]+)\s*%$")


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    parser.add_argument("run", metavar="DIR", nargs="?", help="a recorded run; else give the hardware")
    add_hardware(parser)
    add_size(parser)
    add = parser.add_argument
    add("--compute-seconds", type=float, metavar="S", help="forward and backward of a step")
    add("--buckets", type=int, metavar="N", help="gradients are reduced in so many pieces (default: of 25 MiB)")
    add("--slow-rank", action="append", default=[], metavar="R=P%", help="rank R works P%% longer: 3=12%%")
    add("--repair", action="append", default=[], type=int, metavar="R", help="rank R is as fast as the others' median")
    add("--slow-link", action="append", default=[], metavar="A:B=X", help="rank A to B is X times slower: 7:8=4")
    add("--lose-rail", action="append", default=[], type=int, metavar="H", help="host H loses a network interface")
    add("--oversubscribe", type=float, metavar="X", help="the network among leaves carries 1/X: 2 for 2:1")
    add("--sharp", action="store_true", help="switches reduce: SHARP between hosts, NVLS inside one")
    add("--bucket", metavar="SIZE", help="of a bucket: 50MB")
    add("--to-hosts", type=int, metavar="N", help="so many hosts instead")
    add("--link-rate", metavar="Xx", help="links between hosts carry X times as much: 2x")
    add("--wire-dtype", metavar="NAME", help=f"between hosts float32 gradients are {', '.join(WIRE_BYTES)}")
    add("--to-algorithm", type=algorithm_name, metavar="NAME", help="another algorithm")
    add("--price", type=float, metavar="X", help="of a rank-hour")
    add("--watts", type=float, metavar="W", help="of a rank")
    add("--html", type=Path, metavar="FILE", help="write a page with both steps drawn")
    add("--json", action="store_true", help="print JSON (keys: docs/json.md)")


def run(args: argparse.Namespace) -> int:
    """Print the difference, and write its page."""
    slower = {}
    for text in args.slow_rank:
        match = _SLOWER.match(text.strip())
        if match is None:
            raise UsageError(f"--slow-rank {text}: a rank and by how much its work grows, such as 3=12%")
        slower[int(match[1])] = float(match[2]) / 100.0
    change = StepChange(
        slower=slower,
        repaired=tuple(args.repair),
        slow_links=tuple(map(link_of, args.slow_link)),
        lost_rails=tuple(args.lose_rail),
        oversubscription=args.oversubscribe,
        sharp=args.sharp,
        bucket_bytes=size_bytes(args.bucket, "--bucket") if args.bucket else None,
        hosts=args.to_hosts,
        algorithm=args.to_algorithm,
        link_rate=None if args.link_rate is None else _times(args.link_rate),
        wire_dtype=args.wire_dtype,
    )
    if change == StepChange():
        raise UsageError(
            "nothing to change: add --slow-rank 3=12%, --slow-link 7:8=4, --lose-rail 0, --to-hosts 32, ..."
        )
    rates = Rates(_rate(args, "price"), _rate(args, "watts"))
    step = step_of(args, change)
    if step.algorithm != AUTO:
        option(lawful(step.topology), step.algorithm)  # raises with a list of what there is
    answer = what_if(step, change)
    # one bucket's collective in the changed step, for the page and `critical_path`
    after = played(answer.after)
    if args.json:
        print(json.dumps(to_json(answer, change, after, rates), indent=1))
    else:
        print(printable_lines("\n".join(answer_lines(answer, change, after, rates))))
    if args.html is not None:
        write_page(args.html, what_if_page(answer, change, (played(answer.before), after), rates))
    return 0


def step_of(args: argparse.Namespace, change: StepChange) -> PredictedStep:
    """Return the step that is to change.

    Raises:
        UsageError: Neither hardware nor a run was named, or they do not fit together.
    """
    if args.run is None:
        topology = hardware(args)
        size, _ = gradient_bytes(args)
        compute = args.compute_seconds
        if compute is not None and not 0 < compute < float("inf"):
            raise UsageError(f"--compute-seconds {compute:g}: seconds of forward and backward, more than 0")
        if args.buckets is not None and args.buckets < 1:
            raise UsageError(f"--buckets {args.buckets}: at least 1")
        own = np.full((1, topology.ranks), compute or 0.0)
        count = args.buckets or max(-(-int(size) // DEFAULT_BUCKET), 1)
        return PredictedStep(topology, size, own, count, args.algorithm)
    if args.bytes or args.model or args.params_from or args.compute_seconds is not None or args.buckets:
        raise UsageError(f"{args.run} gives what it synchronised and computed: omit --bytes and the like")
    run = Run(args.run)
    network = hardware_of(run, args)
    if network is None and not change.of_run and (len(host_sizes(run)) == 1 or not link_rate(run)):
        why = "one host shows no link between hosts" if len(host_sizes(run)) == 1 else "it recorded no link's rate"
        missing = f"missing the network of {args.run}: --preset, or --topology FILE (ringside probe -o)"
        raise UsageError(f"{missing}; {why}")
    return recorded_step(run, network, args.algorithm)


def _times(text: str) -> float:
    match = _TIMES.match(text.strip())
    if match is None:
        raise UsageError(f"--link-rate {text}: how many times what it is now, such as 2x")
    return float(match[1])


def _rate(args: argparse.Namespace, name: str) -> float | None:
    value: float | None = getattr(args, name)
    if value is not None and not 0 <= value < float("inf"):
        raise UsageError(f"--{name} {value:g}: 0 or more")
    return value


# ----------------------------------------------------------------------------------------------- what is printed


def to_json(answer: Answer, change: StepChange, after: Timeline | None, rates: Rates) -> dict[str, Any]:
    """Return the answer as plain data; the keys are those of docs/json.md."""
    step, hours = answer.after, answer.rank_hours_per_day
    return {
        "schema": SCHEMA,
        "what": change_text(change),
        "topology": answer.before.topology.describe(),
        "hosts": step.topology.hosts,
        "ranks": step.topology.ranks,
        "recorded": step.recorded,
        "delta_seconds": asdict(answer.delta),
        "work_delta_seconds": asdict(answer.work_delta),
        "step_seconds": dict(zip(("before", "after"), map(asdict, answer.steps), strict=True)),
        "exposed_seconds": {"before": asdict(answer.left[0].seconds), "after": asdict(answer.left[1].seconds)},
        "buckets": step.buckets,
        "bucket_seconds": _scaled(answer.left[1].bucket, 1.0),
        "rank_hours_per_day": _scaled(hours, 1.0),
        "money_per_day": _scaled(hours, rates.price),
        "kwh_per_day": _scaled(hours, rates.watts and rates.watts / 1e3),
        "extrapolated": list(answer.extrapolated),
        "unseen": list(answer.unseen),
        "critical_path": None
        if after is None
        else {
            "algorithm": after.schedule.name,
            "guilty": after.guilty._asdict(),
            "blamed": [culprit._asdict() for culprit in after.blamed],
            "shares": after.shares,
            "hops": len(after.critical_path),
        },
    }


def _scaled(hours: Band | None, factor: float | None) -> dict[str, float] | None:
    return None if hours is None or factor is None else asdict(Band(*(factor * end for end in hours.ends)))
