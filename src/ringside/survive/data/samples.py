"""Which samples a step takes: from (seed, epoch, step) alone, never from the number of ranks.

An epoch is one order of the data set. A step takes the next so many of it and cuts them into micro-batches, the units
that ranks are given, take over from each other, and count by. So whoever computes a micro-batch computes the same
samples, and a job that goes on with another number of ranks goes on with the samples that are left.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ringside.errors import MismatchError, UsageError

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

    def stretch(self, step: int) -> tuple[int, int]:
        """Return the position of a step's first sample in the job's sequence of samples, and how many it takes."""
        epoch, at = divmod(step, self.steps_per_epoch)
        first = at * self.batch
        return epoch * self.size + first, min(self.batch, self.size - first)

    def of_step(self, step: int) -> Indices:
        """Return a step's samples in order, int64 [batch] or fewer."""
        epoch, at = divmod(step, self.steps_per_epoch)
        order = self._drawn(epoch)
        if self.agree is not None and self._agreed != epoch:
            self.agree(epoch, _digest(order))
        self._agreed = epoch
        return order[at * self.batch : (at + 1) * self.batch]

    def of_micro_batch(self, step: int, micro_batch: int) -> Indices:
        """Return the samples of one part of a step, int64 [n]; n may be 0 in the last step of an epoch."""
        samples = self.of_step(step)
        first, last = (len(samples) * (micro_batch + i) // self.micro_batches for i in (0, 1))
        return samples[first:last]

    def order_digest(self, epoch: int) -> str:
        """Return 64 bits over the order of an epoch, in hexadecimal digits: this rank's, whatever others have."""
        return _digest(self._drawn(epoch))

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


@contextlib.contextmanager
def drawing_from(*numbers: int) -> Iterator[None]:
    """Within it the global generators draw what (seed, step, micro-batch) says; afterwards they go on as before."""
    python, array = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        key = key_of(*numbers)
        random.seed(key)
        np.random.seed(key)
        torch.manual_seed(key)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)


_TORCHS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
_CONSTANT = (list, tuple, range, np.ndarray, torch.Tensor)


# -------------------------------------------------------------------------------------------------
# Samplers of PyTorch as orders: functions of the epoch and the seed, alike on all ranks and in every process.
#
# torch's own samplers remember nothing but their generator, so a copy of one is drawn from, with a generator that is
# seeded anew for the epoch. A sampler of the user's may remember anything: it is drawn from once per epoch, in order,
# as a DataLoader would, and a process that begins later draws the epochs before as well. One that has `set_epoch` and
# gives the same whenever it is asked for the same epoch is spared that.


def for_all_ranks(sampler: Iterable[int]) -> Iterable[int]:
    """Return a sampler that draws for all ranks: a DistributedSampler as the only one of its kind, others as they are.

    Its order then has every sample once (no padding), whatever the number of ranks.
    """
    if not isinstance(sampler, DistributedSampler):
        return sampler
    only = copy.copy(sampler)
    only.num_replicas, only.rank = 1, 0
    only.num_samples = only.total_size = length_of(sampler.dataset)  # type: ignore[arg-type]
    return only


def drawn_by(sampler: Iterable[int], seed: int) -> Order:
    """Return the order in which a sampler draws.

    Args:
        sampler: Draws one epoch for all ranks whenever it is iterated.
        seed: What the global generators, and those of torch's samplers, are seeded by, together with the epoch.

    Raises:
        UsageError: It draws another order whenever it is asked, from something that nobody seeds.
    """
    if type(sampler) in _TORCHS or isinstance(sampler, _CONSTANT):
        return lambda epoch: _draw(_without_memory(sampler, seed, epoch), seed, epoch)
    return _Remembering(sampler, seed)


class _Remembering:
    """The order of a sampler that may remember what it has drawn.

    Args:
        sampler: It.
        seed: What the global generators are seeded by, together with the epoch.

    Raises:
        UsageError: It draws another order whenever it is asked.
    """

    def __init__(self, sampler: Iterable[int], seed: int) -> None:
        self._sampler, self._seed, self._next = sampler, seed, 0
        self._new = _copied(sampler)
        self._repeats = hasattr(sampler, "set_epoch")
        if self._new is None:
            return
        one, other = _copied(self._new), _copied(self._new)
        first = _draw(one, seed, 0)
        if not np.array_equal(first, _draw(other, seed, 0)):
            raise UsageError(
                f"{type(sampler).__name__} draws another order whenever it is asked, from something that nobody seeds "
                "(os.urandom, the time): samples would be lost and counted twice; draw from a generator with a seed"
            )
        self._repeats &= np.array_equal(first, _draw(one, seed, 0))

    def __call__(self, epoch: int) -> Indices:
        if self._repeats:
            return _draw(self._sampler, self._seed, epoch)
        if epoch < self._next:
            if self._new is None:
                raise UsageError(
                    f"{type(self._sampler).__name__} cannot be copied, so it cannot draw epoch {epoch} again: give it "
                    "set_epoch(epoch)"
                )
            self._sampler, self._next = _copied(self._new), 0
        for before in range(self._next, epoch):
            _draw(self._sampler, self._seed, before)
        self._next = epoch + 1
        return _draw(self._sampler, self._seed, epoch)


def _copied(sampler: Any) -> Any:
    """Return a copy that shares nothing but data sets; None: it cannot be copied."""
    shared = {id(value): value for value in getattr(sampler, "__dict__", {}).values() if isinstance(value, Dataset)}
    try:
        return copy.deepcopy(sampler, shared)
    except Exception:  # whatever the sampler's parts raise
        return None


def _without_memory(sampler: Any, seed: int, epoch: int) -> Iterable[int]:
    """Return one of torch's own samplers with its generator, if it has one, as it is for an epoch."""
    own = getattr(sampler, "generator", None)
    if own is None:
        return sampler  # type: ignore[no-any-return]
    seeded = copy.copy(sampler)
    seeded.generator = torch.Generator(own.device).manual_seed(key_of(seed, own.initial_seed(), epoch))
    return seeded  # type: ignore[no-any-return]


def _draw(sampler: Any, seed: int, epoch: int) -> Indices:
    """Return what a sampler draws; the global generators are as they were afterwards."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    with drawing_from(seed, epoch):
        try:
            return np.fromiter(itertools.islice(sampler, length_of(sampler) + 1), dtype=np.int64)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{type(sampler).__name__} draws something else than numbers of samples ({error}): give a sampler of "
                "single samples (training itself makes batches)"
            ) from None


COMPARED = ("the batch", "the data set", "the seed", "an epoch")
"""What of a passport must be the same to go on from a checkpoint."""


# -------------------------------------------------------------------------------------------------
# Where a job is in its samples: what a checkpoint says of that, and who may go on from it.
#
# A step is a number in a sequence of samples. With another batch, seed, data set or order the same number means another
# place, so that samples would be lost and others counted twice. The number of ranks and micro-batches does not matter.
# Of a data set only its length and the order can be compared, not what its samples are.


class Saved(msgspec.Struct, frozen=True):
    """What a checkpoint says.

    Args:
        passport: What the worker was that wrote it, by name.
        epoch: The epoch of the next sample.
        sample: Its place in that epoch.
        ordered: The epoch whose order is told: that of the last sample trained on.
        order: Digest of that order; "": there is none yet.
    """

    passport: dict[str, str]
    epoch: int
    sample: int
    ordered: int
    order: str


class Position:
    """Where this worker's job is in its samples.

    Args:
        passport: What this worker is, by name.
        samples: Which samples belong to which step.
    """

    def __init__(self, passport: Mapping[str, str], samples: Samples) -> None:
        self._passport, self._samples = dict(passport), samples

    def before(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint says whose next step is `step`, as plain values."""
        samples = self._samples
        epoch, at = divmod(step, samples.steps_per_epoch)
        ordered = samples.epoch_of(max(step - 1, 0))
        order = samples.order_digest(ordered) if step else ""
        saved = Saved(self._passport, epoch, at * samples.batch, ordered, order)
        plain: dict[str, Any] = msgspec.to_builtins(saved)
        return plain

    def refuse_others(self, stated: Any) -> None:
        """Raise `MismatchError`, with what differs, unless this job may go on from what a checkpoint says."""
        try:
            saved = msgspec.convert(stated, Saved)
        except msgspec.ValidationError as error:
            raise MismatchError(f"the checkpoint has no position in the samples ({error})") from None
        told = {what: (self._passport.get(what), saved.passport.get(what)) for what in COMPARED}
        different = [f"{what} ({here} here, {there} there)" for what, (here, there) in told.items() if here != there]
        if not different and saved.order and (here := self._samples.order_digest(saved.ordered)) != saved.order:
            different = [f"the order of epoch {saved.ordered} (digest {here} here, {saved.order} there)"]
        if different:
            raise MismatchError(
                f"this job differs from its checkpoint in {'; '.join(different)}: samples would be lost and others "
                "counted twice. Start it as it was, or give it another checkpoint_dir"
            )
