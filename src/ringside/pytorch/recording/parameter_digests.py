"""Digests of a model's parameters: taken by the training thread every K steps, compared by rank 0 behind its back.

A digest covers the bits of a parameter in the order of its elements, however they lie in memory, and its dtype and
shape: a NaN equals itself, 0.0 and -0.0 differ. On the host it is one pass over memory. On a device it is computed
there, and fetched when it has arrived, never waited for.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.nn.parallel import DistributedDataParallel

from ringside import _core
from ringside._core import numpy_kernels as twins
from ringside.monitor.alerts.book import as_text
from ringside.monitor.replicas import Check, ReplicaCheck
from ringside.monitor.verdict import VerdictEvent
from ringside.pytorch.store import group_store

KEPT = 512
KEPT_S = 10.0
FEWEST_KEPT = 4
LISTS_BYTES = 1 << 16
"""Room for the newest lists of digests per parameter; there are always two."""
PATIENCE_S = 30.0
PIECE = 1 << 21
_SIGNED = 1 << 63

_log = logging.getLogger("ringside")
_Kept = tuple[int, bytes]
_encode = msgspec.msgpack.Encoder().encode
_checks = msgspec.msgpack.Decoder(list[Check]).decode
_lists = msgspec.msgpack.Decoder(list[_Kept]).decode


class _Fetch(NamedTuple):
    """Digests of a device's parameters on their way to the host."""

    number: int
    step: int
    at_s: float
    values: list[int | None]
    parts: list[tuple[list[int], torch.Tensor]]
    events: list[Any]


class ParameterDigests:
    """What this rank says of one model's parameters.

    `look` belongs to the training thread, `post` to the monitor's.

    Args:
        store: The model's part of the job's store.
        rank: This rank.
        named: The parameters that all replicas share, with their names. They are not kept alive.
        every: Steps between two comparisons, at least 1. The first is after the first step.

    Attributes:
        names: The parameters' names.
        off: Whether it has given up.
    """

    def __init__(self, store: Store, rank: int, named: Sequence[tuple[str, torch.Tensor]], every: int) -> None:
        self.names = [as_text(name) for name, _ in named]
        self.off = not named
        self._store, self._rank, self._every = store, rank, every
        self._parameters = [weakref.ref(parameter) for _, parameter in named]
        self._next = 1
        self._fetch: _Fetch | None = None
        self._guard = threading.Lock()
        self._kept: deque[Check] = deque(maxlen=KEPT)
        self._listed: deque[_Kept] = deque(maxlen=max(LISTS_BYTES // (8 * max(len(named), 1)), 2))
        self._news = False

    def look(self, number: int, step: int) -> bool:
        """Take digests, if it is time to; return whether it was.

        Args:
            number: Gradient synchronisations of the model so far.
            step: The training step that has just ended.
        """
        if self._fetch is None and number < self._next:
            return False
        if self.off or _captures():
            return False
        if self._fetch is not None:
            self._collect(self._fetch)
        if number < self._next:
            return False
        self._next = (number // self._every + 1) * self._every
        try:
            self.take(number, step)
        except Exception as error:
            self.give_up(error)
        return True

    def give_up(self, error: Exception) -> None:
        """Take no digests any more, and say so."""
        if not self.off:
            self.off = True
            with self._guard:
                self._kept.clear()
                self._news = True
            _log.warning(
                "parameters are not compared between ranks any more (%s: %s); training goes on",
                type(error).__name__,
                error,
            )

    def post(self) -> None:
        """Tell the others what is new."""
        with self._guard:
            if not self._news:
                return
            self._news = False
            checks, lists = self._newest(), list(self._listed)
        self._store.set(f"lists/{self._rank}", _encode(lists))  # type: ignore[arg-type]  # bytes are taken as they are
        self._store.set(f"checks/{self._rank}", _encode(checks))  # type: ignore[arg-type]

    def own(self) -> tuple[list[Check], list[_Kept]]:
        """Return this rank's newest checks and lists."""
        with self._guard:
            return list(self._kept), list(self._listed)

    def _newest(self) -> list[Check]:
        """Those of the last seconds, and a few more: rank 0 reads them all at once."""
        if not self._kept:
            return []  # this rank has given up, and is not waited for
        since = self._kept[-1].at_s - KEPT_S
        few = len(self._kept) - FEWEST_KEPT
        return [check for index, check in enumerate(self._kept) if index >= few or check.at_s >= since]

    def take(self, number: int, step: int) -> None:
        """Digest the parameters as they are now, as the look of that number, after that step."""
        parameters = [parameter for ref in self._parameters if (parameter := ref()) is not None]
        if len(parameters) < len(self._parameters):
            self.off = True  # the model is gone, or its parameters were replaced by others
            return
        values: list[int | None] = [None] * len(parameters)
        elsewhere: dict[torch.device, list[int]] = {}
        with torch.no_grad():
            for place, parameter in enumerate(parameters):
                if parameter.is_cpu:
                    values[place] = digest(parameter)
                else:
                    elsewhere.setdefault(parameter.device, []).append(place)
            fetch = _Fetch(number, step, time.monotonic(), values, [], [])
            for places in elsewhere.values():
                _send_for(fetch, places, parameters)
        self._collect(fetch)

    def _collect(self, fetch: _Fetch) -> None:
        """Put a finished check where it will be told; one that is still under way is looked for later."""
        if not all(event.query() for event in fetch.events):
            self._fetch = fetch
            return
        self._fetch = None
        for places, host in fetch.parts:
            for place, value in zip(places, host.tolist(), strict=True):
                fetch.values[place] = value % (2 * _SIGNED)
        listed = np.array(fetch.values, dtype=np.uint64).tobytes()
        combined = twins.digest(np.frombuffer(listed, np.uint8))
        with self._guard:
            self._kept.append(Check(fetch.number, fetch.step, combined, fetch.at_s))
            self._listed.append((fetch.number, listed))
            self._news = True


class DigestComparison:
    """Rank 0's part: reads what all ranks say of one model and judges it.

    Args:
        store: The model's part of the job's store.
        size: Number of ranks.
        digests: Rank 0's own.
        model: What the model is called.
        now: Monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        size: int,
        digests: ParameterDigests,
        model: str = "",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.digests = digests
        self._store, self._now = store, now
        self._replicas = ReplicaCheck(range(size), digests.names, model)
        self._patience: float | None = None
        self._met = False

    def changes(self) -> list[VerdictEvent]:
        """Return the verdicts, and those that are over, since the last call."""
        checks, _ = self.digests.own()
        if not checks or checks[-1].number <= self._replicas.judged or len(self._replicas.ranks) < 2:
            return []
        if not self._met and not self._all_there():
            return []
        told = {rank: _checks(raw) for rank, raw in self._read("checks").items()}
        self._replicas.without([rank for rank, given in told.items() if not given])
        return self._replicas.judge({**told, 0: checks}, self._lists)

    def _all_there(self) -> bool:
        """Whether every rank has told something; who never does is left out after a while."""
        others = self._replicas.ranks[1:]
        self._met = self._store.check([f"checks/{rank}" for rank in others])
        if self._patience is None:
            self._patience = self._now() + PATIENCE_S
        if not self._met and self._now() > self._patience:
            missing = [rank for rank in others if not self._store.check([f"checks/{rank}"])]
            _log.warning("ranks %s take no part in comparing parameters", ", ".join(map(str, missing)))
            self._replicas.without(missing)
            self._met = True
        return self._met

    def _read(self, what: str) -> dict[int, bytes]:
        others = self._replicas.ranks[1:]
        keys = [f"{what}/{rank}" for rank in others]
        try:
            values = [value for few in _few(keys) for value in self._store.multi_get(few)]
        except (AttributeError, NotImplementedError, RuntimeError):  # not every store can
            values = [self._store.get(key) for key in keys]
        return dict(zip(others, values, strict=True))

    def _lists(self, number: int) -> dict[int, list[int]]:
        found = {rank: _list_of(number, _lists(raw)) for rank, raw in self._read("lists").items()}
        found[0] = _list_of(number, self.digests.own()[1])
        return {rank: digests for rank, digests in sorted(found.items()) if digests is not None}


def _few(keys: list[str]) -> list[list[str]]:
    """Return keys in parts whose values a store can send at once."""
    return [keys[begin : begin + 64] for begin in range(0, len(keys), 64)]


def _list_of(number: int, kept: Sequence[_Kept]) -> list[int] | None:
    raw = next((raw for of, raw in kept if of == number), None)
    return None if raw is None else np.frombuffer(raw, np.uint64).tolist()


def agree_on_digests(group: dist.ProcessGroup, every: int) -> int:
    """Return what rank 0 of the group wants. A collective."""
    store = group_store(group, "digests")
    if dist.get_rank(group) == 0:
        store.set("every", str(every))
    return int(store.get("every"))


def shared_parameters(model: DistributedDataParallel) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters that DDP keeps the same on all ranks, with their names."""
    own = set(getattr(model, "parameters_to_ignore", ()))
    return [(name, parameter) for name, parameter in model.module.named_parameters() if name not in own]


def shared_store(store: Store, number: int) -> Store:
    """Return the part of a session's store for the parameters of its model of this number."""
    return PrefixStore(f"digests/{number}", store)


# -------------------------------------------------------------------------------------------------- the digest


def digest(tensor: torch.Tensor) -> int:
    """Return the digest of a tensor on the host: 64 bits over its elements' bits in order, its dtype and shape."""
    flat = tensor.detach().contiguous()
    start = _start(tensor.dtype, tuple(tensor.shape))
    if _core.available():
        value: int = _core.native().digest(flat.data_ptr(), flat.numel() * flat.element_size(), start)
        return value
    return twins.digest(flat.reshape(-1).view(torch.uint8).numpy(), start)


def device_digest(tensor: torch.Tensor, piece: int = PIECE) -> torch.Tensor:
    """Return the same digest as an int64 tensor without dimensions on the tensor's own device, without waiting.

    Args:
        tensor: On any device.
        piece: So many words of 8 bytes are digested at once, as that takes a few times their memory.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    value = _constant(_start(tensor.dtype, tuple(tensor.shape)), raw.device)
    for first in range(0, len(raw), 8 * piece):
        value = _extend(value, raw[first : first + 8 * piece])
    return value


def _extend(value: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    """Return a device's digest extended by some bytes: whole blocks, or the last ones."""
    row = 8 * twins.DIGEST_BLOCK
    if len(raw) % row or raw.storage_offset() % 8:
        raw = torch.nn.functional.pad(raw, (0, -len(raw) % row))
    words = raw.view(torch.int64).view(-1, twins.DIGEST_BLOCK)
    mixed = (words >> 31).bitwise_and_((1 << 33) - 1).bitwise_xor_(words)
    sums = mixed.mul_(_weights(words.device)).sum(1)
    powers = _powers(len(sums), words.device)
    return value * powers[0] + (sums * powers[1:]).sum()


def _send_for(fetch: _Fetch, places: list[int], parameters: Sequence[torch.Tensor]) -> None:
    """Compute the digests of one device's parameters there and send them to the host."""
    values = torch.stack([device_digest(parameters[place]) for place in places])
    if not values.is_cuda:
        fetch.parts.append((places, values.cpu()))
        return
    host = torch.empty(len(places), dtype=torch.int64, pin_memory=True)
    with torch.cuda.device(values.device):
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    fetch.parts.append((places, host))
    fetch.events.append(event)


@functools.lru_cache(maxsize=1024)
def _start(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return twins.digest(np.frombuffer(f"{dtype} {shape}".encode(), np.uint8))


@functools.lru_cache(maxsize=16)
def _weights(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(twins.digest_weights().view(np.int64)).to(device)


@functools.lru_cache(maxsize=256)
def _powers(blocks: int, device: torch.device) -> torch.Tensor:
    """Powers of the base from `blocks` down to 0, int64 [blocks + 1]."""
    powers = np.full(blocks + 1, twins.DIGEST_BASE, dtype=np.uint64)
    powers[-1] = 1
    with np.errstate(over="ignore"):
        descending = np.cumprod(powers[::-1], dtype=np.uint64)[::-1].copy()
    return torch.from_numpy(descending.view(np.int64)).to(device)


def _captures() -> bool:
    """Tell whether a CUDA graph is being recorded, in which nothing may be asked."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def _constant(value: int, device: torch.device) -> torch.Tensor:
    return torch.full((), value - 2 * _SIGNED if value >= _SIGNED else value, dtype=torch.int64, device=device)
