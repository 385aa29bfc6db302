"""`ringside demo --kill`: a rank is killed with SIGKILL, the others finish the step, another takes its place.

The killing is real and comes from outside: this process sends the signal to a worker that the keepers hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from ringside.demo.corpus import sources
from ringside.engine.topology import usable_cores
from ringside.errors import RingsideError, UsageError
from ringside.launch.torchrun import Launch, StopRequest, stop_requests, wait_or_stop
from ringside.processes import hold
from ringside.text import duration, name_ranks
from ringside.view.terminal import LiveDisplay

MARK = "@survival "
SETTLED = 15
"""Steps before anybody is killed."""
POLL_S = 0.05


@dataclass
class KillStory:
    """What the workers have reported so far.

    Args:
        ranks: How many there are.

    Attributes:
        pids: The worker of every rank.
        killed_at: When the kill was sent, seconds on the host's clock; 0: not yet.
        healed_s: From the kill to the next committed step, seconds.
        ends: What each rank reported at the end.
        news: Lines that were not shown yet.
    """

    ranks: int
    victim: int = -1
    pids: dict[int, int] = field(default_factory=dict)
    step: dict[str, Any] = field(default_factory=dict)
    killed_at: float = 0.0
    healed_s: float = 0.0
    back: bool = False
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)
    news: list[str] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        """Read a line that torchrun or a worker wrote."""
        if not line.startswith(MARK):
            self.tail = [*self.tail[-29:], line]
            self.news += [line.removeprefix("ringside survive: ")] if line.startswith("ringside survive: ") else []
            return
        event = json.loads(line.removeprefix(MARK))
        if event["event"] == "step":
            self._add_step(event)
        elif event["event"] == "end":
            self.ends[event["rank"]] = event
        elif event["event"] == "up":
            self.pids[event["rank"]] = event["pid"]
            if event["joined"]:
                self.news.append(f"rank {event['rank']} has been started again and asks to join")

    def _add_step(self, event: dict[str, Any]) -> None:
        """A step was committed: the first without the victim heals the job, the first with it brings it back."""
        if self.step and event["step"] <= self.step["step"]:
            return
        self.step = event
        whole = len(event["members"]) == self.ranks
        if self.killed_at and not self.healed_s and event["at"] > self.killed_at and not whole:
            self.healed_s = event["at"] - self.killed_at
            others = name_ranks(event["members"])
            self.news.append(
                f"step {event['step']} is committed {duration(self.healed_s)} after the kill: {others} computed "
                f"rank {self.victim}'s samples too"
            )
        if self.healed_s and whole and not self.back:
            self.back = True
            self.news.append(f"rank {self.victim} is back since step {event['step']}, with everybody's state")

    def line(self) -> str:
        """Return where training is, in one line."""
        if not self.step:
            return "the ranks are starting"
        step = self.step
        return f"step {step['step']:4}  loss {step['loss']:.3f}  {name_ranks(step['members'])}"


def run(args: argparse.Namespace) -> int:
    """Run the demo; return the exit status."""
    ranks = max(usable_cores(), 3) if args.nproc_per_node is None else args.nproc_per_node
    if ranks < 2 or args.steps < 2 * SETTLED:
        raise UsageError(f"--kill takes at least 2 ranks (-n) and {2 * SETTLED} steps (--steps)")
    sources(args.corpus)
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    story = KillStory(ranks, victim=random.Random(seed).randrange(ranks))
    display = LiveDisplay(quiet=args.quiet)
    console = display.console
    environ = {**os.environ, "OMP_NUM_THREADS": str(max(usable_cores() // ranks, 1))}
    with stop_requests() as stop, display:
        script = ("-m", "ringside.survive", "-m", "ringside.demo.survive", f"--steps={10 * args.steps}")
        launch = Launch(training_command(args, ranks, seed, *script), environ, sink=story.add)
        status = _follow(launch, story, display, stop)
    if stop.signum:
        return stop.exit_status
    if status or not story.ends:
        raise RingsideError(f"the training failed with exit status {status}:\n" + "\n".join(story.tail))
    end = next(iter(story.ends.values()))
    digests = {each["digest"] for each in story.ends.values()}
    lost, twice = (max(each[name] for each in story.ends.values()) for name in ("lost", "twice"))
    right = bool(story.healed_s) and story.back and not lost and not twice and len(digests) == 1
    style = "bold green" if right else "bold yellow"
    console.print(Text(f"samples trained: {end['samples']}, lost: {lost}, steps counted twice: {twice}", style=style))
    same = "the same" if len(digests) == 1 else "NOT the same"
    console.print(f"The state of all {len(story.ends)} ranks is {same} to the bit ({', '.join(sorted(digests))}).")
    if args.json:
        summary = {"killed": story.victim, "seconds": story.healed_s, "lost": lost, "twice": twice, "back": story.back}
        print(json.dumps({**summary, "samples": end["samples"], "digests": sorted(digests)}, indent=2))
    else:
        print(f"samples lost: {lost}")
    sys.stdout.flush()
    return 0 if right else 1


def training_command(args: argparse.Namespace, ranks: int, seed: int, *script: str) -> list[str]:
    """Return what torchrun is given: the ranks, all on this host, and the script with what every training takes."""
    corpus = [f"--corpus={args.corpus}"] if args.corpus else []
    launcher = ("--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}")
    return [*launcher, *script, f"--seed={seed}", f"--size={args.size}", *corpus]


def _follow(launch: Launch, story: KillStory, display: LiveDisplay, stop: StopRequest) -> int:
    status: int | None = None
    while status is None:
        status = wait_or_stop(launch, POLL_S, stop)
        # Once training has settled the victim is killed from outside, as a real failure would.
        settled = story.step and story.step["step"] >= SETTLED and story.victim in story.pids
        if settled and not story.killed_at and (process := hold(story.pids[story.victim])) is not None:
            story.news.append(f"rank {story.victim} is killed (SIGKILL) during step {story.step['step'] + 1}")
            story.killed_at = time.monotonic()
            process.send(signal.SIGKILL)
            process.close()
        while story.news:
            display.print(f"● {story.news.pop(0)}")
        display.show(story.line)
    return status
