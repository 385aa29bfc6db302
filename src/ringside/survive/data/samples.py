"""Which samples a step takes: from (seed, epoch, step) alone, never from the number of ranks.

An epoch is one order of the data set. A step takes the next so many of it and cuts them into micro-batches, the units
that ranks are given, take over from each other, and count by. So whoever computes a micro-batch computes the same
samples, and a job that goes on with another number of ranks goes on with the samples that are left.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from ringside.errors import UsageError

Indices = NDArray[np.int64]
Order = Callable[[int], Indices]
"""Gives the order of an epoch: int64 [samples]. It must give the same on every rank and whenever it is asked."""


def shuffled(size: int, seed: int) -> Order:
    """Return the order that shuffles `size` samples anew in every epoch."""
    return lambda epoch: np.random.default_rng((seed, epoch)).permutation(size).astype(np.int64)


@dataclass
class Samples:
    """The samples of every step.

    Args:
        size: Number of samples in an epoch.
        batch: Samples per step over all ranks, at least 1; the last step of an epoch takes what is left.
        micro_batches: Into how many parts a step is cut.
        order: The order of every epoch.
        agree: Called with an epoch and the digest of its order before any of it is used; raises if others have another.

    Raises:
        UsageError: There are no samples, or more micro-batches than samples in a step.
    """

    size: int
    batch: int
    micro_batches: int
    order: Order
    agree: Callable[[int, str], object] | None = None
    _known: tuple[int, Indices] | None = field(default=None, init=False, repr=False)
    _agreed: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UsageError("the data set is empty: there is nothing to train on")
        if not 1 <= self.micro_batches <= self.batch:
            raise UsageError(
                f"a step of {self.batch} samples cannot be cut into {self.micro_batches} micro-batches: "
                "give 1 <= micro_batches <= batch"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which every sample comes once."""
        return -(-self.size // self.batch)

    def epoch_of(self, step: int) -> int:
        """Return the epoch of a step, from 0."""
        return step // self.steps_per_epoch

    def of_step(self, step: int) -> Indices:
        """Return a step's samples in order, int64 [batch] or fewer."""
        epoch, at = divmod(step, self.steps_per_epoch)
        return self._epoch(epoch)[at * self.batch : (at + 1) * self.batch]

    def of_micro_batch(self, step: int, micro_batch: int) -> Indices:
        """Return the samples of one part of a step, int64 [n]; n may be 0 in the last step of an epoch."""
        samples = self.of_step(step)
        first, last = (len(samples) * (micro_batch + i) // self.micro_batches for i in (0, 1))
        return samples[first:last]

    def left_in_epoch(self, step: int) -> Indices:
        """Return the samples that the epoch still has when `step` begins, in order."""
        epoch, at = divmod(step, self.steps_per_epoch)
        return self._epoch(epoch)[at * self.batch :]

    def order_digest(self, epoch: int) -> str:
        """Return 64 bits over the order of an epoch, in hexadecimal digits: this rank's, whatever others have."""
        return _digest(self._drawn(epoch))

    def _epoch(self, epoch: int) -> Indices:
        order = self._drawn(epoch)
        if self.agree is not None and self._agreed != epoch:
            self.agree(epoch, _digest(order))
        self._agreed = epoch
        return order

    def _drawn(self, epoch: int) -> Indices:
        if self._known is None or self._known[0] != epoch:
            order = self.order(epoch)
            if len(order) != self.size:
                raise UsageError(
                    f"the sampler did not draw {self.size} samples for epoch {epoch}, as its length promises: it must "
                    "draw as many in every epoch, and for all ranks"
                )
            self._known, self._agreed = (epoch, order), None
        return self._known[1]


def _digest(order: Indices) -> str:
    return hashlib.blake2b(order.tobytes(), digest_size=8).hexdigest()


def length_of(sized: Sized) -> int:
    """Return the length of a data set or sampler.

    Raises:
        UsageError: It has none.
    """
    try:
        return len(sized)
    except TypeError:
        raise UsageError(
            f"{type(sized).__name__} has no length: exactly-once training takes a map-style data set "
            "(__len__ and __getitem__)"
        ) from None


# -------------------------------------------------------------------------------------------------
# Random numbers keyed by (seed, step, micro-batch): whoever computes a micro-batch draws the same ones.


def key_of(*numbers: int) -> int:
    """Return 32 bits that stand for a few whole numbers, at least 0, in order."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def seed_all(key: int) -> None:
    """Seed Python's, NumPy's and PyTorch's generators (of all devices) with 32 bits."""
    random.seed(key)
    np.random.seed(key)
    torch.manual_seed(key)


@contextlib.contextmanager
def drawing_from(*numbers: int) -> Iterator[None]:
    """Within it the global generators draw what (seed, step, micro-batch) says; afterwards they go on as before."""
    python, array = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        seed_all(key_of(*numbers))
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)
