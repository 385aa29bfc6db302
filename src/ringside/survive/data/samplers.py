"""Samplers of PyTorch as orders: functions of the epoch and the seed, alike on all ranks and in every process.

torch's own samplers remember nothing but their generator, so a copy of one is drawn from, with a generator that is
seeded anew for the epoch. A sampler of the user's may remember anything: it is drawn from once per epoch, in order, as
a DataLoader would, and a process that begins later draws the epochs before as well. One that has `set_epoch` and gives
the same whenever it is asked for the same epoch is spared that.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ringside.errors import UsageError
from ringside.survive.data.samples import Indices, Order, drawing_from, key_of, length_of

_TORCHS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
_CONSTANT = (list, tuple, range, np.ndarray, torch.Tensor)


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
                f"{_name(sampler)} draws another order whenever it is asked, from something that nobody seeds "
                "(os.urandom, the time): samples would be lost and counted twice; draw from a generator with a seed"
            )
        self._repeats &= np.array_equal(first, _draw(one, seed, 0))

    def __call__(self, epoch: int) -> Indices:
        if self._repeats:
            return _draw(self._sampler, self._seed, epoch)
        if epoch < self._next:
            if self._new is None:
                raise UsageError(
                    f"{_name(self._sampler)} cannot be copied, so it cannot draw epoch {epoch} again: give it "
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
                f"{_name(sampler)} draws something else than numbers of samples ({error}): give a sampler of single "
                "samples (training itself makes batches)"
            ) from None


def _name(sampler: object) -> str:
    return type(sampler).__name__


__all__ = ["drawn_by", "for_all_ranks"]
