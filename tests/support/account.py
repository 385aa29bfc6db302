"""What a test run says of itself at the end: where time went, what was skipped for want of what, what was tried again.

With `--times` (`make test ARGS=--times`) it prints, for every directory of tests, the seconds of wall, of processor
time in the test process and in the processes that it started, and of waiting, beside the directory's budget.

What a case of a dear test costs is kept in tests/costs.txt (written anew by `make test-all ARGS=--write-costs`): of it
`make test` runs as many cases as a quarter of a second allows, spread evenly, and one that takes up to half a second.
"""

from __future__ import annotations

import os
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from . import zygote

MOST_RERUNS = 3
COSTS = Path(__file__).parent.parent / "costs.txt"
# What cases of one test function may cost in `make test`, in seconds of processor time, or twice that of waiting:
ALLOWED_S = 0.25  # all together
DEAR_S = 0.5  # one that is the only one
_TICKS = os.sysconf("SC_CLK_TCK")
_KEY = "seconds"

# Processor seconds that tests of a directory are to take in `make test` and in `make test-all`, with their processes:
# a quarter more than what they took, directory by directory on a busy machine, and than what they take by
# tests/costs.txt, where tests that wait count with half of their wall time.
BUDGETS = {
    "tests": (16, 105),
    "tests/autoload": (4, 6),
    "tests/bench": (8, 45),
    "tests/commands": (31, 130),
    "tests/demo": (7, 10),
    "tests/doctor": (19, 32),
    "tests/engine": (65, 360),
    "tests/engine/transports": (4, 25),
    "tests/golden": (15, 20),
    "tests/hostile": (33, 125),
    "tests/integrations": (7, 42),
    "tests/lab": (14, 90),
    "tests/monitor": (34, 250),
    "tests/native": (3, 14),
    "tests/predict": (22, 36),
    "tests/pytorch": (47, 225),
    "tests/schedule": (11, 52),
    "tests/survive": (14, 48),
    "tests/verification": (10, 24),
    "tests/view": (21, 100),
    "tests/zoo": (6, 45),
    "(starting, collecting)": (30, 30),
}


def beyond_allowance(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield those cases of dear tests that `make test` leaves out: all where one is too dear."""
    costs = {name: float(cost) for name, cost in map(str.split, COSTS.read_text().splitlines())}
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not {mark.name for mark in item.iter_markers()} & {"core", "long", "thorough"}:
            cases[_function(item.nodeid)].append(item)
    for name in costs.keys() & cases.keys():
        several = cases[name]
        count = min(max(int(ALLOWED_S / costs[name]), costs[name] <= DEAR_S), len(several))
        chosen = {round(k * (len(several) - 1) / max(count - 1, 1)) for k in range(count)}
        yield from (item for at, item in enumerate(several) if at not in chosen)


def _function(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def used() -> tuple[float, float, float]:
    """Return wall, processor seconds of this process, and those of what it has started and what has ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic(), time.process_time(), children.ru_utime + children.ru_stime + _forked()


def _forked() -> float:
    """Return the processor seconds of the fork server and the zygote, and of their children that have ended."""
    ticks = 0
    for pid in (forkserver._forkserver._forkserver_pid, zygote.pid()):  # type: ignore[attr-defined]
        if pid is not None:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS


class Account:
    """A plugin of pytest; see the module.

    Args:
        config: Of pytest.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._times = config.getoption("--times")
        self._costs = config.getoption("--write-costs")
        self._cases: dict[str, list[float]] = defaultdict(list)
        self._began = used()
        self._collecting = [0.0] * 3
        self._spent: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)

    def pytest_collection_finish(self) -> None:
        self._collecting = [now - since for now, since in zip(used(), self._began, strict=True)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        item.stash[_BEFORE] = used()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
        outcome = yield
        if (self._times or self._costs) and call.when == "teardown":
            now, before = used(), item.stash[_BEFORE]
            report: Any = outcome.get_result()  # type: ignore[attr-defined]
            report.user_properties.append((_KEY, [after - since for after, since in zip(now, before, strict=True)]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for key, value in report.user_properties:
            if key == _KEY and report.when == "teardown":
                self._add(report.nodeid.split("::")[0].rpartition("/")[0], [*value, 1])
                self._cases[_function(report.nodeid)].append(max(value[1] + value[2], value[0] / 2))

    @pytest.hookimpl(optionalhook=True)  # without xdist there are no workers
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a worker of xdist has counted by itself."""
        self._add("(starting, collecting)", [*getattr(node, "workeroutput", {}).get(_KEY, ()), 0])

    def _add(self, row: str, values: list[float]) -> None:
        self._spent[row] = [before + more for before, more in zip(self._spent[row], values, strict=False)]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        worker: Any = session.config
        if hasattr(worker, "workeroutput"):
            worker.workeroutput[_KEY] = self._collecting
        reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None:
            return
        if len(reporter.stats.get("rerun", ())) > MOST_RERUNS:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        reruns = [report.nodeid for report in terminalreporter.stats.get("rerun", ())]
        if len(reruns) > MOST_RERUNS:
            terminalreporter.write_line(f"failed: {len(reruns)} reruns, more than {MOST_RERUNS}: {' '.join(reruns)}")
        self._tell_skips(terminalreporter)
        if self._costs:
            dear = sorted(name for name, costs in self._cases.items() if sum(costs) > ALLOWED_S)
            COSTS.write_text(
                "".join(f"{name} {sum(costs) / len(costs):.3f}\n" for name in dear for costs in [self._cases[name]])
            )
        if self._times:
            if not config.pluginmanager.hasplugin("dsession"):  # no workers: collected here
                self._add("(starting, collecting)", [*self._collecting, 0])
            self._tell_times(terminalreporter, chosen="thorough" in config.option.markexpr)

    def _tell_skips(self, reporter: Any) -> None:
        cases: Counter[str] = Counter()
        modules: dict[str, set[str]] = defaultdict(set)
        for report in reporter.stats.get("skipped", ()):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            cases[reason] += 1
            modules[reason].add(report.nodeid.split("::")[0])
        for reason, count in cases.most_common():
            named = sorted(modules[reason])
            where = named[0] if len(named) == 1 else f"{len(named)} modules"
            reporter.write_line(f"skipped {count} in {where}: {reason}")

    def _tell_times(self, reporter: Any, *, chosen: bool) -> None:
        total = [0.0] * 4
        budgets = {name: quick if chosen else whole for name, (quick, whole) in BUDGETS.items()}
        reporter.write_line(
            f"{'seconds':28}{'wall':>8}{'here':>8}{'started':>9}{'waiting':>9}{'tests':>7}{'budget':>8}"
        )
        rows = sorted(self._spent.items(), key=lambda row: -row[1][1] - row[1][2])
        for _, spent in rows:
            total = [a + b for a, b in zip(total, spent, strict=True)]
        for name, (wall, here, started, count) in [*rows, ("all", total)]:
            waiting = max(0.0, wall - here - started)
            budget = budgets.get(name, "")
            over = " over" if budget and here + started > budget else ""
            reporter.write_line(
                f"{name:28}{wall:8.1f}{here:8.1f}{started:9.1f}{waiting:9.1f}{int(count):7}{budget:>8}{over}"
            )


_BEFORE = pytest.StashKey[tuple[float, float, float]]()
