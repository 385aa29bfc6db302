"""Runs a script of the zoo under a launcher, and says in words how two runs of it differ."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from tests.support.mains import run_main
from tests.support.ranks import on_ranks, place
from tests.support.waiting import free_port

from ringside.autoload.ringside_autoload import FIRST, install

SCRIPTS = Path(__file__).with_name("scripts")
TORCHRUN = ("torch.distributed.run", "--standalone")
LIMIT_S = 150.0
SMALL_SHM = 'mount -t tmpfs -o size="$0" tmpfs /dev/shm && exec "$@"'


@dataclass(frozen=True)
class Ran:
    """How a run ended, and what it left.

    Args:
        status: The launcher's exit status.
        lines: What the script's ranks printed, sorted.
        err: What came on stderr.
        directory: Where it ran: all files in it are the script's.
    """

    status: int
    lines: list[str]
    err: str
    directory: Path

    @property
    def files(self) -> dict[str, bytes]:
        """What the script has written, by name."""
        found = sorted(path for path in self.directory.rglob("*") if path.is_file())
        return {str(path.relative_to(self.directory)): path.read_bytes() for path in found}


def run(
    module: Sequence[str],
    words: Sequence[str],
    directory: Path,
    *,
    shm: str = "",
    flags: Sequence[str] = (),
    signum: int = 0,
    environ: Mapping[str, str] | None = None,
) -> Ran:
    """Run a script on two ranks.

    Args:
        module: The launcher's module and its flags.
        words: The script's name in the zoo, and its arguments.
        directory: Where it runs; made here.
        shm: Size of a /dev/shm of its own; "": the machine's.
        flags: More of torchrun's flags.
        signum: What the launcher is sent as soon as both ranks have said `started`; 0: nothing.
        environ: More of the environment.
    """
    directory.mkdir(parents=True)
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("RINGSIDE", "PET_", "PYTHON"))}
    command = [sys.executable, "-m", *module, "--nproc-per-node=2", *flags, str(SCRIPTS / words[0]), *words[1:]]
    child = subprocess.Popen(
        [*in_small_shm(shm), *command],
        env={**variables, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **(environ or {})},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if signum:
            _await_start(child, directory)
            child.send_signal(signum)
        out, err = child.communicate(timeout=LIMIT_S)
    except BaseException:
        child.terminate()
        try:
            child.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
        raise
    return Ran(child.returncode, sorted(out.splitlines()), err, directory)


def run_forked(words: Sequence[str], directory: Path, record: Path | None = None) -> Ran:
    """Run a script on two ranks that are forked from a process which has imported torch: as torchrun does, without it.

    Args:
        words: The script's name in the zoo, and its arguments.
        directory: Where it runs; made here.
        record: The run directory where Ringside attaches itself, as under `ringside run`; None: it does not.
    """
    directory.mkdir(parents=True)
    ended = on_ranks(2, as_main, list(words), str(directory), free_port(), record and str(record), limit_s=LIMIT_S)
    lines = sorted(line for out, _ in ended for line in out.splitlines())
    return Ran(0, lines, "".join(err for _, err in ended), directory)


def as_main(words: list[str], directory: str, port: int, record: str | None) -> tuple[str, str]:
    """Run a script in this process as its main program; return what it printed, and what came on stderr."""
    os.environ["MASTER_PORT"] = str(port)
    os.chdir(directory)
    if record:
        # FIRST: this rank has no launcher to end with
        os.environ |= {"RINGSIDE_RUN_DIR": record, "RINGSIDE_LAUNCHED": "1", FIRST: str(os.getpid())}
        install()
    out, err = (Path(f"{directory}.{name}.{place().rank}") for name in ("out", "err"))
    with out.open("w") as printed, err.open("w") as told, redirect_stdout(printed), redirect_stderr(told):
        run_main([str(SCRIPTS / words[0]), *words[1:]])
    return out.read_text(), err.read_text()


def _await_start(child: subprocess.Popen[str], directory: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not all((directory / f"started.{rank}").exists() for rank in (0, 1)):
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)  # another process's making: there is no event to wait for


def in_small_shm(size: str) -> list[str]:
    """Return what begins a command that shall see a /dev/shm of its own, of that size."""
    if not size:
        return []
    return ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "bash", "-c", SMALL_SHM, size]


def has_small_shm() -> bool:
    """Tell whether this machine lets us mount one."""
    return subprocess.run([*in_small_shm("1m"), "true"], capture_output=True).returncode == 0


def differences(stock: Ran, ours: Ran, ulps: int = 0) -> Iterator[str]:
    """Yield, in words, how a run differs from the stock one.

    Args:
        stock: The run as it should be.
        ours: The other.
        ulps: How far halves may lie apart, in units in the last place.
    """
    if stock.status != ours.status:
        yield f"exit status {stock.status} and {ours.status}"
    if stock.lines != ours.lines:
        yield f"printed {sorted(set(stock.lines) - set(ours.lines))} and {sorted(set(ours.lines) - set(stock.lines))}"
    if stock.files.keys() != ours.files.keys():
        yield f"files differ by {sorted(stock.files.keys() ^ ours.files.keys())}"
    yield from differences_in(stock.files.keys() & ours.files.keys(), stock, ours, ulps)


def differences_in(names: Collection[str], stock: Ran, ours: Ran, ulps: int = 0) -> Iterator[str]:
    """Yield how files differ that both runs have written, loaded where there is no Ringside."""
    # What is equal byte for byte loads as well as what was written without Ringside.
    unlike = sorted(name for name in names if stock.files[name] != ours.files[name])
    if not unlike:
        return
    script = Path(__file__).with_name("compare.py")
    command = [sys.executable, str(script), str(stock.directory), str(ours.directory), str(ulps), *unlike]
    # torch is not to look for the backend that an installed Ringside announces.
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    compared = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=LIMIT_S)
    yield from compared.stdout.splitlines()
    if compared.returncode:
        yield f"loading {unlike}: {compared.stderr}"
