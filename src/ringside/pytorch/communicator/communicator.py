"""`communicator(group)`: Ringside's collectives among the ranks of a process group, on one host or several."""

from __future__ import annotations

import copy
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringside.engine import HostCommunicator
from ringside.engine.buffers import Flat, flatten
from ringside.engine.collectives import Collectives
from ringside.engine.communicator import Communicator, typed_as
from ringside.engine.dtypes import Op, dtype_code, op_name, own_weight
from ringside.engine.net.collectives import run_collective
from ringside.engine.net.exchange.exchange import HopTiming
from ringside.engine.net.rank_map import RankMap, exchange_rank_infos, make_rank_map, own_rank_info
from ringside.engine.request import CoreRequest, checked_op, encode_split, split_members
from ringside.engine.runtime.interrupts import interruptible
from ringside.engine.runtime.worker import AtExit
from ringside.engine.settings import timeout_seconds
from ringside.engine.shm.log import AcrossLog, CollectiveLog
from ringside.engine.shm.memory import Storage, obstacle
from ringside.errors import ClosedError, UnsupportedError, UsageError
from ringside.pytorch.communicator.between_hosts import BetweenHosts
from ringside.pytorch.communicator.gpu import OnDevice, on_device
from ringside.pytorch.communicator.one_host import OneHost, open_across
from ringside.pytorch.communicator.options import Options
from ringside.pytorch.store import group_store
from ringside.schedule import Schedule

ABANDON_S = 2.0  # what this rank has sent last may still be under way


def communicator(
    group: dist.ProcessGroup | None = None,
    *,
    timeout: float | timedelta | None = None,
    algorithm: str | None = None,
    wire_dtype: str | None = None,
    reproducible: bool | None = None,
    switch: bool = False,
    machine: str = "",
) -> GroupCommunicator:
    """Return a communicator among the ranks of a process group; every rank of it calls this, in the same order.

    Args:
        group: A process group with at least 2 ranks, this one among them; None: the default group.
        timeout: Longest wait for other ranks in one collective, a `timedelta` or seconds (default
            RINGSIDE_TIMEOUT_S, else 1800).
        algorithm: By which all-reduces between hosts are run, such as `ring` or `hosts/ring`
            (`ringside.engine.algorithm.AlgorithmSpec`; default RINGSIDE_ALGORITHM); None: chosen by measurement.
        wire_dtype: How float32 elements travel between hosts (default RINGSIDE_WIRE_DTYPE): `bfloat16` or `float16`,
            whose error is stated in `ringside.engine.net.exchange.compression`, or, of sums and means, `int8` or
            `fp8_e4m3` (`ringside.engine.net.exchange.block_scaling`).
        reproducible: Results do not depend on algorithm, message size, bucket layout or the ranks' hosts: every
            element is ((x0 + x1) + x2) + ... (default RINGSIDE_REPRODUCIBLE=1). With `int8` and `fp8_e4m3` on the wire
            they depend on the bucket layout, as blocks are parts of a bucket.
        switch: A reducer takes part as an additional vertex (`algorithm="in_network"`).
        machine: What tells hosts apart, in place of what the kernel says (for tests): ranks with equal values share
            memory.

    Raises:
        MismatchError: Ranks run different versions or have different settings; names who differs.
        UsageError: The group has fewer than 2 ranks, or there is no such algorithm.
    """
    group = group if group is not None else dist.distributed_c10d._get_default_group()
    store = group_store(group, "communicator")
    options = Options(timeout, algorithm, wire_dtype, reproducible, switch)
    rank, size, device = dist.get_rank(group), dist.get_world_size(group), OnDevice(group, options.choice)
    return GroupCommunicator(store, rank, size, options, machine=machine, device=device)


class GroupCommunicator(Collectives):
    """Collectives among ranks on one host or several; `ringside.communicator(group)` makes one.

    Ranks that can share memory are found and use it; between hosts messages travel over a Gloo group of our own, made
    over the job's store. Making one is a collective: every rank of the group makes it, in the same order. Use it from
    one thread at a time; asynchronous collectives run in order on a thread of its own. (Its many methods are what users
    call, and properties that describe it; the work is done by `OneHost`, `BetweenHosts` and `OnDevice`.)

    Args:
        store: A part of the job's store that only this communicator uses.
        rank: This rank.
        size: Number of ranks, at least 2.
        options: Equal on all ranks.
        machine: What tells hosts apart; empty: the kernel does.
        device: Reduces tensors on GPUs; None: there is no process group that could.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        roster: Which ranks are on which host.

    Raises:
        MismatchError: Ranks run different versions or have different settings; names who differs.
        UsageError: There are fewer than 2 ranks, or a rank has a problem.
    """

    def __init__(
        self, store: Store, rank: int, size: int, options: Options, *, machine: str = "", device: OnDevice | None = None
    ) -> None:
        self.rank, self.size, self._options, self._machine = rank, size, options, machine
        self.settings = options.settings
        self._store, self._device = store, device
        self._splits = itertools.count(1)
        objection = obstacle(size, self.settings.stage_bytes)
        offer = own_rank_info(options.agreed(), objection, machine, options.problem)
        offers = exchange_rank_infos(store, rank, size, offer, timeout_s=options.settings.timeout_s)
        self.roster: RankMap = make_rank_map(rank, offers)
        self._begin()
        self.local: HostCommunicator | None = None
        self._between: BetweenHosts | None = None
        _at_exit.add(self)
        roster, several, switch = self.roster, len(self.roster.hosts) > 1, options.switch
        try:
            if switch and not several:
                raise UsageError(
                    "switch=True needs ranks on several hosts: on one host there is no switch to reduce at"
                )
            if roster.local_size > 1:
                key = roster.keys[roster.host]
                self.local = HostCommunicator(key, roster.local_rank, roster.local_size, self.settings)
            if self.local is not None and not several:
                # All ranks share memory: the host's communicator is called straight, without a call through this one.
                local, members = self.local, vars(Collectives).items()
                names = [name for name, value in members if callable(value) and not name.startswith("_")]
                for name in (*names, "barrier", "empty", "split", "submit"):
                    setattr(self, name, getattr(local, name))
                self.all_reduce = OneHost(local, options, device).all_reduce  # type: ignore[method-assign]
                self.log: AcrossLog | CollectiveLog = local.log
            else:
                across = open_across(store, roster, self.settings, self.local, switch=switch)
                self._between = BetweenHosts(across, options)
                self.log = self._between.log
                self._between.start()
        except BaseException:
            self._close(0.0)
            raise

    # -------------------------------------------------------------------------------------------- collectives

    @typed_as(Communicator.all_reduce)
    def all_reduce(
        self,
        x: Any,
        op: Op = "sum",
        async_op: bool = False,
        *,
        scale: float = 1.0,
        algorithm: str | Schedule | None = None,
        weights: float | Sequence[float] | None = None,
    ) -> Any:
        """Reduce a tensor over all ranks, in place; every rank ends with bit-identical elements.

        Args:
            x: torch tensor or NumPy array of any shape, equal shape and dtype on all ranks. One on a GPU is reduced
                there, by the process group's own collective or, where an algorithm is given, by that schedule over
                the group's point-to-point.
            op: sum, avg, prod, min, max, band, bor or bxor, or torch's `ReduceOp`.
            async_op: Return a `Work` at once; the tensor is ready after its `wait()`.
            scale: Multiply each contribution first (floating dtypes with sum or avg only).
            algorithm: Such as `ring` or `hosts/ring`; None: the communicator's.
            weights: With avg of a floating dtype, a weighted mean: this rank's own weight, or one weight per rank.

        Returns:
            `x` itself, or a `Work` whose `result()` it is.

        Raises:
            UsageError, UnsupportedError: This call cannot be; nothing was sent.
            MismatchError, PeerLostError, DeadlineError: The tensor's content is undefined and, between hosts, the
                communicator is broken; they name the rank and its host.
        """
        if op.__class__ is not str:
            op = op_name(op)
        try:
            flat = flatten(x)
        except UnsupportedError:
            if self._device is None or not on_device(x):
                raise
            return self._device.all_reduce(x, op, async_op, scale=scale, algorithm=algorithm, weights=weights)
        # The common call, small and seen before, looks nothing up.
        key = None
        if op.__class__ is str and (algorithm is None or algorithm.__class__ is str) and scale == 1.0:
            key = flat.numel, flat.dtype, op, algorithm
            is_free = not self._closed and self._background is None and self._owner_pid == os.getpid()
            if weights is None and not async_op and is_free and self._several.run_cached(key, flat):
                return x
        code = checked_op(flat, op, scaled=scale != 1.0 or weights is not None)
        if weights is not None and (op != "avg" or scale != 1.0):
            raise UsageError(f"weights= is for op='avg' without a scale, not for op={op!r}, scale={scale!r}")
        own = own_weight(weights, self.rank, self.size) if weights is not None else None
        between = self._several
        fixed = between.fixed(algorithm, flat)

        def job() -> Any:
            between.all_reduce(flat, between.reduction(flat.dtype, code, scale, own), fixed, key)
            flat.write_back()
            return x

        return self._in_turn(job, async_op)

    def interruptible(self) -> interruptible | None:
        """Return what makes Ctrl-C end a collective of another thread, while the main thread waits for it in torch.

        None: all ranks are on one host, where no thread waits like that.
        """
        return None if self._between is None else self._between.across.interruptible()

    def barrier(self) -> None:
        """Return when every rank has called it."""
        nothing = Flat(0, 0, 0, (0,), None)
        self._perform(CoreRequest("barrier", nothing, 0), lambda: None, False)

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32) -> Any:
        """Return a new zero-filled tensor in memory that the ranks of this host have mapped; all call it alike.

        Args:
            shape: Equal on all ranks.
            dtype: A NumPy dtype gives a NumPy array, a torch dtype a torch CPU tensor.
        """
        dtype_code(dtype)
        if self.local is None:
            return torch.zeros(shape, dtype=dtype) if str(dtype).startswith("torch.") else np.zeros(shape, dtype)
        return self._in_turn(functools.partial(self.local.empty, shape, dtype), False)

    def split(self, color: int | None, key: int | None = None) -> GroupCommunicator | HostCommunicator | None:
        """Return a communicator over the ranks that give the same color; every rank must call it.

        Args:
            color: Names this rank's group; None: this rank is in none.
            key: Ranks in the group are ordered by it, and where it is equal by rank here; None: by rank here.

        Returns:
            The group's communicator (of one rank, if nobody else gave this color), or None without a color.
        """
        rows = self.all_gather(np.array([encode_split(color, key, self.rank)], dtype=np.int64))
        number = next(self._splits)
        if color is None:
            return None
        members = split_members(rows, self.rank)
        if len(members) == 1:
            return HostCommunicator(f"{self.roster.keys[0]}/{number}/{color}", 0, 1, self.settings)
        store = PrefixStore(f"split/{number}/{color}", self._store)
        options = copy.copy(self._options)
        options.switch = False  # the reducer does not know the sub-group
        return GroupCommunicator(store, members.index(self.rank), len(members), options, machine=self._machine)

    def explain(self, size_bytes: int) -> str:
        """Describe by which algorithm float32 of that size is all-reduced: a ranked table, predicted and measured.

        Args:
            size_bytes: Of the tensor.
        """
        if self._between is None:
            return f"{size_bytes} bytes: shared memory, all {self.size} ranks are on one host"
        return self._between.explain(size_bytes)

    def settled(self, size_bytes: int) -> bool:
        """Tell whether the algorithm for all-reduces of float32 of that size is decided.

        Until then a promising one is tried beside the one in use now and then.

        Args:
            size_bytes: Of the tensor.
        """
        selector = self._between.selector if self._between is not None else None
        return selector is None or selector.settled(size_bytes)

    @property
    def buckets(self) -> HostCommunicator | BetweenHosts:
        """What all-reduces gradient buckets: the host's communicator, where all ranks share memory."""
        if self._between is not None:
            return self._between
        assert self.local is not None, "ranks that share memory have a communicator of their host"
        return self.local

    @property
    def inside(self) -> HostCommunicator | None:
        """The host's communicator where it may be called straight: all ranks share memory, no algorithm is set."""
        plain = self._between is None and self._options.choice is None and not self._options.reproducible
        return self.local if plain else None

    @property
    def revisions(self) -> tuple[str, ...]:
        """The algorithms changed during the run because the network had changed, and why, in words, oldest first."""
        selector = self._between.selector if self._between is not None else None
        return () if selector is None else tuple(selector.history)

    @property
    def startup_s(self) -> float:
        """How long timing links and algorithms took when this was made, seconds; 0.0: nothing was timed."""
        selector = self._between.selector if self._between is not None else None
        return 0.0 if selector is None else selector.startup_s

    @property
    def hops(self) -> list[HopTiming]:
        """The times of messages between hosts, the latest 65,536: to the first byte, and from first to last byte."""
        return [] if self._between is None else list(self._between.across.exchange.hops)

    # -------------------------------------------------------------------------------------------- life

    def set_timeout(self, timeout: float | timedelta) -> None:
        """Wait no longer than this, a `timedelta` or seconds, for other ranks in one collective from now on."""
        timeout_s = timeout_seconds(timeout)
        self.settings = replace(self.settings, timeout_s=timeout_s)
        if self.local is not None:
            self.local.set_timeout(timeout_s)
        if self._between is not None:
            self._between.across.set_timeout(timeout_s)

    def __repr__(self) -> str:
        hosts = f" on {len(self.roster.hosts)} hosts" if len(self.roster.hosts) > 1 else ""
        return (
            f"<ringside.GroupCommunicator rank {self.rank} of {self.size}{hosts}{', closed' if self._closed else ''}>"
        )

    def _release(self, finish_s: float) -> None:
        if self._between is not None:
            self._between.across.close(patience_s=max(finish_s, ABANDON_S))
        if self.local is not None:
            (self.local.close if finish_s else self.local.abort)()

    # -------------------------------------------------------------------------------------------- inside

    def _perform(self, call: CoreRequest, result: Callable[[], Any], async_op: bool) -> Any:
        def job() -> Any:
            self.execute(call, 0, False)
            call.flat.write_back()
            return result()

        return self._in_turn(job, async_op)

    def execute(self, call: CoreRequest, stamp_ns: int, background: bool, storage: Storage | None = None) -> None:
        """Carry out a collective on the thread that calls; see `Collectives`."""
        run_collective(self._several.across, call, canonical=self._options.reproducible)

    @property
    def _several(self) -> BetweenHosts:
        assert self._between is not None, "on one host the communicator of that host is called"
        return self._between

    def _in_turn(self, job: Callable[[], Any], async_op: bool) -> Any:
        """Run a job here, or after those under way."""
        if self._is_forked():
            raise ClosedError("this is a forked child: the communicator is its parent's")
        if async_op:
            return self.submit(job)
        if self._must_queue():
            return self.submit(job).result()
        if self._closed:
            raise ClosedError("the communicator is closed on this rank")
        return job()


_at_exit = AtExit()
