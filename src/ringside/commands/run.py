"""Monitor a DistributedDataParallel script without changing it.

Takes torchrun's flags and passes them on as they are, with - or _ in their
names; a module is started with -m. Without a number of ranks one per core is
started (per GPU where there are some), and without a meeting place, by a flag
or by torchrun's PET_ variables, the ranks meet on this host (--standalone).
Every DistributedDataParallel model that the script makes is attached.

Verdicts appear on stderr as they are reached. The node of rank 0 records the
run and prints the table of ranks at the end; there the last line on stdout is
the run directory.

options of ours, before the script:
  -n N, --nproc-per-node N
                         ranks on this node (default: cores, or GPUs)
  --run-dir DIR          where to write the run (default: a new one under runs/)
  --on-verdict HOOK      send every verdict to a URL (JSON by POST) or a command
                         (JSON on stdin), and again when it is resolved
  --digest-every STEPS   compare all ranks' parameters to the bit every so many
                         steps; 0: never (default: 100)
  --as-gloo              have Ringside serve the process groups that the script
                         makes by the name gloo (RINGSIDE_AS_GLOO=1)
  --nccl                 have NCCL (2.27 or newer) record its collectives by our
                         plugin, and say who was late in them: its host, its GPU
                         or a link (ranks of this host; docs/nccl.md)
  --survive              start a keeper per rank, which starts its worker again
                         when it dies: for scripts that train with
                         ringside.survive.training; nothing is recorded
  --price RATE           what an hour of one rank costs, in your currency: costs
                         are told in money too (default: RINGSIDE_PRICE)
  --metrics-port PORT    serve Prometheus metrics for this host (default: no);
                         ADDRESS:PORT for others needs RINGSIDE_METRICS_TOKEN
  -v, --verbose          log more on stderr; -vv: for debugging
  -q, --quiet            only verdicts and errors, and the run directory

RINGSIDE_ENGINE=native only watches: gradients stay with the process group. All
variables: docs/environment.md.

exit status: torchrun's, 2 usage error, 130 after Ctrl-C.

examples:
  $ ringside run -n 2 train.py --epochs 3
  ringside run: watching 2 ranks, recording to runs/run-...
  ● rank 1 is 28% slower than the others since step 60: ...
  $ ringside run --nnodes 2 --node-rank 0 -n 8 --master-addr node0 \\
        --master-port 29500 train.py       # and with --node-rank 1 on the other
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from ringside import _core
from ringside.commands.options import rate_of, set_verbosity, use_price
from ringside.engine.topology import usable_cores
from ringside.errors import UsageError
from ringside.files import replace_file
from ringside.launch.follow import ASKED, Show, choose_directory, conclude_run, environment, follow_run
from ringside.launch.torchrun import RANKS, CommandLine, Launch, parse_command_line, stop_requests, wait_or_stop
from ringside.monitor.alerts.live import METRICS_PORT, ON_VERDICT, AlertSettings, notify_afterwards
from ringside.monitor.nccl.report import FILE, NcclReport, blame_line, report_lines
from ringside.monitor.nccl.ring import FOLDER, FOLDER_VARIABLE
from ringside.monitor.nccl.watch import PLUGIN_VARIABLE, NcclWatch, make_folder, plugin_of_user, remove_left
from ringside.monitor.replicas import DIGEST_EVERY, digest_steps
from ringside.monitor.run.directory import RUN
from ringside.processes import Death
from ringside.text import counted, name_ranks
from ringside.view.run.follower import RunFollower, ShownFinding
from ringside.view.terminal import closing_summary, open_console, verdict_line

HELP = "watch an unmodified DDP script, started as by torchrun"

ALERTS = {"--on-verdict": ON_VERDICT, "--metrics-port": METRICS_PORT}
OURS = ("--run-dir", "--digest-every", "--price", *ALERTS)
VERBOSE = {"-v": 1, "--verbose": 1, "-vv": 2}
QUIET = ("-q", "--quiet")
NCCL = "--nccl"
SURVIVE = "--survive"
AS_GLOO = "--as-gloo"
AUTOLOAD = Path(__file__).parents[1] / "autoload"
_POLL_S = 0.2
_NCCL_POLL_S = 0.25
_NCCL_WRITE_S = 4.0
_NCCL_SILENT_S = 60.0
_log = logging.getLogger(__name__)


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add this verb's arguments: all words are taken as they are, for most of them are torchrun's or the script's."""
    parser.usage = (
        "ringside run [-n N] [--run-dir DIR] [--on-verdict HOOK]\n"
        "                    [--digest-every STEPS] [--as-gloo] [--nccl] [--survive]\n"
        "                    [--price RATE] [--metrics-port PORT] [-v | -q]\n"
        "                    [torchrun flags] train.py [arguments]"
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(print_help=parser.print_help)
    parser.prefix_chars = "\0"  # from here on no word is a flag of ours to argparse


def run(args: argparse.Namespace) -> int:
    """Run the script and watch it; return torchrun's exit status."""
    if args.words[:1] in (["-h"], ["--help"]):
        args.print_help()
        return 0
    line = parse_command_line(args.words, ours=OURS, switches=(AS_GLOO, NCCL, SURVIVE, *VERBOSE, *QUIET))
    quiet = not line.ours.keys().isdisjoint(QUIET)
    set_verbosity("run", max((VERBOSE.get(flag, 0) for flag in line.ours), default=0), quiet=quiet)
    line.check_script()
    line.check_ranks()
    try:
        use_price(rate_of(line.ours["--price"]) if "--price" in line.ours else None)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--price: {error}") from None
    if AS_GLOO in line.ours:
        os.environ["RINGSIDE_AS_GLOO"] = "1"
    if SURVIVE in line.ours:
        return run_surviving(line)
    alerts = {name: line.ours[flag] for flag, name in ALERTS.items() if flag in line.ours}
    if "--digest-every" in line.ours:
        alerts[DIGEST_EVERY] = str(digest_steps(line.ours["--digest-every"]))
    hooks = AlertSettings.read({**os.environ, **alerts}).hooks
    run_dir = line.ours.get("--run-dir")
    path, warning = choose_directory(Path(run_dir) if run_dir else None, "run")
    if warning:
        _print_line(warning)
    if not quiet and os.access(path, os.W_OK):
        _print_line(start_line(line, path))
    nccl = None
    with stop_requests(line.signals_to_handle) as stop:
        # Python starts with our sitecustomize before the script's own path.
        variables = environment(path)
        before = variables.get("PYTHONPATH")
        variables["PYTHONPATH"] = str(AUTOLOAD) + (os.pathsep + before if before else "")
        variables["RINGSIDE_AUTOLOAD"] = "1"
        # nodes may share the run directory: one of them tells
        show = _ignore if line.is_without_rank_0 else _show
        try:
            command = line.with_defaults(_processes())
            nccl = NcclRecording.begin(path) if NCCL in line.ours else None
            _log.info("starting: torchrun %s", shlex.join(command))
            launch = Launch(command, {**variables, **alerts, **(nccl.variables if nccl else {})})
            status = follow_run(launch, path, stop, nccl.shown_beside(show) if nccl else show)
        finally:
            recorded = nccl.end() if nccl else None
    if recorded is not None and (recorded.blames or not quiet):
        for text in report_lines(recorded):
            _print_line(text)
    ranks = sorted({death.rank for death in launch.deaths})
    failed = failure_line(launch.deaths) if status and not stop.signum else ""
    if ranks and 0 not in ranks:
        if nccl is not None and recorded is not None and nccl.write(recorded, is_of_rank_0=False):
            _print_line(f"NCCL's records of this host: {nccl.written}")
        with contextlib.suppress(OSError):
            path.rmdir()
        _print_line(f"the run is recorded on the host of rank 0; here ran {name_ranks(ranks)}")
        if failed:
            _print_line(failed)
        return status
    if nccl is not None and recorded is not None:
        nccl.write(recorded, is_of_rank_0=True)  # before the summary, which reads it
    with notify_afterwards(hooks, path):
        concluded = conclude_run(path, () if stop.signum else launch.deaths)
    if concluded is not None and not quiet:
        console = open_console(stderr=True)
        console.print()
        console.print(closing_summary(*concluded))
        console.print(f"\nreport   {path / 'report.html'}\nsummary  {path / 'summary.json'}", soft_wrap=True)
    elif not (path / RUN).exists():
        _print_line("nothing was recorded: no rank made a DistributedDataParallel model and trained it")
    if failed and not (concluded and any(verdict.kind == "dead_rank" for verdict in concluded[1])):
        _print_line(failed)
    print(path)
    return status


def run_surviving(line: CommandLine) -> int:
    """Run a script that trains with `ringside.survive.training`, a keeper per rank; return torchrun's exit status.

    Raises:
        UsageError: It asks for what is not done here.
    """
    others = sorted(line.ours.keys() - {AS_GLOO, SURVIVE, *VERBOSE, *QUIET})
    if others:
        raise UsageError(f"{SURVIVE} records nothing yet: leave out {', '.join(others)}")
    # A keeper takes the script's place in torchrun's command line, and is given the script.
    module = ["-m"] if line.names & {"-m", "--module"} else []
    flags = [flag for flag in line.flags if flag not in ("-m", "--module")]
    script = ("ringside.survive", *module, *line.script)
    line = replace(line, flags=(*flags, "-m"), names=line.names | {"-m"}, script=script)
    status: int | None = None
    with stop_requests() as stop:
        launch = Launch(line.with_defaults(_processes()), os.environ)
        while status is None:
            status = wait_or_stop(launch, _POLL_S, stop)
    return status


class NcclRecording:
    """The records of NCCL's collectives, from before the ranks start until they have ended.

    Args:
        folder: Where the ranks' rings are.
        plugin: Ours.
        run_dir: The run directory; while it is recorded there, what NCCL told is written beside it.

    Attributes:
        variables: What the ranks need.
        written: The file that was written; None: none yet.
    """

    def __init__(self, folder: Path, plugin: Path, run_dir: Path) -> None:
        self._folder, self._run_dir = folder, run_dir
        self._watch = NcclWatch(folder)
        self._began = self._next = self._next_write = time.monotonic()
        self.written: Path | None = None
        self._is_silent = True  # nothing was recorded, and nothing said of it
        self._named: set[tuple[str, int, int]] = set()
        self.variables = {PLUGIN_VARIABLE: str(plugin), FOLDER_VARIABLE: str(folder)}

    @classmethod
    def begin(cls, run_dir: Path) -> NcclRecording | None:
        """Have the ranks' NCCL record; None, and a line that says why, where it cannot.

        Args:
            run_dir: The run directory.
        """
        users, where = plugin_of_user(os.environ)
        if users:
            said = "" if PLUGIN_VARIABLE in os.environ else f" in {where}"
            _print_line(f"{PLUGIN_VARIABLE} is {users}{said} and NCCL opens one plugin: --nccl records nothing")
            return None
        plugin = _core.nccl_plugin()
        folder = Path(os.environ.get(FOLDER_VARIABLE) or FOLDER)
        try:
            remove_left(folder)
            return cls(make_folder(folder), plugin, run_dir)
        except OSError as error:
            _print_line(f"--nccl records nothing: there is no shared memory ({error})")
            return None

    def shown_beside(self, show: Show) -> Show:
        """Return what reads the records whenever a run is shown."""

        def show_both(run: RunFollower, found: list[ShownFinding]) -> None:
            show(run, found)
            if time.monotonic() >= self._next:
                self._poll()

        return show_both

    def _poll(self) -> None:
        now = time.monotonic()
        self._next = now + _NCCL_POLL_S
        is_due = self._watch.is_due(now)
        if is_due:
            self._watch.poll()
        if is_due and self._watch.records and now >= self._next_write and (self._run_dir / RUN).exists():
            self._next_write = now + _NCCL_WRITE_S
            self.write(self._watch.report(), is_of_rank_0=0 in self._watch.global_ranks)
        for blame in self._watch.blames() if is_due and now > self._began + _NCCL_SILENT_S else ():
            if (key := (blame.cause, blame.rank, blame.peer)) not in self._named:
                self._named.add(key)
                _print_line(f"● {blame_line(blame)}")
        if self._watch.records:
            self._is_silent = False
        elif self._is_silent and now > self._began + _NCCL_SILENT_S:
            self._is_silent = False
            _print_line(f"NCCL has recorded nothing in the first minute: {self._watch.why_silent(os.environ)}")

    def write(self, report: NcclReport, *, is_of_rank_0: bool) -> bool:
        """Write what was told into the run directory, which several hosts may share; return whether that was possible.

        Args:
            report: It.
            is_of_rank_0: Whether rank 0 is on this host.
        """
        path = self._run_dir / (FILE if is_of_rank_0 else f"{Path(FILE).stem}-{socket.gethostname()}.json")
        try:
            replace_file(path, msgspec.json.encode(report))
            if self.written is not None and self.written != path:
                self.written.unlink(missing_ok=True)
        except OSError:
            return False
        self.written = path
        return True

    def end(self) -> NcclReport:
        """Read what is left; return what came of it."""
        try:
            self._watch.poll(is_last=True)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._is_silent and not self._watch.records:
            _print_line(f"NCCL has recorded nothing: {self._watch.why_silent(os.environ)}")
        return self._watch.report()


def start_line(line: CommandLine, path: Path) -> str:
    """Return what is said before the ranks start: who is watched, where the run is recorded, how to look.

    Args:
        line: The command line.
        path: The run directory.
    """
    count = line.value(RANKS) or _processes()
    nodes = line.value("--nnodes") or "1"
    # torchrun counts GPUs and cores by itself
    watching = f"watching {counted(int(count), 'rank') if count.isdecimal() else 'all ranks'}"
    where = shlex.quote(str(path))
    live = f"live: ringside top {where}, or ringside serve {where}"
    if nodes in ("1", "1:1"):
        return f"{watching}, recording to {where} ({live})"
    if line.is_without_rank_0:
        return f"{watching} on this node; the node of rank 0 records"
    if line.value("--node-rank") == "0":
        return f"{watching} on this node, recording all to {where} ({live})"
    return f"{watching} on this node; if rank 0 is here, recording to {where} ({live})"


def failure_line(deaths: Sequence[Death]) -> str:
    """Return which of a node's ranks failed first, where that is known; the record knows little of other nodes' ranks.

    Args:
        deaths: The node's ranks that ended, first to last.
    """
    first = next((death for death in deaths if death.status != 0), None)
    # torchrun may have asked for how it ended before we did, and ends the others itself
    if first is None or first.signum in ASKED or not (first.signum or first.status):
        return ""
    how = f"by {first.signal_name}" if first.signum else f"with exit status {first.status}"
    return f"the job failed: of the ranks on this node, rank {first.rank} ended first, {how}"


def _processes() -> str:
    return "gpu" if Path("/dev/nvidia0").exists() else str(usable_cores())


def _ignore(run: RunFollower, found: list[ShownFinding]) -> None:
    pass


def _show(run: RunFollower, found: list[ShownFinding]) -> None:
    for finding in found:
        _print_line(f"● {verdict_line(finding)}")


def _print_line(text: str) -> None:
    print(f"ringside run: {text}", file=sys.stderr, flush=True)
