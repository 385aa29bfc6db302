"""Orders of samples: the same on every rank and in every process, whatever the sampler draws from, or it is refused."""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
from tests.survive.herd import run_isolated

from ringside.errors import UsageError

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ringside.survive.data.samples import Samples, drawn_by, for_all_ranks, length_of  # noqa: E402  # noqa: E402

SCRIPT = str(Path(__file__).with_name("sampling.py"))
DATA, WEIGHTS = range(40), [float(1 + number % 3) for number in range(40)]


def seeded():
    return torch.Generator().manual_seed(5)


class Counts(Sampler):
    """Shuffles by the number of times it was iterated."""

    def __init__(self):
        self.times = 0

    def __len__(self):
        return 40

    def __iter__(self):
        self.times += 1
        return iter(np.random.default_rng(self.times).permutation(40).tolist())


class Draws(Counts):
    """Has generators of its own, of two kinds, which it goes on with."""

    def __init__(self):
        self.numpy, self.python = np.random.default_rng(3), random.Random(4)

    def __iter__(self):
        order = self.numpy.permutation(40).tolist()
        self.python.shuffle(order)
        return iter(order)


class Global(Counts):
    """Draws from the global generators."""

    def __iter__(self):
        return iter(torch.randperm(40).tolist())


class Told(Counts):
    """Is told the epoch, and goes on with a generator none the less."""

    epoch = 0

    def __init__(self):
        self.generator = np.random.default_rng(3)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(((self.generator.permutation(40) + self.epoch) % 40).tolist())


class Pure(Told):
    """Is told the epoch, which is all that it needs; counts how often it is asked."""

    asked = 0

    def __iter__(self):
        self.asked += 1
        return iter(np.random.default_rng(self.epoch).permutation(40).tolist())


KINDS = {
    "random": lambda: RandomSampler(DATA),
    "random, generator": lambda: RandomSampler(DATA, generator=seeded()),
    "random, replacement": lambda: RandomSampler(DATA, replacement=True, num_samples=50, generator=seeded()),
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 40),
    "weighted, generator": lambda: WeightedRandomSampler(WEIGHTS, 30, replacement=False, generator=seeded()),
    "subset": lambda: SubsetRandomSampler(range(3, 33)),
    "subset, generator": lambda: SubsetRandomSampler(range(3, 33), generator=seeded()),
    "distributed": lambda: DistributedSampler(DATA, num_replicas=3, rank=1, seed=2),
    "counts": Counts,
    "draws": Draws,
    "global": Global,
    "told": Told,
    "pure": Pure,
    "wrapped": lambda: Wrapped(RandomSampler(DATA, generator=seeded())),
}


class Wrapped(Counts):
    """Hands out what another one draws."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return iter(self.sampler)


@pytest.mark.parametrize("kind", KINDS)
def test_an_order_is_a_function_of_the_epoch_in_every_process(kind):
    through = drawn_by(for_all_ranks(KINDS[kind]()), seed=1)
    epochs = [through(epoch).tolist() for epoch in range(4)]
    assert len({tuple(epoch) for epoch in epochs}) == 4
    later = drawn_by(for_all_ranks(KINDS[kind]()), seed=1)  # a worker that was started again in epoch 2
    assert [later(epoch).tolist() for epoch in (2, 3)] == epochs[2:]
    assert [through(epoch).tolist() for epoch in (1, 0, 2)] == [epochs[1], epochs[0], epochs[2]]


def test_samplers_in_order_stay_as_they_are():
    for given in (SequentialSampler(DATA), list(DATA), DATA, torch.arange(40), np.arange(40)):
        assert drawn_by(given, seed=1)(7).tolist() == list(DATA)


def test_the_users_generators_are_left_alone():
    own = seeded()
    before = own.get_state(), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for sampler in (RandomSampler(DATA, generator=own), RandomSampler(DATA), Global()):
        order = drawn_by(sampler, seed=1)
        _ = [order(epoch) for epoch in (0, 3)]
    after = own.get_state(), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert [torch.equal(one, other) for one, other in zip(before[:2], after[:2], strict=True)] == [True, True]
    assert before[2:] == after[2:]


def test_a_distributed_sampler_gives_all_ranks_one_order_without_padding():
    orders = []
    for ranks, rank in ((1, 0), (3, 0), (3, 2)):
        sampler = for_all_ranks(DistributedSampler(DATA, num_replicas=ranks, rank=rank, drop_last=rank == 2))
        assert length_of(sampler) == 40
        orders.append(drawn_by(sampler, seed=1)(3).tolist())
    assert orders[0] == orders[1] == orders[2]
    assert sorted(orders[0]) == list(DATA)


def test_who_is_told_the_epoch_is_not_asked_for_those_before():
    sampler = Pure()
    drawn_by(sampler, seed=1)(1000)
    assert sampler.asked == 1


def test_a_sampler_that_nobody_can_seed_is_refused_by_name():
    class Urandom(Counts):
        def __iter__(self):
            return iter(np.random.default_rng(list(os.urandom(8))).permutation(40).tolist())

    with pytest.raises(UsageError, match="Urandom draws another order whenever it is asked"):
        drawn_by(Urandom(), seed=1)


def test_a_sampler_that_cannot_be_copied_is_drawn_from_in_order_only():
    class Holds(Counts):
        def __init__(self):
            super().__init__()
            self.file = iter(()).__next__, (each for each in ())

    order = drawn_by(Holds(), seed=1)
    assert [order(1).tolist(), order(2).tolist()] == [drawn_by(Counts(), seed=1)(epoch).tolist() for epoch in (1, 2)]
    with pytest.raises(UsageError, match="Holds cannot be copied, so it cannot draw epoch 1 again"):
        order(1)


def test_batches_and_wrong_lengths_are_refused_in_words():
    with pytest.raises(UsageError, match="BatchSampler draws something else than numbers"):
        drawn_by(BatchSampler(DATA, 4, drop_last=False), seed=1)

    class Long(Counts):
        def __iter__(self):
            while True:
                yield 0

    with pytest.raises(UsageError, match="did not draw 40 samples for epoch 0"):
        Samples(40, 8, 4, drawn_by(Long(), seed=1)).of_step(0)


def run(*names):
    """Return what became of each job, by name; they run in one process, because imports take longer than a job."""
    lines = run_isolated(SCRIPT, *names, limit_s=150).splitlines()
    return dict(zip(names, map(json.loads, lines), strict=True))


@pytest.fixture(scope="module")
def jobs():
    return run("generator", "depends_on_rank", "came_back")


@pytest.fixture(scope="module")
def more_jobs():
    return run("distributed", "resumed", "changed", "nobody_seeds", "nobody_compares")


def every_sample_once(job, ranks):
    """Tell whether all ranks ended with every sample in the parameters as often as there are epochs."""
    return job["errors"] == [] and job["trained"] == {str(rank): [6.0] * 40 for rank in range(ranks)}


def refused(job):
    """Tell whether one rank was refused by the name of its sampler."""
    named = any("has another order in epoch" in line and "its Of" in line for line in job["log"])
    return named and "SystemExit: 77" in job["errors"]


def refused_alone(job):
    """Tell whether the rank that was left did not go on: of two that differ nobody knows which one is right."""
    left = [error for error in job["errors"] if "is the only one left, every other one was refused" in error]
    return refused(job) and len(job["errors"]) == 2 and len(left) == 1 and job["trained"] == {}


def test_whoever_dies_every_epoch_has_every_sample_once(jobs):
    assert len(jobs["generator"]["deaths"]) == 2
    assert every_sample_once(jobs["generator"], ranks=2)


def test_of_two_ranks_with_different_orders_neither_trains(jobs):
    assert refused_alone(jobs["depends_on_rank"])


def test_a_rank_that_comes_back_with_another_order_is_refused_by_name_and_the_others_go_on(jobs):
    came_back = jobs["came_back"]
    assert refused(came_back)
    assert came_back["errors"] == ["SystemExit: 77"]
    assert came_back["trained"] == {"1": [6.0] * 40, "2": [6.0] * 40}


@pytest.mark.long
def test_a_distributed_sampler_and_a_resumed_job_have_every_sample_once(more_jobs):
    assert len(more_jobs["distributed"]["deaths"]) == 2
    assert every_sample_once(more_jobs["distributed"], ranks=2)
    assert every_sample_once(more_jobs["resumed"], ranks=3)


@pytest.mark.long
def test_an_order_that_changes_later_is_refused_then(more_jobs):
    assert refused_alone(more_jobs["changed"])


@pytest.mark.long
def test_without_the_rules_the_hole_is_there_again(more_jobs):
    """With no generator seeded a rank is refused; if orders are not compared either, samples are lost and doubled."""
    assert any("has another order in epoch" in line for line in more_jobs["nobody_seeds"]["log"])
    trained = more_jobs["nobody_compares"]["trained"].values()
    assert trained
    assert all(set(counts) != {6.0} for counts in trained)
