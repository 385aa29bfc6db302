import itertools
import random

import numpy as np
import pytest

from ringside.errors import UsageError

torch = pytest.importorskip("torch")

from ringside.survive.data.samples import Samples, drawing_from, drawn_by, length_of, shuffled  # noqa: E402


def samples(size=103, batch=16, micro_batches=8, seed=7):
    return Samples(size, batch, micro_batches, shuffled(size, seed))


def test_every_epoch_takes_every_sample_once_in_another_order():
    given = samples()
    epochs = [
        np.concatenate([given.of_step(e * given.steps_per_epoch + k) for k in range(given.steps_per_epoch)])
        for e in range(2)
    ]
    assert [sorted(epoch.tolist()) for epoch in epochs] == [list(range(103))] * 2
    assert epochs[0].tolist() != epochs[1].tolist()


@pytest.mark.parametrize("step", [0, 3, 6, 7, 12])
def test_micro_batches_are_a_step_cut_in_order(step):
    given = samples()
    parts = [given.of_micro_batch(step, m) for m in range(8)]
    assert np.concatenate(parts).tolist() == given.of_step(step).tolist()
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_what_is_left_does_not_depend_on_who_asks_or_when():
    one, other = samples(), samples()
    _ = [one.of_step(k) for k in range(9)]
    left = [np.concatenate([each.of_step(k) for k in range(9, 14)]) for each in (one, other)]
    assert left[0].tolist() == left[1].tolist()
    assert len(left[1]) == 103 - 2 * 16


@pytest.mark.parametrize(("size", "batch", "parts"), [(0, 4, 2), (10, 4, 5), (10, 0, 0), (10, 4, 0)])
def test_what_cannot_be_is_refused(size, batch, parts):
    with pytest.raises(UsageError, match=r"empty|micro"):
        samples(size, batch, parts)


def test_a_sampler_of_pytorch_becomes_a_function_of_the_epoch():
    sampler = torch.utils.data.WeightedRandomSampler([1.0, 2.0, 3.0, 4.0], 6)
    order = drawn_by(sampler, seed=5)
    first = [order(0).tolist(), order(1).tolist()]
    assert [order(0).tolist(), order(1).tolist()] == first
    assert first[0] != first[1]


def test_what_has_no_length_is_refused():
    with pytest.raises(UsageError, match="map-style"):
        length_of(iter(range(3)))


def test_random_numbers_belong_to_the_micro_batch_and_leave_the_callers_alone():
    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    with drawing_from(1, 2, 3):
        first = draw()
    before = random.getstate(), torch.get_rng_state()
    with drawing_from(1, 2, 3):
        assert draw() == first
    with drawing_from(1, 2, 4):
        assert draw() != first
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def drawn():
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_each_of_the_three_generators_draws_by_the_key_and_goes_on_as_before():
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    undisturbed = [drawn() for _ in range(3)]
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    found = [drawn()]
    inside = []
    for key in ((1, 2), (1, 2), (1, 3)):
        with drawing_from(*key):
            inside.append(drawn())
    found += [drawn(), drawn()]
    assert found == undisturbed
    assert inside[0] == inside[1]
    assert all(one != other for one, other in zip(inside[0], inside[2], strict=True))
    assert not set(inside[0]) & set(itertools.chain(*undisturbed))
