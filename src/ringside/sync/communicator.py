"""`Communicator(group)`: Ringside's collectives among the ranks of a process group, on one host or several."""

from __future__ import annotations

import atexit
import copy
import functools
import importlib.metadata
import itertools
import math
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringside import _core
from ringside.engine import Communicator as HostCommunicator
from ringside.engine import groups
from ringside.engine.across import Across, Reduction
from ringside.engine.calls import Call, checked_op
from ringside.engine.choice import NATIVE, Choice
from ringside.engine.collectives import Collectives
from ringside.engine.drift import EVERY_NOTED, LARGE_BYTES
from ringside.engine.dtypes import ITEM_BYTES, dtype_code
from ringside.engine.exchange import Exchange
from ringside.engine.exchange_run import Hop
from ringside.engine.local_lanes import LocalLanes
from ringside.engine.log import AcrossLog, CollectiveLog
from ringside.engine.moves import carry_out
from ringside.engine.regions import Storage
from ringside.engine.reproducible import canonical_choice, refuse_other_orders
from ringside.engine.roster import Roster, exchange_offers, make_roster, own_offer
from ringside.engine.select import Selector
from ringside.engine.settings import Settings
from ringside.engine.tensors import Flat, flatten
from ringside.engine.transports.torch_native import TorchNative
from ringside.engine.transports.torch_p2p import TorchPeerToPeer
from ringside.engine.weights import own_weight
from ringside.engine.wire import Wire
from ringside.errors import ClosedError, MismatchError, UsageError
from ringside.schedule import Schedule
from ringside.sync.group import group_store
from ringside.sync.switch import join_switch

_PATHS = ("one_shot", "direct")  # inside a host these are ways of their own, not programs
_MOST_READY = 128
_ABANDON_S = 2.0  # what this rank has sent last may still be on its way


class Communicator(Collectives):
    """Collectives among the ranks of a torch.distributed process group.

    Ranks that can share memory are found and use it; between hosts messages travel over a Gloo group of our own, made
    over the job's store. Making one is a collective: every rank of the group makes it, in the same order. Use it from
    one thread at a time; asynchronous collectives run in order on a thread of its own.

    Args:
        group: A process group with at least 2 ranks, this one among them; None: the default group.
        timeout_s: Longest wait for other ranks in one collective, seconds (default RINGSIDE_TIMEOUT_S, else 1800).
        algorithm: How all-reduces between hosts are carried out, such as `ring` or `hosts/ring`
            (`ringside.engine.choice.Choice`; default RINGSIDE_ALGORITHM); None: chosen by measurement.
        wire_dtype: `bfloat16` or `float16`: how float32 elements travel between hosts (default RINGSIDE_WIRE_DTYPE);
            the error is stated in `ringside.engine.wire`.
        reproducible: Results do not depend on algorithm, message size, bucket layout or the ranks' hosts: every
            element is ((x0 + x1) + x2) + ... (default RINGSIDE_REPRODUCIBLE=1).
        switch: A reducer takes part as an additional vertex (`algorithm="in_network"`).
        machine: What tells hosts apart, in place of what the kernel says (for tests): ranks with equal values share
            memory.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        roster: Which ranks are on which host.

    Raises:
        MismatchError: Ranks run different versions or have different settings; names who differs.
        UsageError: The group has fewer than 2 ranks, or there is no such algorithm.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float | None = None,
        algorithm: str | None = None,
        wire_dtype: str | None = None,
        reproducible: bool | None = None,
        switch: bool = False,
        machine: str = "",
    ) -> None:
        group = group if group is not None else dist.distributed_c10d._get_default_group()
        store = group_store(group, "communicator")
        options, problem = _Options.or_problem(timeout_s, algorithm, wire_dtype, reproducible, switch)
        self._build(store, dist.get_rank(group), dist.get_world_size(group), options, machine, problem)

    @staticmethod
    def over(store: Store, rank: int, size: int, *, timeout_s: float | None = None) -> Communicator:
        """Return a communicator of ranks that have a store in common and no process group; all of them make it.

        Args:
            store: A part of the job's store that only this communicator uses.
            rank: This rank.
            size: Number of ranks, at least 2.
            timeout_s: Longest wait for other ranks in one collective, seconds (default as for `Communicator`).
        """
        options, problem = _Options.or_problem(timeout_s, None, None, None, False)
        communicator = object.__new__(Communicator)
        communicator._build(store, rank, size, options, "", problem)
        return communicator

    def _build(self, store: Store, rank: int, size: int, options: _Options, machine: str, problem: str = "") -> None:
        self.rank, self.size, self._options, self._machine = rank, size, options, machine
        self.settings = options.settings
        self._store = store
        self._splits = itertools.count(1)
        objection = "" if _core.available() else "the native core is not installed"
        offer = own_offer(options.agreed(), objection, machine, problem)
        offers = exchange_offers(store, rank, size, offer, timeout_s=options.settings.timeout_s)
        self.roster: Roster = make_roster(rank, offers)
        self.log: AcrossLog | CollectiveLog = AcrossLog()
        self._selector: Selector | None = None
        self._ready: dict[tuple[int, int, str, str | Schedule | None], _Ready] = {}
        self._ended = 0.0
        self._begin()
        self.local: HostCommunicator | None = None
        self._across: Across | None = None
        self._number = next(_numbers)
        _open.add(self)
        try:
            self._open_all()
        except BaseException:
            self._leave(0.0)
            raise

    def _open_all(self) -> None:
        options = self._options
        several = len(self.roster.hosts) > 1
        if options.switch and not several:
            raise UsageError("switch=True needs ranks on several hosts: on one host there is no switch to reduce at")
        self.local = self._open_local()
        if not several:
            self._stay_inside()
            return
        self._across = self._open_across()
        if options.choice is None and not options.reproducible:
            key = {"wire_dtype": options.wire.dtype if options.wire else "float32", "torch": str(torch.__version__)}
            self._selector = Selector(self._across, {**key, **options.agreed()}, wire=options.wire)
            self._selector.start()

    # -------------------------------------------------------------------------------------------- collectives

    def all_reduce(
        self,
        x: Any,
        op: str = "sum",
        async_op: bool = False,
        *,
        scale: float = 1.0,
        algorithm: str | Schedule | None = None,
        weights: float | Sequence[float] | None = None,
    ) -> Any:
        """Reduce a tensor over all ranks, in place; every rank ends with bit-identical elements.

        Args:
            x: torch CPU tensor or NumPy array of any shape, equal shape and dtype on all ranks.
            op: sum, avg, prod, min, max, band, bor or bxor.
            async_op: Return a `Work` at once; the tensor is ready after its `wait()`.
            scale: Multiply each contribution first (floating dtypes with sum or avg only).
            algorithm: How, such as `ring` or `hosts/ring`; None: as the communicator was made.
            weights: With avg of a floating dtype, a weighted mean: this rank's own weight, or one weight per rank.

        Returns:
            `x` itself, or a `Work` whose `wait()` returns it.

        Raises:
            UsageError, UnsupportedError: This call cannot be; nothing was sent.
            MismatchError, PeerLostError, DeadlineError: The tensor's content is undefined and, between hosts, the
                communicator is broken; they name the rank and its host.
        """
        flat = flatten(x)
        key = None
        if op.__class__ is str and (algorithm is None or algorithm.__class__ is str) and scale == 1.0:
            key = flat.numel, flat.dtype, op, algorithm
            if weights is None and not async_op and key in self._ready and self._at_once(flat, self._ready[key]):
                return x
        code = checked_op(flat, op, scaled=scale != 1.0 or weights is not None)
        if weights is not None and (op != "avg" or scale != 1.0):
            raise UsageError(f"weights= is for op='avg' without a scale, not for op={op!r}, scale={scale!r}")
        own = own_weight(weights, self.rank, self.size) if weights is not None else None
        fixed = self._fixed(algorithm, flat)

        def job() -> Any:
            ready = self._all_reduce(flat, self._reduction(flat.dtype, code, scale, own), fixed)
            if ready is not None and key is not None:
                if len(self._ready) >= _MOST_READY:
                    self._ready.clear()
                self._ready[key] = ready
            flat.write_back()
            return x

        return self._in_turn(job, async_op)

    def all_reduce_storage(self, flat: Flat, storage: Storage | None, *, scale: float, stamp_ns: int) -> None:
        """All-reduce (sum) a gradient bucket on the thread that calls; see the communicator of one host.

        Args:
            flat: The tensor.
            storage: The shareable storage it lies in; None: a private tensor.
            scale: Multiplies each contribution.
            stamp_ns: When the tensor was ready, on the monotonic clock.
        """
        finish = self.begin_storage(flat, storage, scale=scale, stamp_ns=stamp_ns)
        if finish is not None:
            finish()

    def begin_storage(
        self, flat: Flat, storage: Storage | None, *, scale: float, stamp_ns: int
    ) -> Callable[[], None] | None:
        """Begin to all-reduce a bucket, and return what finishes it: the next one may be begun before.

        None is returned where it is done already. Arguments as for `all_reduce_storage`; all ranks begin and finish
        in the same order.
        """
        if self._across is None:
            self.all_reduce_storage(flat, storage, scale=scale, stamp_ns=stamp_ns)
            return None
        what = Reduction(flat.dtype, 0, scale, wire=self._options.wire, storage=storage)
        size_bytes = flat.numel * ITEM_BYTES[flat.dtype]
        choice, judged = self._choose(size_bytes, what, self._fixed(None, flat))
        began = time.perf_counter()
        under_way = self._across.begin(flat.address, flat.numel, what, choice)

        def finish() -> None:
            under_way.finish()
            ended = time.perf_counter()
            took_s, self._ended = ended - max(began, self._ended), ended  # it queued behind the one before it
            if judged is not None:
                judged.after(size_bytes, choice, took_s, dtype=what.dtype)
            assert isinstance(self.log, AcrossLog), "on one host the communicator of that host is called"
            self.log.note(str(choice), time.monotonic_ns() - stamp_ns, size_bytes)

        return finish

    def barrier(self) -> None:
        """Return when every rank has called it."""
        nothing = Flat(0, 0, 0, (0,), None)
        self._perform(Call("barrier", nothing, 0), lambda: None, False)

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

    def split(self, color: int | None, key: int | None = None) -> Communicator | HostCommunicator | None:
        """Return a communicator over the ranks that give the same color; every rank must call it.

        Args:
            color: Names this rank's group; None: this rank is in none.
            key: Ranks in the group are ordered by it, and where it is equal by rank here; None: by rank here.

        Returns:
            The group's communicator (of one rank, if nobody else gave this color), or None without a color.
        """
        rows = self.all_gather(np.array([groups.request(color, key, self.rank)], dtype=np.int64))
        number = next(self._splits)
        if color is None:
            return None
        members = groups.members_of(rows, self.rank)
        if len(members) == 1:
            return HostCommunicator(f"{self.roster.keys[0]}/{number}/{color}", 0, 1, self.settings)
        child = object.__new__(Communicator)
        store = PrefixStore(f"split/{number}/{color}", self._store)
        options = self._options.without_switch()
        child._build(store, members.index(self.rank), len(members), options, self._machine)
        return child

    def explain(self, size_bytes: int) -> str:
        """Say how an all-reduce of float32 of that size is carried out and why: a ranked table, predicted and measured.

        Args:
            size_bytes: Of the tensor.
        """
        if self._selector is not None:
            return str(self._selector.explain(size_bytes))
        if self._across is None:
            return f"{size_bytes} bytes: shared memory, all {self.size} ranks are on one host"
        if self._options.choice is not None:
            return f"{size_bytes} bytes: {self._options.choice}, as asked for"
        return f"{size_bytes} bytes: {canonical_choice(size_bytes, self.size)}, the reproducible one for this size"

    def settled(self, size_bytes: int) -> bool:
        """Tell whether it is decided how all-reduces of float32 of that size are carried out.

        The first few of a size are carried out by the promising choices in turn.

        Args:
            size_bytes: Of the tensor.
        """
        return self._selector is None or self._selector.settled(size_bytes)

    @property
    def inside(self) -> HostCommunicator | None:
        """The host's communicator where it may be called straight: all ranks share memory, nothing is asked for."""
        plain = self._across is None and self._options.choice is None and not self._options.reproducible
        return self.local if plain else None

    @property
    def revisions(self) -> tuple[str, ...]:
        """What was changed during the run because the network had changed, and why, in words, oldest first."""
        return () if self._selector is None else tuple(self._selector.history)

    @property
    def hops(self) -> list[Hop]:
        """What each message between hosts took, the latest 65,536: time to first byte, first to last byte."""
        return [] if self._across is None else list(self._across.exchange.hops)

    # -------------------------------------------------------------------------------------------- life

    def __repr__(self) -> str:
        hosts = f" on {len(self.roster.hosts)} hosts" if len(self.roster.hosts) > 1 else ""
        return f"<ringside.Communicator rank {self.rank} of {self.size}{hosts}{', closed' if self._closed else ''}>"

    def _let_go(self, finish_s: float) -> None:
        if self._across is not None:
            self._across.close(patience_s=max(finish_s, _ABANDON_S))
        if self.local is not None:
            (self.local.close if finish_s else self.local.abandon)()

    # -------------------------------------------------------------------------------------------- inside

    def _perform(self, call: Call, result: Callable[[], Any], async_op: bool) -> Any:
        def job() -> Any:
            self.carry(call, 0, False)
            call.flat.write_back()
            return result()

        return self._in_turn(job, async_op)

    def carry(self, call: Call, stamp_ns: int, background: bool, storage: Storage | None = None) -> None:
        """Carry out a collective on the thread that calls; see `Collectives`."""
        assert self._across is not None, "on one host the communicator of that host is called"
        carry_out(self._across, call)

    def _in_turn(self, job: Callable[[], Any], async_op: bool) -> Any:
        """Run a job here, or after those under way."""
        if self._is_forked():
            raise ClosedError("this is a forked child: the communicator is its parent's")
        if async_op:
            return self.submit(job)
        if self._must_queue():
            return self.submit(job).wait()
        if self._closed:
            raise ClosedError("the communicator is closed on this rank")
        return job()

    def _at_once(self, flat: Flat, ready: _Ready) -> bool:
        """Carry out a small all-reduce that was called before, with nothing left to be found out; False: it cannot be.

        At a few bytes every line that is not needed shows: a rank that has slept finds none of them in the cache.
        """
        selector = ready.selector
        if self._closed or self._background is not None or self._owner_pid != os.getpid():
            return False
        if selector is None:
            ready.go(flat.address)
        elif ready.version != selector.version:
            return False
        else:
            calls = selector.calls[ready.size_class] = selector.calls[ready.size_class] + 1
            began = time.perf_counter()
            ready.go(flat.address)
            if calls % EVERY_NOTED == 0:  # as the selector itself counts those that come another way
                selector.note(ready.size_bytes, ready.choice, time.perf_counter() - began, flat.dtype)
        flat.write_back()
        return True

    def _all_reduce(self, flat: Flat, what: Reduction, fixed: Choice | None) -> _Ready | None:
        """Reduce here and now; without a fixed way, as the selector says at this point of the run.

        Returns what the next one of its kind may be carried out with at once.
        """
        assert self._across is not None, "on one host the communicator of that host is called"
        size_bytes = flat.numel * ITEM_BYTES[flat.dtype]
        choice, judged = self._choose(size_bytes, what, fixed)
        began = time.perf_counter()
        self._across.all_reduce(flat.address, flat.numel, what, choice)
        if judged is not None:
            judged.after(size_bytes, choice, time.perf_counter() - began, dtype=what.dtype)
            if size_bytes >= LARGE_BYTES or not judged.settled(size_bytes):
                return None
            choice = judged.choose(size_bytes, what.dtype, what.op)
        small = self._across.prepared(flat.numel, what, choice)
        if small is None:
            return None
        go = functools.partial(self._across.carry_out, small)
        if judged is None:
            return _Ready(go, size_bytes, choice)
        return _Ready(go, size_bytes, choice, judged, judged.version, judged.size_class(size_bytes))

    def _choose(self, size_bytes: int, what: Reduction, fixed: Choice | None) -> tuple[Choice, Selector | None]:
        """Return the way, and who is to be told what it took."""
        if fixed is not None or self._selector is None:
            return fixed or canonical_choice(size_bytes, self.size), None
        return self._selector.choose(size_bytes, what.dtype, what.op), self._selector

    def _reduction(self, dtype: int, op: int, scale: float, weight: tuple[float, int] | None) -> Reduction:
        wire = self._options.wire
        if weight is None:
            return Reduction(dtype, op, scale, wire=wire)
        own, tag = weight
        told = np.zeros((self.size, 2))
        flat, to = flatten(np.array([own, float(tag)])), flatten(told)
        bounds = list(range(0, 2 * self.size + 1, 2))
        self.carry(Call("all_gather", flat, 2 * self.size, bounds, out=to.address, keeps=to), 0, False)
        if len(set(told[:, 1])) > 1:
            raise MismatchError(f"all_reduce on rank {self.rank}: ranks gave different lists of weights")
        scales = tuple(told[:, 0].tolist())
        if not sum(scales) > 0:
            raise UsageError("the weights of all ranks sum to 0, so there is no mean")
        return Reduction(dtype, op, own, scales=scales, divisor=math.fsum(scales), wire=wire)

    def _fixed(self, algorithm: str | Schedule | None, flat: Flat) -> Choice | None:
        """Return what was asked for, by call or by communicator; None: nothing."""
        if isinstance(algorithm, Schedule):
            raise UsageError("between hosts an algorithm is given by name")
        choice = Choice.parse(algorithm) if algorithm else self._options.choice
        if choice is not None and self._options.reproducible:
            refuse_other_orders(choice, self.size, flat.dtype)
        return choice

    def _stay_inside(self) -> None:
        """All ranks share memory: call the host's communicator straight."""
        assert self.local is not None
        names = [name for name, value in vars(Collectives).items() if callable(value) and not name.startswith("_")]
        for name in (*names, "all_reduce_storage", "barrier", "empty", "split", "submit"):
            setattr(self, name, getattr(self.local, name))
        self.all_reduce = self._all_reduce_inside  # type: ignore[method-assign]
        self.log = self.local.log

    def _all_reduce_inside(
        self, x: Any, op: str = "sum", async_op: bool = False, *, algorithm: str | Schedule | None = None, **how: Any
    ) -> Any:
        """All-reduce where all ranks share memory; there is nothing between hosts that a choice could be about."""
        assert self.local is not None
        way = algorithm if isinstance(algorithm, Schedule) else self._way_inside(algorithm, x)
        return self.local.all_reduce(x, op, async_op, algorithm=way, **how)

    def _way_inside(self, algorithm: str | None, x: Any) -> str | Schedule | None:
        choice = Choice.parse(algorithm) if algorithm else self._options.choice
        if choice is None or choice.over != "ranks" or choice.algorithm == NATIVE:
            return None
        if self._options.reproducible:
            refuse_other_orders(choice, self.size, flatten(x).dtype)
        return choice.algorithm if choice.algorithm in _PATHS else choice.schedule(self.size)

    def _open_local(self) -> HostCommunicator | None:
        if self.roster.local_size == 1:
            return None
        key = self.roster.keys[self.roster.host]
        return HostCommunicator(key, self.roster.local_rank, self.roster.local_size, self.settings)

    def _open_across(self) -> Across:
        timeout_s = self.settings.timeout_s
        switch = self._options.switch
        messages: Store = PrefixStore("messages", self._store)
        if switch:
            messages = join_switch(self._store, self.roster, self.settings.message_bytes)
        transport = TorchPeerToPeer(messages, self.rank, self.size + switch, timeout_s=timeout_s)
        native = TorchNative(PrefixStore("native", self._store), self.rank, self.size, timeout_s=timeout_s)
        lanes = LocalLanes(self.local) if self.local is not None else None
        exchange = Exchange(transport, segment_bytes=self.settings.message_bytes)
        return Across(self.roster, exchange, lanes, native, timeout_s=timeout_s, block_bytes=self.settings.block_bytes)


class _Ready(NamedTuple):
    """A small all-reduce for which all is ready.

    Args:
        go: Carries it out on the elements at an address.
        size_bytes: Of the tensor.
        choice: How.
        selector: Who chose it and is told what it took; None: it was asked for.
        version: Of the selector's choices; it is of no more use when there are others.
        size_class: The selector's, of that size.
    """

    go: Callable[[int], None]
    size_bytes: int
    choice: Choice
    selector: Selector | None = None
    version: int = 0
    size_class: int = 0


class _Options:
    """What a communicator was asked for; a sub-group has its parent's."""

    def __init__(
        self, settings: Settings, algorithm: str | None, wire_dtype: str | None, reproducible: bool, switch: bool
    ) -> None:
        self.settings = settings
        self.choice = Choice.parse(algorithm) if algorithm else None
        self.wire = Wire(wire_dtype) if wire_dtype else None  # type: ignore[arg-type]
        self.reproducible, self.switch = reproducible, switch
        self.selection = os.environ.get("RINGSIDE_SELECTION") or "measured"
        if reproducible and self.wire is not None:
            raise UsageError(
                "wire_dtype rounds what travels, so results would depend on who is where: not reproducible"
            )

    @staticmethod
    def or_problem(*how: Any) -> tuple[_Options, str]:
        """Return what was asked for, or what is wrong with it: the other ranks wait to hear of that."""
        try:
            return _Options.of_environment(os.environ, *how), ""
        except UsageError as error:
            return _Options(Settings(), None, None, False, False), str(error)

    @staticmethod
    def of_environment(
        environ: Mapping[str, str],
        timeout_s: float | None,
        algorithm: str | None,
        wire_dtype: str | None,
        reproducible: bool | None,
        switch: bool,
    ) -> _Options:
        """Return what was given explicitly, else by environment."""
        if reproducible is None:
            reproducible = environ.get("RINGSIDE_REPRODUCIBLE", "") not in ("", "0")
        return _Options(
            Settings.of_environment(environ, timeout_s=timeout_s),
            algorithm or environ.get("RINGSIDE_ALGORITHM"),
            wire_dtype or environ.get("RINGSIDE_WIRE_DTYPE"),
            reproducible,
            switch,
        )

    def without_switch(self) -> _Options:
        """Return these for a sub-group, which the reducer does not know."""
        child = copy.copy(self)
        child.switch = False
        return child

    def agreed(self) -> dict[str, str]:
        """Return what all ranks must have alike, by name."""
        return {
            "version of ringside": importlib.metadata.version("ringside"),
            "RINGSIDE_ONE_SHOT_BYTES, _SEGMENT_BYTES, _MESSAGE_BYTES, _BLOCK_BYTES": str(self.settings.agreed()),
            "algorithm (RINGSIDE_ALGORITHM)": str(self.choice or "by measurement"),
            "wire_dtype (RINGSIDE_WIRE_DTYPE)": self.wire.dtype if self.wire else "float32",
            "reproducible (RINGSIDE_REPRODUCIBLE)": str(self.reproducible),
            "switch": str(self.switch),
            "RINGSIDE_SELECTION": self.selection,
        }


_numbers = itertools.count()
_open: weakref.WeakSet[Communicator] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Leave in good order where the program did not: no thread may wait in Gloo when the interpreter goes away."""
    for communicator in sorted(_open, key=lambda each: each._number):  # alike on all ranks, which wait for each other
        communicator.close()
