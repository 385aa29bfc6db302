"""`"gloo"` served by Ringside (RINGSIDE_AS_GLOO=1): programs that ask for Gloo by name get the engine.

All ranks of a group must agree. Each announces itself in the group's store before it makes anything; a rank without
Ringside is known by the key under which Gloo publishes its address. If one is there, or versions or settings differ,
all ranks stay on Gloo, and the first that has Ringside says why.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import Backend
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringside import _core
from ringside._version import __version__
from ringside.errors import ClosedError, DeadlineError
from ringside.pytorch.communicator.options import Options
from ringside.pytorch.process_group import creation
from ringside.pytorch.process_group.backend import GlooWork, RingsideBackend
from ringside.pytorch.process_group.carrier import Carrier, own_part
from ringside.pytorch.process_group.collectives import Collective
from ringside.pytorch.process_group.group import RingsideGroup
from ringside.pytorch.process_group.work import OwnWork
from ringside.text import name_ranks

NAME = "ringside_gloo"
"""The backend by which torch up to 2.13 makes such a group; `get_backend` says "gloo" all the same."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02
_STAYS = "a group of the backend gloo stays on Gloo"
_log = logging.getLogger("ringside")


class Lazy(Carrier):
    """Opens its engine with the first collective: programs make many groups, and use few of them.

    Opening takes all ranks. A collective with `async_op=True` does not wait for them: until the engine is open it is
    begun on a thread of its own, after those before it.
    """

    _posts = False
    _last: Begun | None = None

    def _begin(self, store: Store, limit_s: float | None) -> None:
        self._where, self._process, self._opening = (Polled(store), limit_s), os.getpid(), threading.Lock()
        self._is_closed = False

    def __getattr__(self, name: str) -> Any:
        if name not in ("engine", "_buckets"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with self._opening:
            if "_may_post" not in vars(self):
                if self._is_closed or self._process != os.getpid():
                    raise ClosedError(f"the process group is closed on rank {self._rank}, or this is a forked child")
                super()._begin(*self._where)
                self._may_post, self._posts = self._posts, False
        return vars(self)[name]

    def execute(self, collective: Collective, args: tuple[Any, ...]) -> Any:
        """As `Carrier.execute`."""
        if self._last is not None and self._last.begun.done():
            self._last = None
        if self._last is not None or "_may_post" not in vars(self):
            if getattr(args[-1], "asyncOp", True) and self._coalesced is None:
                self._last = Begun(functools.partial(super().execute, collective, args), self._last)
                return self._last
            if self._last is not None:
                concurrent.futures.wait([self._last.begun])
                self._last = None
        work = super().execute(collective, args)
        # Small all-reduces go past here, so not before all that came earlier has been begun.
        self._posts = self._may_post
        return work

    def shutdown(self) -> None:
        """Finish what is under way, within seconds, and close; called by `destroy_process_group`."""
        self._close("shutdown")

    def abort(self) -> None:
        """Close at once: what is under way fails here and at the peers."""
        self._close("abort")

    def _close(self, how: str) -> None:
        self._is_closed = True
        if "_may_post" in vars(self):
            getattr(super(), how)()
        else:
            getattr(self._gloo, how)()


class Begun(OwnWork):
    """A collective that is begun on a thread, after the one before it.

    Args:
        begin: Begins it and returns its work.
        before: The one before it.

    Attributes:
        begun: Has its work as soon as there is one.
    """

    def __init__(self, begin: Callable[[], Any], before: Begun | None) -> None:
        super().__init__()
        self.begun: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        threading.Thread(target=self._run, args=(begin, before), daemon=True).start()

    def _run(self, begin: Callable[[], Any], before: Begun | None) -> None:
        try:
            if before is not None:
                before.begun.result()
            self.begun.set_result(begin())
        except BaseException as error:
            self.begun.set_exception(error)
        with contextlib.suppress(BaseException):  # `future` raises it
            self.begun.result().get_future().wait()
        self._future.set_result([])

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return True when it is done, as every work."""
        if self.watched is not None:
            watched, self.watched = self.watched, None
            return bool(watched.timed(self.wait, timeout))
        seconds = timeout.total_seconds() if timeout else 0.0
        try:
            work = self.begun.result(seconds if seconds > 0 else None)
        except concurrent.futures.TimeoutError:
            raise DeadlineError(f"Timed out: not all ranks have come after {seconds:g} s; wait longer") from None
        return bool(work.wait(timeout))

    def is_completed(self) -> bool:
        """Tell whether it is done, well or badly."""
        return self.begun.done() and (self.begun.exception() is not None or self.begun.result().is_completed())

    def is_success(self) -> bool:
        """Tell whether it is done and went well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return what went wrong, or None."""
        if not self.begun.done():
            return None
        return self.begun.exception() or self.begun.result().exception()

    def result(self) -> Any:
        """Wait and return the tensors that hold the result."""
        self.wait()
        return self.begun.result().result()

    def source_rank(self) -> int:
        """Return this rank, as every collective."""
        return int(self.begun.result().source_rank())

    def future(self) -> Any:
        """Return a future of the result."""
        return self._future.then(lambda _: self.result())


class GlooBackend(Lazy, RingsideBackend):
    """What "gloo" is from torch 2.14 on: CPU tensors are Ringside's, others are Gloo's. Arguments as its base."""

    def carry_elsewhere(self, name: str, args: tuple[Any, ...]) -> Any:
        """Give a collective of tensors on GPUs to Gloo."""
        _say(logging.INFO, "tensors on GPUs in groups of the backend gloo are carried by Gloo")
        return GlooWork(self.counters.through_gloo(name, getattr(self._gloo, name), *args))

    # `getBackendName` stays "ringside": DDP's C++ takes a backend of the name "gloo" for its own class.


class GlooGroup(Lazy, RingsideGroup):
    """What "gloo" is up to torch 2.13. Arguments as its base."""

    def getBackendName(self) -> str:
        """Return `gloo`."""
        return "gloo"


class Polled(Store):
    """A store whose waits ask again and again: torch's keep all other threads of the process from it meanwhile.

    Ranks that open several groups on several threads, in any order, would wait for each other.

    Args:
        store: Where everything is.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        """As `Store.set`."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """As `Store.get`."""
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        """As `Store.add`."""
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """As `Store.check`."""
        return self._store.check(keys)

    def delete_key(self, key: str) -> bool:
        """As `Store.delete_key`."""
        return self._store.delete_key(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """As `Store.wait`."""
        limit = c10d.default_pg_timeout if timeout is None else timeout
        deadline, pause_s = time.monotonic() + limit.total_seconds(), _SHORTEST_PAUSE_S
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                raise torch.distributed.DistStoreError(
                    f"wait timeout after {limit.total_seconds():g} s, keys: {', '.join(keys)}"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def make_backend(stock: Callable[..., Any], options: Any, backend_options: Any) -> Any:
    """Make a backend for "gloo" (torch ≥ 2.14): ours, where all ranks have it.

    Args:
        stock: torch's own creator of it.
        options: torch's: `store`, `group_rank`, `group_size`, `timeout`, ...
        backend_options: The caller's.

    Raises:
        DeadlineError: A rank did not come.
    """
    if getattr(options, "enable_reconfigure", False) or not _all_agree(
        options.store, options.group_rank, options.group_size, options.timeout
    ):
        return stock(options, backend_options)
    creation.change_torch()
    own = Backend.Options("gloo", timeout=options.timeout)
    own.global_ranks_in_group, own.group_name = options.global_ranks_in_group, options.group_id
    return GlooBackend(options.store, options.group_rank, options.group_size, own)


def make_group(stock: Callable[..., Any], call: dict[str, Any]) -> Any:
    """Make a process group whose CPU tensors are for "gloo" (torch ≤ 2.13): ours, where all ranks have it.

    Args:
        stock: torch's own maker of groups, which makes all others.
        call: Its arguments by name.

    Raises:
        DeadlineError: A rank did not come.
    """
    devices = c10d.BackendConfig(c10d.Backend(call["backend"])).get_device_backend_map()
    ranks, tag = call["global_ranks_in_group"], call.get("pg_tag")
    is_gloos = devices.get("cpu") == "gloo" and devices.get("cuda", "gloo") in ("gloo", "nccl") and len(devices) <= 2
    is_member = not ranks or c10d._get_default_group().rank() in ranks
    if not is_gloos or not is_member or (tag and c10d._find_pg_by_ranks_and_tag(tag, ranks)):
        return stock(**call)
    # A group whose NCCL half is to be split off another's: that is between torch and NCCL.
    default = c10d._get_default_group() if c10d.is_initialized() else None
    if call.get("device_id") or (default is not None and default.bound_device_id):
        return stock(**call)
    store = PrefixStore("cpu/", PrefixStore(f"{call['group_name']}/", call["store"]))
    if not _all_agree(store, call["group_rank"], call["group_size"], call["timeout"]):
        return stock(**call)
    if NAME not in c10d.Backend.backend_list:
        c10d.Backend.register_backend(NAME, _make_named, extended_api=True, devices=["cpu", "cuda"])
    group, part = stock(**{**call, "backend": NAME, "backend_options": devices.get("cuda", "")})
    world = c10d._world
    world.pg_map[group] = (c10d.Backend(call["backend"]), part)
    world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(call["backend"])))
    return group, part


def _make_named(options: Any, gpus: str) -> GlooGroup:
    creation.change_torch()
    return GlooGroup(options.store, options.group_rank, options.group_size, options.timeout, gpus)


# -------------------------------------------------------------------------------------------------
# Agreement


class Announcement(msgspec.Struct, frozen=True):
    """What a rank says of itself before a group is made.

    Args:
        host: Its host's name.
        ringside: Version.
        torch: Version.
        settings: Those that all ranks must have.
        problem: Why it cannot take part; "": it can.
    """

    host: str
    ringside: str
    torch: str
    settings: dict[str, str]
    problem: str = ""


def _all_agree(store: Store, rank: int, size: int, timeout: timedelta) -> bool:
    """Tell whether all ranks of a group have Ringside and it fits together; else say why not.

    Raises:
        DeadlineError: A rank did not come within the timeout, or this torch is too old.
    """
    if size == 1:
        return False  # Gloo does nothing there, as fast as can be
    part = own_part(PrefixStore("as_gloo", store), rank)
    part.set(str(rank), msgspec.json.encode(_own(timeout)).decode())
    deadline, pause_s = time.monotonic() + timeout.total_seconds(), _SHORTEST_PAUSE_S
    while not part.check([str(r) for r in range(size)]):
        absent = [r for r in range(size) if not part.check([str(r)])]
        # A rank that is only late may have announced itself since, and Gloo's key may be its own later one.
        stock = [r for r in absent if store.check([f"0/{r}"]) and not part.check([str(r)])]
        if stock:
            if rank == min(set(range(size)) - set(stock)):
                _say(
                    logging.WARNING,
                    f"a group of the backend gloo stays on Gloo: without Ringside are {name_ranks(stock)}",
                )
            return False
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"Timed out after {timeout.total_seconds():g} s: {name_ranks(absent)} did not make the process group",
                absent,
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    said = [msgspec.json.decode(part.get(str(r)), type=Announcement) for r in range(size)]
    first = msgspec.structs.replace(said[0], problem="")
    for r, own in enumerate(said):
        why = own.problem
        for name in ("ringside", "torch", "settings"):
            if not why and getattr(own, name) != getattr(first, name):
                why = f"{name} {getattr(own, name)}, where rank 0 has {getattr(first, name)}"
        if why:
            if rank == 0:
                _say(logging.WARNING, f"{_STAYS}: rank {r} on host {own.host}: {why}")
            return False
    return True


def _own(timeout: timedelta) -> Announcement:
    options = Options(None if timeout == c10d.default_pg_timeout else timeout.total_seconds())
    problem = creation.missing() or ("" if _core.available() else "the native core is not installed")
    settings, problem = options.agreed(), problem or options.problem
    return Announcement(socket.gethostname(), __version__, str(torch.__version__), settings, problem)


@functools.cache
def _say(level: int, message: str) -> None:
    """Log it once per process."""
    _log.log(level, "%s", message)
