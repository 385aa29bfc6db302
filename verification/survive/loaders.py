"""What loaders hand out while ranks die, are started again, and a whole job resumes: a small matrix over samplers.

The kill matrix counts in positions of a job's sequence of samples. Here the sequence itself is drawn, by the very code
that training uses and by a sampler of every process's own, as a script makes it each time it is started. What is looked
at is what was handed out for committed steps: it is the sequence that one process draws which nobody disturbs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ringside.errors import MismatchError, UsageError
from ringside.survive.data.samples import Samples

# Samples of an epoch, samples of a step, parts of a step, epochs, processes.
SIZE, BATCH, MICRO_BATCHES, EPOCHS, RANKS = 24, 6, 3, 3, 3
STEPS = EPOCHS * SIZE // BATCH

SAMPLERS: dict[str, Callable[[], Sampler[int]]] = {
    "sequential": lambda: SequentialSampler(range(SIZE)),
    "random": lambda: RandomSampler(range(SIZE)),
    "random, own generator": lambda: RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(5)),
    "weighted, own generator": lambda: WeightedRandomSampler(
        [float(weight) for weight in range(1, SIZE + 1)], SIZE, generator=torch.Generator().manual_seed(5)
    ),
    "subset": lambda: SubsetRandomSampler(list(range(SIZE)), generator=torch.Generator().manual_seed(5)),
    "distributed": lambda: DistributedSampler(TensorDataset(torch.arange(SIZE)), num_replicas=RANKS, rank=0),
}
"""What a script makes, by kind; all draw `SIZE` samples in an epoch of all ranks."""


class LoaderWorker(Protocol):
    """What one process of a job has to do with samples."""

    samples: Samples

    def position(self, step: int) -> object:
        """Return what a checkpoint says of the place in the samples before a step."""

    def resume(self, stated: object) -> None:
        """Raise `MismatchError` unless it may go on from what a checkpoint says."""


@dataclass(frozen=True)
class Shape:
    """What a script says of its samples.

    Args:
        sampler: One of `SAMPLERS`.
        batch: Samples in a step.
        seed: The job's.
    """

    sampler: str
    batch: int = BATCH
    seed: int = 0


@dataclass(frozen=True)
class Case:
    """One run.

    Args:
        shape: What the script says at first.
        kills: (step, rank) of processes that die in a step and are back in the next.
        resumed: The step at which all die and the job is started again; None: they do not.
        then: What the script says then.
    """

    shape: Shape
    kills: tuple[tuple[int, int], ...] = ()
    resumed: int | None = None
    then: Shape | None = None


Start = Callable[[Shape, dict[int, str]], LoaderWorker]
"""Starts a process of a job: what its script says, and the orders of epochs that the job has agreed on so far."""


@dataclass
class HandedOut:
    """What was handed out for committed steps.

    Args:
        samples: One after the other.
        refused: Why a process did not take part; "": none was refused.
    """

    samples: list[int] = field(default_factory=list)
    refused: str = ""


def hand_out(case: Case, start: Start) -> HandedOut:
    """Run a case; return what was handed out."""
    found, agreed = HandedOut(), dict[int, str]()
    count = itertools.count()

    def worker(shape: Shape) -> LoaderWorker:
        torch.manual_seed(next(count))  # no two processes have the same random numbers behind them
        return start(shape, agreed)

    shape = case.shape
    try:
        workers = [worker(shape) for _ in range(RANKS)]
        for step in range(STEPS):
            if step == case.resumed:  # the whole job ends, and another one goes on from its checkpoint
                stated, agreed, shape = workers[0].position(step), {}, case.then or case.shape
                workers = [worker(shape) for _ in range(RANKS)]
                for each in workers:
                    each.resume(stated)
            dying = [rank for at, rank in case.kills if at == step]
            alive = [rank for rank in range(RANKS) if rank not in dying]
            # Who dies in a step hands out nothing for it: the others compute its micro-batches.
            for micro_batch in range(MICRO_BATCHES):
                owner = alive[micro_batch % len(alive)]
                found.samples += workers[owner].samples.of_micro_batch(step, micro_batch).tolist()
            for rank in dying:
                workers[rank] = worker(shape)
    except (MismatchError, UsageError) as error:
        found.refused = str(error)
    return found


def hand_out_undisturbed(shape: Shape, start: Start) -> list[int]:
    """Return what one process hands out that nobody disturbs."""
    worker = start(shape, {})
    return [sample for step in range(STEPS) for sample in worker.samples.of_step(step).tolist()]


def loader_cases() -> Iterator[Case]:
    """Yield every sampler × a death in the first, a middle and the last step of an epoch, or a resumption there."""
    per_epoch = SIZE // BATCH
    moments = (0, per_epoch - 1, per_epoch + 2, STEPS - 1)
    for sampler, step in itertools.product(SAMPLERS, moments):
        shape = Shape(sampler)
        yield from (Case(shape, ((step, rank),)) for rank in range(RANKS))
        yield Case(shape, tuple((step, rank) for rank in range(RANKS - 1)))
        yield Case(shape, ((1, 0),), resumed=step)
        if step:
            yield Case(shape, resumed=step, then=replace(shape, batch=2 * BATCH))
            yield Case(shape, resumed=step, then=replace(shape, seed=1))


def what_is_wrong(case: Case, found: HandedOut, expected: Sequence[int]) -> str:
    """Return what is wrong with what was handed out; "": nothing is.

    Args:
        case: What was run.
        found: What came of it.
        expected: What an undisturbed process hands out.
    """
    if case.then is not None:
        return "" if found.refused else f"resumed with {case.then}, and was not refused"
    if found.refused:
        return f"was refused: {found.refused}"
    if found.samples == list(expected):
        return ""
    # Which of a sampler with replacement an epoch lacks anyway; the number only helps whoever reads it.
    epochs = [sorted(found.samples[first : first + SIZE]) for first in range(0, len(expected), SIZE)]
    lost = sum(len(set(range(SIZE)) - set(epoch)) for epoch in epochs)
    return f"another sequence than one process draws: {lost} samples are missing in their epochs"


__all__ = [
    "SAMPLERS",
    "Case",
    "HandedOut",
    "LoaderWorker",
    "Shape",
    "hand_out",
    "hand_out_undisturbed",
    "loader_cases",
    "what_is_wrong",
]
