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
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch.distributed.distributed_c10d import Store
from torch.nn.parallel import DistributedDataParallel

from ringside import _core
from ringside._core import numpy_kernels as twins
from ringside.isolation import Guard
from ringside.monitor.alerts.book import as_text
from ringside.monitor.replicas import Check, ReplicaCheck
from ringside.monitor.verdict import VerdictEvent
from ringside.text import name_ranks

KEPT = 512
KEPT_S = 10.0  # what is posted: the checks of so many seconds,
FEWEST_KEPT = 4  # and never fewer than these
LISTS_BYTES = 1 << 16
"""Room for the newest lists of digests per parameter; there are always two."""
PATIENCE_S = 30.0  # from the first check on, for ranks that have posted nothing
PIECE = 1 << 21
_SIGNED = 1 << 63  # int64 is the widest integer that devices multiply; digests are uint64

_log = logging.getLogger(__name__)
_Kept = tuple[int, bytes]
_encode = msgspec.msgpack.Encoder().encode
_checks = msgspec.msgpack.Decoder(list[Check]).decode
_lists = msgspec.msgpack.Decoder(list[_Kept]).decode


class _PendingDigests(NamedTuple):
    """Digests of a device's parameters on their way to the host."""

    number: int
    step: int
    at_s: float
    values: list[int | None]
    parts: list[tuple[list[int], torch.Tensor]]
    events: list[Any]


class ParameterDigests:
    """This rank's digests of one model's parameters.

    `check` belongs to the training thread, `post` to the monitor's.

    Args:
        store: The model's part of the job's store.
        rank: This rank.
        named: The parameters that all replicas share, with their names. They are not kept alive.
        every: Steps between two comparisons, at least 1. The first is after the first step.

    Attributes:
        names: The parameters' names.
        off: Whether it takes no more digests.
    """

    def __init__(self, store: Store, rank: int, named: Sequence[tuple[str, torch.Tensor]], every: int) -> None:
        self.names = [as_text(name) for name, _ in named]
        self.off = not named
        self._store, self._rank, self._every = store, rank, every
        self._parameters = [weakref.ref(parameter) for _, parameter in named]
        self._next = 1
        self._pending: _PendingDigests | None = None
        self._guard = threading.Lock()
        self._kept: deque[Check] = deque(maxlen=KEPT)
        self._listed: deque[_Kept] = deque(maxlen=max(LISTS_BYTES // (8 * max(len(named), 1)), 2))
        self._news = False

    def check(self, number: int, step: int) -> bool:
        """Take digests, if it is time to; return whether it was.

        Args:
            number: Gradient synchronisations of the model so far.
            step: The training step that has just ended.
        """
        if self._pending is None and number < self._next:
            return False
        is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if self.off or (is_used and torch.cuda.is_current_stream_capturing()):
            return False  # during a capture of a CUDA graph no event may be queried, and a digest would be part of it
        if self._pending is not None:
            self._collect(self._pending)
        if number < self._next:
            return False
        self._next = (number // self._every + 1) * self._every
        try:
            self.digest_parameters(number, step)
        except Exception as error:
            self.abort(error)
        return True

    def abort(self, error: Exception) -> None:
        """Take no digests any more, and warn."""
        if not self.off:
            self.off = True
            with self._guard:
                self._kept.clear()
                self._news = True
            Guard(warning="parameters are not compared between ranks any more").trip(error)

    def post(self) -> None:
        """Put what is new into the store, for rank 0."""
        with self._guard:
            if not self._news:
                return
            self._news = False
            kept, lists = list(self._kept), list(self._listed)
        # The checks of the last seconds, and a few more: rank 0 reads those of all ranks at once. None at all where
        # this rank takes no more digests: then it is not waited for.
        since = kept[-1].at_s - KEPT_S if kept else 0.0
        few = len(kept) - FEWEST_KEPT
        checks = [check for index, check in enumerate(kept) if index >= few or check.at_s >= since]
        self._store.set(f"lists/{self._rank}", _encode(lists))  # type: ignore[arg-type]  # bytes are taken as they are
        self._store.set(f"checks/{self._rank}", _encode(checks))  # type: ignore[arg-type]

    def own(self) -> tuple[list[Check], list[_Kept]]:
        """Return this rank's newest checks and lists."""
        with self._guard:
            return list(self._kept), list(self._listed)

    def digest_parameters(self, number: int, step: int) -> None:
        """Digest the parameters as they are now, as the check of that number, after that step."""
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
            pending = _PendingDigests(number, step, time.monotonic(), values, [], [])
            for places in elsewhere.values():
                digests = torch.stack([device_digest(parameters[place]) for place in places])
                if not digests.is_cuda:
                    pending.parts.append((places, digests.cpu()))
                    continue
                # Into pinned memory, so that the copy is queued behind the work of this stream, and not waited for.
                host = torch.empty(len(places), dtype=torch.int64, pin_memory=True)
                with torch.cuda.device(digests.device):
                    host.copy_(digests, non_blocking=True)
                    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    event.record()
                pending.parts.append((places, host))
                pending.events.append(event)
        self._collect(pending)

    def _collect(self, pending: _PendingDigests) -> None:
        """Keep a check for `post`; one that the device still works on is collected by a later `check`."""
        if not all(event.query() for event in pending.events):
            self._pending = pending
            return
        self._pending = None
        for places, host in pending.parts:
            for place, value in zip(places, host.tolist(), strict=True):
                pending.values[place] = value % (2 * _SIGNED)
        listed = np.array(pending.values, dtype=np.uint64).tobytes()
        combined = twins.digest(np.frombuffer(listed, np.uint8))
        with self._guard:
            self._kept.append(Check(pending.number, pending.step, combined, pending.at_s))
            self._listed.append((pending.number, listed))
            self._news = True


class DigestComparison:
    """Rank 0's part: reads all ranks' digests of one model and compares them.

    Args:
        store: The model's part of the job's store.
        size: Number of ranks.
        digests: Rank 0's own.
        model: What the model is called.
    """

    def __init__(self, store: Store, size: int, digests: ParameterDigests, model: str = "") -> None:
        self.digests, self._store = digests, store
        self._replicas = ReplicaCheck(range(size), digests.names, model)
        self._deadline: float | None = None
        self._all_posted = False

    def changes(self) -> list[VerdictEvent]:
        """Return the verdicts, and those that are over, since the last call."""
        checks, _ = self.digests.own()
        if not checks or checks[-1].number <= self._replicas.judged or len(self._replicas.ranks) < 2:
            return []
        if not self._all_posted and not self._have_posted():
            return []
        posted = {rank: _checks(raw) for rank, raw in self._read("checks").items()}
        self._replicas.without([rank for rank, its_checks in posted.items() if not its_checks])
        return self._replicas.judge({**posted, 0: checks}, self._lists)

    def _have_posted(self) -> bool:
        """Whether every rank has posted something; a rank that never does is left out after a while."""
        others = self._replicas.ranks[1:]
        self._all_posted = self._store.check([f"checks/{rank}" for rank in others])
        if self._deadline is None:
            self._deadline = time.monotonic() + PATIENCE_S
        if not self._all_posted and time.monotonic() > self._deadline:
            missing = [rank for rank in others if not self._store.check([f"checks/{rank}"])]
            _log.warning("%s take no part in comparing parameters", name_ranks(missing))
            self._replicas.without(missing)
            self._all_posted = True
        return self._all_posted

    def _read(self, kind: str) -> dict[int, bytes]:
        others = self._replicas.ranks[1:]
        keys = [f"{kind}/{rank}" for rank in others]
        try:
            # 64 at a time: a store sends no more than so many of the larger lists at once.
            parts = [keys[begin : begin + 64] for begin in range(0, len(keys), 64)]
            values = [value for part in parts for value in self._store.multi_get(part)]
        except (AttributeError, NotImplementedError, RuntimeError):  # not every store can
            values = [self._store.get(key) for key in keys]
        return dict(zip(others, values, strict=True))

    def _lists(self, number: int) -> dict[int, list[int]]:
        kept = {0: self.digests.own()[1], **{rank: _lists(raw) for rank, raw in self._read("lists").items()}}
        listed = {rank: dict(lists).get(number) for rank, lists in sorted(kept.items())}
        return {rank: np.frombuffer(raw, np.uint64).tolist() for rank, raw in listed.items() if raw is not None}


def shared_parameters(model: DistributedDataParallel) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters that DDP keeps the same on all ranks, with their names."""
    own = set(getattr(model, "parameters_to_ignore", ()))
    return [(name, parameter) for name, parameter in model.module.named_parameters() if name not in own]


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
    start = _start(tensor.dtype, tuple(tensor.shape))
    signed = start - 2 * _SIGNED if start >= _SIGNED else start
    value = torch.full((), signed, dtype=torch.int64, device=raw.device)
    row = 8 * twins.DIGEST_BLOCK
    for first in range(0, len(raw), 8 * piece):
        part = raw[first : first + 8 * piece]
        if len(part) % row or part.storage_offset() % 8:  # the last one, or one that cannot be viewed as words
            part = torch.nn.functional.pad(part, (0, -len(part) % row))
        # As `_core.digest`: every block's words are mixed, weighted and summed, and the sums are a polynomial's
        # coefficients, all of it modulo 2**64.
        words = part.view(torch.int64).view(-1, twins.DIGEST_BLOCK)
        mixed = (words >> 31).bitwise_and_((1 << 33) - 1).bitwise_xor_(words)
        sums = mixed.mul_(_weights(words.device)).sum(1)
        powers = _powers(len(sums), words.device)
        value = value * powers[0] + (sums * powers[1:]).sum()
    return value


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
