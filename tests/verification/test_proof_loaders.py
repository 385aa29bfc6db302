"""What loaders hand out while ranks die and jobs resume, drawn by the very code that training uses."""

import functools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
position = pytest.importorskip("ringside.survive.data.samples")

from ringside.errors import MismatchError  # noqa: E402
from ringside.survive import connection as passport  # noqa: E402
from ringside.survive import train  # noqa: E402
from verification.survive import loaders  # noqa: E402
from verification.survive.loaders import MICRO_BATCHES, SAMPLERS, SIZE, Shape  # noqa: E402

MODEL = torch.nn.Linear(1, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=1.0)


class Real:
    """A process of a job as `training` makes it, as far as samples go."""

    def __init__(self, shape, agreed):
        data = range(SIZE)
        samples: Any = train.samples_of(data, shape.batch, MICRO_BATCHES, shape.seed, SAMPLERS[shape.sampler]())
        samples.agree = functools.partial(self._agree, agreed)
        self.samples = samples
        fingerprint: Any = passport.fingerprint
        own = fingerprint(MODEL, OPTIMIZER, data, self.samples, shape.seed)
        self._position = position.Position(own, self.samples)

    def _agree(self, agreed, epoch, digest):
        if agreed.setdefault(epoch, digest) != digest:
            raise MismatchError(f"another order of epoch {epoch}")

    def position(self, step):
        return self._position.before(step)

    def resume(self, said):
        self._position.refuse_others(said)


class AsItComes(Real):
    """Without the rule that an order is a function of the epoch and of seeds: a sampler is drawn from as it comes."""

    def __init__(self, shape, agreed):
        super().__init__(shape, agreed)
        sampler = SAMPLERS[shape.sampler]()
        self.samples.order = lambda epoch: np.fromiter(sampler, dtype=np.int64)


class WithoutAgreement(AsItComes):
    """Without the comparison of orders, too."""

    def _agree(self, agreed, epoch, digest):
        pass


class WithoutPosition(Real):
    """Without the comparison of a checkpoint's place in the samples."""

    def resume(self, said):
        pass


@functools.cache
def drawn(sampler):
    return loaders.hand_out_undisturbed(Shape(sampler), Real)


def wrongs(start, every=None):
    every = EVERY if every is None else every
    found = [
        (case, loaders.what_is_wrong(case, loaders.hand_out(case, start), drawn(case.shape.sampler))) for case in every
    ]
    return {case: what for case, what in found if what}


EVERY = list(loaders.loader_cases())


def test_what_is_handed_out_is_what_one_undisturbed_process_draws():
    assert len(EVERY) == len(SAMPLERS) * (4 * 5 + 3 * 2)
    assert wrongs(Real) == {}


def test_an_epoch_has_every_sample_once_but_where_they_are_drawn_with_weights():
    for sampler in SAMPLERS:
        epochs = [sorted(drawn(sampler)[first : first + SIZE]) for first in range(0, 3 * SIZE, SIZE)]
        assert (epochs == [list(range(SIZE))] * 3) == (not sampler.startswith("weighted"))


def test_without_its_rule_a_sampler_loses_samples_and_that_is_noticed():
    drawing = {"random, own generator", "subset", "random"}
    killed = [case for case in EVERY if case.shape.sampler in drawing and case.kills == ((6, 1),)]
    found = wrongs(WithoutAgreement, killed)
    assert {case.shape.sampler for case in found} == drawing
    assert all("samples are missing in their epochs" in what for what in found.values())
    assert all("another order of epoch" in what for what in wrongs(AsItComes, killed).values())


def test_without_the_comparison_of_places_another_batch_or_seed_is_noticed():
    changed = [case for case in EVERY if case.then is not None]
    assert set(wrongs(WithoutPosition, changed)) == set(changed)
