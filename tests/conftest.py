"""What holds for every test: it leaves nothing behind, and a missing core is no reason to skip half of them."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType

import hypothesis
import pytest

from ringside import _core

from .support import ranks
from .support.account import Account, beyond_allowance
from .support.kept import Kept

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell begins what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Choosing by measurement takes a second per communicator; tests of it say so.
os.environ.setdefault("RINGSIDE_SELECTION", "off")

# No deadlines: the machine is shared. `make test` asks for "quick".
hypothesis.settings.register_profile("thorough", deadline=None)
hypothesis.settings.register_profile("quick", max_examples=10, derandomize=True, deadline=None)
hypothesis.settings.load_profile("thorough")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", action="store_true", help="print where time went, by directory, beside the budgets")
    parser.addoption("--write-golden", action="store_true", help="write the golden files as everything is now")
    parser.addoption("--write-costs", action="store_true", help="write what the dear tests cost into tests/costs.txt")
    parser.addoption("--write-kept", action="store_true", help="write results anew that differ from the kept ones")


def pytest_configure(config: pytest.Config) -> None:
    if not _core.available() and not os.environ.get("RINGSIDE_NO_NATIVE"):
        pytest.exit(f"{_core.describe()}; RINGSIDE_NO_NATIVE=1 tests without it", 1)
    config.pluginmanager.register(Account(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give what judges a real run by its timing a second try; keep what takes long by its nature out of `make test`."""
    without_core = not _core.available()
    for item in items:
        if without_core and item.get_closest_marker("native"):
            item.add_marker(pytest.mark.skip("needs the native core"))
        if item.get_closest_marker("noisy") and config.pluginmanager.hasplugin("rerunfailures"):
            item.add_marker(pytest.mark.flaky(reruns=1))
        if _THOROUGH & set(getattr(item, "fixturenames", ())):
            item.add_marker("thorough")
    for item in beyond_allowance(items):
        item.add_marker("thorough")


# A test that uses one of these fixtures is left to `make test-all`, unless it is marked `core`.
_THOROUGH = {"lab_factory", "browser"}


@pytest.fixture
def kept(request: pytest.FixtureRequest) -> Kept:
    """Whole results that are kept in `kept/`, beside the test."""
    return Kept(request.path.parent / "kept", write=request.config.getoption("--write-kept"))


# ------------------------------------------------------------------------------------------------ nothing is left


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail a test that leaks threads, processes, descriptors or shared memory, or that changes what others run in."""
    before = {check: check() for check in _GROWS}
    state = {check: check() for check in _STAYS}
    logger = logging.getLogger("ringside")
    level = logger.level
    yield
    logger.setLevel(level)  # a command that was called here has set it, as in a process of its own
    for check, was in before.items():
        left = _left(check, was)
        assert not left, f"the test left {check.__name__.strip('_')} behind: {sorted(left)}"
    for check, was in state.items():
        changed = check() ^ was
        assert not changed, f"the test changed the {check.__name__.strip('_')}: {sorted(changed)}"
    assert not (names := _patched()), f"the test left names patched: {names}"


def _left(check: Callable[[], set[str]], was: set[str]) -> set[str]:
    """Return what is new; what needs a moment to go away gets it."""
    deadline = time.monotonic() + 12.0  # AnyIO's idle threads end by themselves after ten seconds
    while left := check() - was:
        gc.collect()
        if time.monotonic() > deadline:
            return left
        time.sleep(0.01)  # a thread or process that ends gives no event to wait for here
    return left


def _threads() -> set[str]:
    return {f"{thread.name} ({thread.ident})" for thread in threading.enumerate()}


def _processes() -> set[str]:
    kept, found = ranks.own_processes(), set()
    for task in Path("/proc/self/task").iterdir():
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        found |= {f"{pid} {_command(pid)}" for pid in children if int(pid) not in kept}
    return {text for text in found if "resource_tracker" not in text}


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _descriptors() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if "ringside" in target or "pidfd" in target:
            found.add(f"{fd} -> {target}")
    return found


def _shared_memory() -> set[str]:
    """Return files of this test's processes; other people's on the same machine are none of our business."""
    own = {os.getpid(), *ranks.own_processes()}
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {n for n in names if "ringside" in n or any(f"_{pid}_" in n for pid in own)}


def _environment() -> set[str]:
    return {f"{name}={value}" for name, value in os.environ.items() if name not in _OTHERS}


def _handlers() -> set[str]:
    return {f"{number!s}: {signal.getsignal(number)}" for number in _SIGNALS}


def _directory() -> set[str]:
    return {os.getcwd()}


# What pytest sets, and torch and Lightning when they are imported.
_OTHERS = {"PYTEST_CURRENT_TEST", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR"}
_GROWS: tuple[Callable[[], set[str]], ...] = (_threads, _processes, _descriptors, _shared_memory)
_STAYS: tuple[Callable[[], set[str]], ...] = (_environment, _handlers, _directory)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)

_seen: dict[str, tuple[tuple[object, ...], dict[str, object]]] = {}  # by module: its values, and what names meant


def _patched() -> list[str]:
    """Return functions, classes and constants of ours that mean something else than when they were seen first."""
    found = []
    for name in [name for name in sys.modules if name[:8] == "ringside"]:  # two ms a test, were it less plain
        held = vars(sys.modules[name])
        values = tuple(held.values())
        before = _seen.get(name)
        if before is None or before[0] != values:
            means = {key: value for key, value in held.items() if _is_fixed(key, value)}
            if before is not None:
                found += [f"{name}.{key}" for key, value in before[1].items() if means.get(key) is not value]
            _seen[name] = values, means
    return found


def _is_fixed(name: str, value: object) -> bool:
    return isinstance(value, FunctionType | type) or name.isupper()
