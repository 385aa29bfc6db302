"""A Python that has imported torch and Ringside already, for tests of programs whose start is not what is tested.

`python()` is the path of a program that takes what Python takes: a script, `-m module` or `-c text`, with arguments.
Its interpreter is forked from a process that has imported all that (`preload.py`), gets the caller's descriptors,
environment, directory, network and mounts, and runs the program as Python does, from `__main__` until modules are torn
down.
What was called (`tests/scripts/zygote_client.py`) passes signals on to it, ends as it does, and takes it along where
it is killed.

So it is as a program that was started is, but for these things. Its parent is another process than the one that started
it: who looks for what is below a process does not find it, and who watches its parent watches another. It stays in the
zygote's control group. Strings have the zygote's hashes. `sitecustomize` is not run (what ours does is done). What it
starts by `sys.executable` is forked, too. A torchrun that is started truly takes the Python of its ranks from
PYTHON_EXEC.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import io
import json
import multiprocessing
import os
import resource
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import process, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy

from ringside.autoload.ringside_autoload import install
from ringside.processes import namespace_id

from .ranks import ROOT, forking

CLIENT = ROOT / "tests" / "scripts" / "zygote_client.py"
_MOST_BYTES = 1 << 20
"""Of a program's words and environment."""
_MOST_DESCRIPTORS = 250
_ABOVE = 500
"""More than any descriptor that a zygote or a program has."""


@dataclass(frozen=True)
class Zygote:
    """The process that programs are forked from.

    Args:
        process: It.
        pipe: It ends when this is closed.
        directory: Where its program and its socket lie.
    """

    process: Any
    pipe: Connection
    directory: Path


_zygote: Zygote | None = None


def python() -> str:
    """Return the path of the Python that has imported torch and Ringside."""
    global _zygote
    if _zygote is None:
        directory = Path(tempfile.mkdtemp(prefix="zygote-"))
        program = directory / "python"
        program.write_text(f"#!{sys.executable} -IS\n{CLIENT.read_text()}")
        program.chmod(0o700)
        ours, theirs = forking().Pipe()
        process = forking().Process(target=_serve, args=(theirs, str(directory)), name="zygote")
        process.start()
        theirs.close()
        ours.recv_bytes()
        _zygote = Zygote(process, ours, directory)
    return str(_zygote.directory / "python")


def pid() -> int | None:
    """Return the number of the process that programs are forked from; None where no test has needed it."""
    return None if _zygote is None else _zygote.process.pid


@atexit.register
def close() -> None:
    """End it, and the programs that are left."""
    if _zygote is not None:
        _zygote.pipe.close()
        _zygote.process.join(5.0)


# ------------------------------------------------------------------------------------------------ in the zygote


def _serve(caller: Connection, directory: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller's business
    gc.freeze()  # no program looks at what they share, and copies it by that
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        selectors.DefaultSelector() as selector,
        caller,
    ):
        listener.bind(f"{directory}/socket")
        listener.listen(64)
        caller.send_bytes(b"ready")
        _Server(f"{directory}/python", listener, caller, selector).run()
    shutil.rmtree(directory, ignore_errors=True)


class _Server:
    """Forks programs for those who connect, tells them how these ended, and kills the program of one who is gone."""

    def __init__(
        self, python: str, listener: socket.socket, caller: Connection, selector: selectors.BaseSelector
    ) -> None:
        self._python, self._listener, self._caller, self._selector = python, listener, caller, selector
        self._clients: dict[int, socket.socket] = {}

    def run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, self._begin)
        self._selector.register(self._caller, selectors.EVENT_READ, None)
        while True:
            ready = [key.data for key, _ in self._selector.select()]
            if None in ready:
                break
            for act in ready:
                act()
        for number in self._clients:
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)

    def _begin(self) -> None:
        client, _ = self._listener.accept()
        asked, descriptors, *_ = socket.recv_fds(client, _MOST_BYTES, _MOST_DESCRIPTORS)
        if not asked:  # it was killed meanwhile
            client.close()
            return
        number = os.fork()
        if number == 0:
            client.close()
            for key in list(self._selector.get_map().values()):
                os.close(key.fileobj) if isinstance(key.fileobj, int) else key.fileobj.close()  # type: ignore[attr-defined]
            self._selector.close()
            _be_program(json.loads(asked), descriptors, self._python)
        for descriptor in descriptors:
            os.close(descriptor)
        self._clients[number] = client
        self._selector.register(client, selectors.EVENT_READ, partial(self._gone, number))
        ended = os.pidfd_open(number)
        self._selector.register(ended, selectors.EVENT_READ, partial(self._ended, number, ended))
        with contextlib.suppress(OSError):
            client.send(str(number).encode())

    def _gone(self, number: int) -> None:
        """A client says nothing more, so that it can be read when it has ended."""
        if (client := self._clients.get(number)) is not None:
            self._selector.unregister(client)
            os.kill(number, signal.SIGKILL)

    def _ended(self, number: int, descriptor: int) -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
        self._selector.unregister(descriptor)
        os.close(descriptor)
        with self._clients.pop(number) as client:
            if client.fileno() in self._selector.get_map():
                self._selector.unregister(client)
            with contextlib.suppress(OSError):
                client.send(str(status).encode())


# ------------------------------------------------------------------------------------------------ in the program


def _be_program(asked: Mapping[str, Any], descriptors: Sequence[int], python: str) -> NoReturn:
    status = 1
    try:
        moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _ABOVE) for descriptor in descriptors]
        os.closerange(0, _ABOVE)  # a program has none but those that it inherits
        for number, descriptor in zip(asked["inherited"], moved, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]  # the zygote's is among them
        sys.executable = python
        os.setsid()
        os.environ.clear()
        os.environ.update(asked["environ"])
        _take_limits(asked["client"])
        _enter_namespaces(asked["client"])
        os.chdir(asked["directory"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - until the end
        multiprocessing.set_start_method(None, force=True)  # the zygote's own is another one
        multiprocessing.current_process().name = "MainProcess"
        process._parent_process = None  # type: ignore[attr-defined]
        numpy.random.seed()
        faulthandler.enable()
        if "MUTATE_REACH" in os.environ:  # `make mutate` asks which test reaches what
            importlib.import_module("tests.mutate.recorder").follow()
        _run(asked["words"])
        status = 0
    except KeyboardInterrupt:
        # Python dies of the signal once all is torn down: at the very end the C library calls raise(status).
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        libc = ctypes.CDLL(None)
        libc.on_exit(getattr(libc, "raise"), None)
        status = int(signal.SIGINT)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    ctypes.pythonapi.Py_Exit(status)
    raise AssertionError("it has ended")


def _take_limits(client: int) -> None:
    """Have the CPUs, the limits and the priority of the client, and its mask of new files."""
    os.sched_setaffinity(0, os.sched_getaffinity(client))
    for name in (name for name in dir(resource) if name.startswith("RLIMIT_")):
        resource.setrlimit(getattr(resource, name), resource.prlimit(client, getattr(resource, name)))
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, client))
    status = Path(f"/proc/{client}/status").read_text()
    os.umask(int(status.partition("Umask:")[2].split()[0], 8))


def _enter_namespaces(client: int) -> None:
    """Go where the client is, if it was started in another network or sees other mounts."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("user", "mnt", "net"):
        theirs = f"/proc/{client}/ns/{kind}"
        if os.stat(theirs).st_ino != namespace_id(kind):
            with open(theirs) as file:
                if libc.setns(file.fileno(), 0):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), theirs)


def _run(words: Sequence[str]) -> None:
    """Run what Python runs of these words, in a `__main__` of its own."""
    is_raw = words[0] == "-u" or bool(os.environ.get("PYTHONUNBUFFERED"))
    words = words[words[0] == "-u" :]
    with contextlib.suppress(OSError):  # who started it may have closed it
        out = open(1, "wb", 0 if is_raw else -1, closefd=False)  # noqa: SIM115 - until the end
        sys.stdout = sys.__stdout__ = io.TextIOWrapper(out, write_through=is_raw)  # type: ignore[misc]
    beside = "" if words[0] in ("-c", "-m") else str(Path(words[0]).resolve().parent)
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [beside, *given, *(path for path in sys.path if path not in ("", str(ROOT)))]
    if os.environ.get("RINGSIDE_AUTOLOAD") == "1" and "RANK" in os.environ:  # ringside/autoload/sitecustomize.py
        install()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec", dont_inherit=True), main.__dict__)
    else:
        sys.argv = list(words)
        main.__file__ = words[0]
        exec(compile(Path(words[0]).read_bytes(), words[0], "exec", dont_inherit=True), main.__dict__)
