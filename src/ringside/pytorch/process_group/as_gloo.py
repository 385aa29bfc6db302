"""`"gloo"` served by Ringside (RINGSIDE_AS_GLOO=1): programs that ask for Gloo by name get the engine.

All ranks of a group must agree. Each announces itself in the group's store before it makes anything; a rank without
Ringside is known by the key under which Gloo publishes its address. If one is there, or versions or settings differ,
all ranks stay on Gloo, and the first that has Ringside, as far as is known by then, says why.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringside._version import __version__
from ringside.engine.shm.memory import obstacle
from ringside.errors import DeadlineError
from ringside.pytorch.communicator.options import Options
from ringside.pytorch.process_group import creation
from ringside.pytorch.process_group.backend import GlooWork, RingsideBackend, RingsideGroup
from ringside.pytorch.process_group.carrier import engine_limit_s, own_part
from ringside.text import name_ranks, timed_out

NAME = "ringside_gloo"
"""The backend by which torch up to 2.13 makes such a group; `get_backend` says "gloo" all the same."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02
_STAYS = "a group of the backend gloo stays on Gloo"
_log = logging.getLogger("ringside")


class GlooBackend(RingsideBackend):
    """What "gloo" is from torch 2.14 on: CPU tensors are Ringside's, others are Gloo's. Arguments as its base."""

    backend_name = "gloo"

    def carry_elsewhere(self, collective: str, name: str, args: tuple[Any, ...]) -> Any:
        """Give a collective of tensors on GPUs to Gloo."""
        _log_once(logging.INFO, "tensors on GPUs in groups of the backend gloo are carried by Gloo")
        return GlooWork(self.counters.through_gloo(collective, getattr(self._gloo, name), *args))


class GlooGroup(RingsideGroup):
    """What "gloo" is up to torch 2.13. Arguments as its base."""

    backend_name = "gloo"


def make_backend(stock: Callable[..., Any], options: Any, backend_options: Any) -> Any:
    """Make a backend for "gloo" (torch ≥ 2.14): ours, where all ranks have it.

    Args:
        stock: torch's own creator of it.
        options: torch's: `store`, `group_rank`, `group_size`, `timeout`, ...
        backend_options: The caller's.

    Raises:
        DeadlineError: A rank did not come.
    """
    is_stocks = getattr(options, "enable_reconfigure", False) or creation.checks_every_call()
    if is_stocks or not _all_agree(options.store, options.group_rank, options.group_size, options.timeout):
        return stock(options, backend_options)
    creation.change_torch()
    return GlooBackend.made_for(options)


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
    if (
        creation.checks_every_call()
        or not is_gloos
        or not is_member
        or (tag and c10d._find_pg_by_ranks_and_tag(tag, ranks))
    ):
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
        DeadlineError: A rank did not come within the timeout.
    """
    if size == 1:
        return False  # Gloo does nothing there, as fast as can be
    part = own_part(PrefixStore("as_gloo", store), rank)
    part.set(str(rank), msgspec.json.encode(_own(size, timeout)).decode())
    # With a timeout of 0 the ranks of a group meet all the same, as with Gloo: not to wait is for its calls.
    limit_s = (timeout or c10d.default_pg_timeout).total_seconds()
    deadline, pause_s = time.monotonic() + limit_s, _SHORTEST_PAUSE_S
    while not part.check([str(r) for r in range(size)]):
        absent = [r for r in range(size) if not part.check([str(r)])]
        # A rank that is only late may have announced itself since, and Gloo's key may be its own later one.
        stock = [r for r in absent if store.check([f"0/{r}"]) and not part.check([str(r)])]
        if stock:
            # Of those that have said by now that they have it: a late one may lack it as well, and would say nothing.
            # Two say it where one of them sees the other's announcement too late.
            if rank == next(r for r in range(size) if part.check([str(r)])):
                _log_once(logging.WARNING, _STAYS, f": rank {stock[0]} has no Ringside")
            return False
        if time.monotonic() > deadline:
            raise DeadlineError(f"{timed_out(limit_s)}: {name_ranks(absent)} did not make the process group", absent)
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
                _log_once(logging.WARNING, _STAYS, f": rank {r} on host {own.host}: {why}")
            return False
    return True


def _own(size: int, timeout: timedelta) -> Announcement:
    options = Options(engine_limit_s(timeout))
    problem = creation.missing() or options.problem or obstacle(size, options.settings.stage_bytes)
    settings = options.agreed()
    return Announcement(socket.gethostname(), __version__, str(torch.__version__), settings, problem)


_said: set[str] = set()


def _log_once(level: int, message: str, reason: str = "") -> None:
    """Log it once per process, with the first reason."""
    if message not in _said:
        _said.add(message)
        _log.log(level, "%s%s", message, reason)
