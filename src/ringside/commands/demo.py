"""Train a small GPT here, slow one rank down, and see it detected.

A byte-level GPT learns the source of Python's standard library, data-parallel
over local processes that torchrun starts. After a healthy stretch one rank is
made 30% slower, beside the others and before: which one, and when, is revealed
at the end, with what it came to by the records, what was found, and the errors.
How much more work that takes is measured on a copy of the model before the run,
and then fixed. Last, the same training runs over Gloo, in turn with ours.

faults to inject instead; of one that is only named (--inject input) rank and
step are drawn at random:
  slow:rank=1,factor=1.3,from_step=40     more work in forward and backward, by
                                          this factor (not measured before)
  input:rank=1,seconds=0.02,from_step=40  its data loader keeps it waiting
  uneven:rank=1,factor=1.5,from_step=40   larger batches than the others'
  quota:rank=1,cpus=0.6,from_step=40      a CPU quota (needs a cgroup)
  link:rank=0,to=1,factor=4,from_step=80  hosts in the lab, and a link between
                                          two of them that becomes slower (root)
  pause:rank=1,at_step=60,seconds=3       one stall (with every=10: again every
                                          10 steps)
  hang:rank=1,at_step=60                  it never calls the next all-reduce
  stop:rank=1,at_step=60                  SIGSTOP in the middle of a backward
  diverge:rank=1,at_step=60,by=0.01       one number of its model is changed
  kill:rank=1,at_step=60                  SIGKILL in the middle of a backward
  none

With --all five of them run one after the other, some minutes in all: input,
quota, link, pause, diverge. What needs rights that are not there is left out.

With --kill a rank is killed with SIGKILL instead, the others finish the step,
and the rank comes back: every step is a transaction (ringside.survive), and the
demo ends with the number of samples lost.

The last line on stdout is the run directory; with --json stdout is the content
of summary.json with `run_dir` and `reveal` added (with --all: a list of these).

exit status: 0 what was injected was detected (or nothing was, and there is no
verdict), 1 it was not, 2 usage error, 130 after Ctrl-C.

examples:
  $ ringside demo
  $ ringside demo -n 2 --inject slow:rank=1,factor=1.3,from_step=60
  ● rank 1 is 28% slower than the others since step 60.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.padding import Padding
from rich.text import Text

from ringside.commands import demo_kill, demo_link
from ringside.commands.options import add_price, add_processes, add_verbosity, use_price
from ringside.demo.corpus import sources
from ringside.demo.reveal import (
    SIZE,
    comparison_lines,
    draw,
    facts,
    facts_lines,
    has_begun,
    injected,
    reveal,
)
from ringside.demo.size import is_at_bound
from ringside.engine.topology import usable_cores
from ringside.errors import RingsideError, UnsupportedError, UsageError
from ringside.faults import quota
from ringside.faults.inject import KINDS, Fault, Hang, Link, Quota, Slow, Stop, parse_fault
from ringside.files import append_to_file
from ringside.lab import Lab
from ringside.launch.follow import Show, choose_directory, conclude_run, environment, follow_run
from ringside.launch.torchrun import Launch, stop_requests
from ringside.monitor.run.directory import RunReader
from ringside.monitor.run.table import tabulate
from ringside.text import percent
from ringside.view.run.follower import RunFollower, ShownFinding
from ringside.view.terminal import (
    LiveDisplay,
    closing_summary,
    live_picture,
    open_console,
    status_line,
    verdict_line,
)

HELP = "train a small GPT here, slow a rank down, and see it detected"

STEPS = 320
TOUR = ("input", "quota", "link", "pause", "diverge")
BLOCKS = 5
LOG = "torchrun.log"
TITLE = "demo: a byte-level GPT"
STACKS_S = 2.0
"""How long a job that hangs is left alone after it was named, for all stacks to be written."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments."""
    add = parser.add_argument
    add("--inject", metavar="SPEC", help="the fault (default: a slow rank drawn at random)")
    add("--all", action="store_true", help="a tour of five faults")
    add("--kill", action="store_true", help="kill a rank instead, and lose no sample")
    add_processes(parser, "ranks to start (default: cores, at least 2; with --kill and link: 3)")
    add("--steps", type=int, default=STEPS, metavar="N", help=f"at most so many steps (default: {STEPS})")
    add("--run-dir", type=Path, metavar="DIR", help="where to write the run (default: a new one under runs/)")
    add("--seed", type=int, metavar="S", help="fixes what is drawn at random (default: none)")
    add("--corpus", type=Path, metavar="DIR", help="train on the *.py files below DIR (default: Python's own)")
    add("--size", choices=("tiny", "small"), help="size of the model (default: small)")
    add("--no-comparison", action="store_true", help="do not train over Gloo afterwards")
    add_price(parser)
    add("--json", action="store_true", help="print the summary as JSON (keys: docs/json.md)")
    add_verbosity(parser)


def run(args: argparse.Namespace) -> int:
    """Run the demo; return the exit status."""
    use_price(args.price)
    if args.inject is not None and (args.all or args.kill):
        raise UsageError("--all and --kill choose their faults themselves: leave out --inject")
    if args.size is not None and _is_link(args.inject):
        raise UsageError("--inject link has a model of its own size: leave out --size")
    args.size = args.size or "small"
    if args.kill:
        return demo_kill.run(args)
    if args.all:
        return _tour(args)
    status, path, content = demonstrate(args)
    if not args.json:
        print(path)
    elif content is not None:
        print(json.dumps(content, indent=2))
    return status


def _tour(args: argparse.Namespace) -> int:
    """Demonstrate the faults of `TOUR`, one after the other; return the worst exit status."""
    contents, worst = [], 0
    for kind in TOUR:
        folder = args.run_dir and args.run_dir / kind
        one = argparse.Namespace(**{**vars(args), "inject": kind, "no_comparison": True, "run_dir": folder})
        print(f"\n── {kind}", file=sys.stderr)
        try:
            status, path, content = demonstrate(one)
        except UnsupportedError as error:
            print(f"ringside demo: {kind} is left out: {error}", file=sys.stderr)
            continue
        except UsageError:  # what is asked for can be for none of them
            raise
        except RingsideError as error:
            print(f"ringside demo: {kind}: {error}", file=sys.stderr)
            worst = max(worst, 1)
            continue
        worst = max(worst, status)
        if not args.json:
            print(path)
        elif content is not None:
            contents.append(content)
        if status > 128:
            return status
    if args.json:
        print(json.dumps(contents, indent=2))
    return worst


def demonstrate(args: argparse.Namespace) -> tuple[int, Path, dict[str, Any] | None]:
    """Train with a fault and tell what became of it.

    Returns:
        The exit status, the run directory, and what is printed as JSON; None where the run has no summary.
    """
    # 1. What is to go wrong, and what is trained.
    least = demo_link.HOSTS if _is_link(args.inject) else 2
    ranks = max(usable_cores(), least) if args.nproc_per_node is None else args.nproc_per_node
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    fault = _choose_fault(args, ranks, seed)
    sources(args.corpus)
    path, warning = choose_directory(args.run_dir, "demo")
    display = LiveDisplay(quiet=args.quiet)
    show = _Show(display)
    if warning:
        display.print(f"ringside demo: {warning}")
    log = _Log(path)
    variables = {**environment(path), "OMP_NUM_THREADS": str(max(usable_cores() // ranks, 1)), "RINGSIDE": ""}
    is_calibrated = KINDS.get(args.inject or "slow") is Slow
    if is_calibrated and not args.quiet:
        display.print("First a copy of the model is trained: how much more work makes a rank so much slower?")
    command = _training_command(args, ranks, seed, fault, is_calibrated)

    # 2. The training, followed as it goes.
    began: list[int] = []
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_requests())
        stack.enter_context(display)
        shown: Show = show
        if isinstance(fault, Link):
            lab = stack.enter_context(Lab(hosts=ranks, rate=demo_link.RATE, wiring="mesh"))
            launch: Launch = demo_link.LabLaunch(lab, command, variables, log.add)
            shown = demo_link.slowing_link(lab, fault, show, began)
        else:
            launch = Launch(command, variables, sink=log.add)
        status = follow_run(launch, path, stop, _ending_hangs(launch, fault, shown))
    if isinstance(fault, Quota):
        quota.remove_leftovers()

    # 3. Its end: there may be nothing to show.
    extra: dict[str, Any] = {"comparison": show.run.comparison or None}
    if not stop.signum:
        fault = _as_fixed(fault, path, began)
        extra["injected"] = injected(fault)
    concluded = conclude_run(path, [] if stop.signum else launch.deaths, extra)
    if stop.signum:
        record = "nothing was recorded in" if concluded is None else "what was recorded is in"
        print(f"ringside demo: stopped, all ranks have ended; {record} {path}", file=sys.stderr)
        return stop.exit_status, path, None
    if concluded is None and not status:
        print(f"ringside demo: the training ended well, but its record in {path} is gone or not whole", file=sys.stderr)
        return 1, path, None
    if concluded is None or (status and not launch.deaths):
        raise RingsideError(f"the training failed with exit status {status}:\n{log.tail()}")
    summary, verdicts = concluded

    # 4. What happened, and whether it is what was injected.
    reached = bool(began) if isinstance(fault, Link) else has_begun(fault, verdicts, summary["steps"])
    right, outcome = reveal(fault, verdicts, reached)
    console = open_console(stderr=args.json)
    console.print(closing_summary(summary, verdicts))
    console.print()
    console.print(Text(outcome, style="bold green" if right else "bold yellow"))
    found = facts(fault, verdicts, tabulate(RunReader(path).iterate(), summary["world_size"]))
    for line in facts_lines(found):
        console.print(line, soft_wrap=True, markup=False)
    if is_calibrated and isinstance(fault, Slow) and is_at_bound(fault.factor, SIZE):
        bound = f"the factor {fault.factor:.2f} is as far as it goes, so {percent(SIZE)} may be missed"
        console.print(f"  By the calibration {bound}.", soft_wrap=True)
    if loss := summary.get("loss"):
        console.print(f"Loss {loss['first']:.2f} → {loss['last']:.2f} nats per byte in {summary['steps']} steps.")
    for line in comparison_lines(summary.get("comparison") or {}):
        console.print(line, soft_wrap=True)
    if status and (fault is None or fault.kind not in ("kill", "hang", "stop")):
        console.print(Text(f"The training ended with exit status {status}:\n{log.tail()}", style="yellow"))
        right = False
    console.print(f"\nreport   {path / 'report.html'}\nsummary  {path / 'summary.json'}", soft_wrap=True)
    return int(not right), path, {**summary, "run_dir": str(path), "reveal": found}


def _choose_fault(args: argparse.Namespace, ranks: int, seed: int) -> Fault | None:
    """Return the fault that is asked for, or one drawn at random; None: none is injected.

    Raises:
        UsageError: There is none like that, or there are too few ranks or steps.
        UnsupportedError: It cannot be injected on this machine.
    """
    if ranks < 1:
        raise UsageError(f"a demo needs at least 1 rank, not {ranks}; a straggler needs 2")
    if ranks < 2 or args.steps < 1:
        raise UsageError("the demo takes at least 2 ranks (-n) and 1 step (--steps)")
    kind = KINDS.get(args.inject or "slow")
    fault = parse_fault(args.inject, ranks) if kind is None else draw(seed, ranks, args.steps, kind)
    if isinstance(fault, Quota) and (why := quota.unavailable()):
        raise UnsupportedError(why)
    if isinstance(fault, Link) and (why := Lab.unavailable()):
        raise UnsupportedError(why)
    return fault


def _training_command(
    args: argparse.Namespace, ranks: int, seed: int, fault: Fault | None, is_calibrated: bool
) -> list[str]:
    """Return the arguments for torchrun."""
    more = [f"--steps={args.steps}", f"--inject={fault or 'none'}"]
    if isinstance(fault, Link):  # hosts share this machine's cores, and a step is to wait for links
        args = argparse.Namespace(**{**vars(args), "size": "light"})
    elif not args.no_comparison:
        more.append(f"--compare={BLOCKS}")
    if is_calibrated:
        more.append(f"--calibrate-to={SIZE}")
    return demo_kill.training_command(args, ranks, seed, "-m", "ringside.demo.train", *more)


def _as_fixed(fault: Fault | None, path: Path, began: Sequence[int]) -> Fault | None:
    """Return a fault with the factor that its calibration came to, or the step at which a link became slow."""
    if isinstance(fault, Link) and began:
        return replace(fault, from_step=began[0])
    with contextlib.suppress(RingsideError):  # nothing was recorded
        for event in RunReader(path).poll_events():
            if event["kind"] == "calibrated" and isinstance(fault, Slow):
                return replace(fault, factor=event["factor"])
    return fault


def _is_link(spec: str | None) -> bool:
    return (spec or "").partition(":")[0] == "link"


def _ending_hangs(launch: Launch, fault: Fault | None, show: Show) -> Show:
    """Return `show` that also ends the job a little after a hang that was asked for was named."""
    named: list[float] = []

    def show_and_end(run: RunFollower, found: list[ShownFinding]) -> None:
        show(run, found)
        if isinstance(fault, Hang | Stop) and any(f.verdict.kind == "hang" for f in found):
            named.append(time.monotonic())
        if named and time.monotonic() - named[0] > STACKS_S:
            named.clear()
            launch.end(signal.SIGTERM)

    return show_and_end


class _Show:
    """Shows the run as it goes: the live picture, or verdicts and a line now and then."""

    def __init__(self, display: LiveDisplay) -> None:
        self.run = RunFollower()
        self._display, self._began = display, time.monotonic()

    def __call__(self, run: RunFollower, found: list[ShownFinding]) -> None:
        self.run = run
        elapsed, width = time.monotonic() - self._began, self._display.console.width
        for finding in () if self._display.is_drawn else found:
            self._display.print(f"● {verdict_line(finding)}")
        self._display.show(
            lambda: status_line(run, elapsed), lambda: Padding(live_picture(run, TITLE, elapsed, width - 2), (0, 1))
        )


class _Log:
    """What torchrun and the ranks wrote: kept in the run directory, and its end here."""

    def __init__(self, path: Path) -> None:
        self._path = path / LOG
        self._lines: deque[str] = deque(maxlen=30)

    def add(self, line: str) -> None:
        """Keep one line."""
        self._lines.append(line)
        with contextlib.suppress(OSError):  # the disk is full: training goes on
            append_to_file(self._path, f"{line}\n".encode(errors="replace"))

    def tail(self) -> str:
        """Return its last lines."""
        return "\n".join(f"  {line}" for line in self._lines)
