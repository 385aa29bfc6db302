import itertools
import random

import numpy as np
import pytest

from ringside.errors import MismatchError, UsageError

torch = pytest.importorskip("torch")

from ringside.survive.cluster.registers import MemoryRegisters  # noqa: E402
from ringside.survive.connection import StoreConnection  # noqa: E402
from ringside.survive.data.micro_batches import KeptBatch, StepWork  # noqa: E402
from ringside.survive.data.samples import (  # noqa: E402
    Position,
    Samples,
    drawing_from,
    drawn_by,
    length_of,
    shuffled,
)
from ringside.survive.train import agree_on_orders, samples_of  # noqa: E402


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_random_numbers_on_a_gpu_belong_to_the_micro_batch_and_go_on_afterwards():
    def draw():
        return torch.rand(4, device="cuda").tolist()

    torch.manual_seed(7)
    undisturbed = [draw(), draw()]
    torch.manual_seed(7)
    found, inside = [draw()], []
    for key in ((1, 2, 3), (1, 2, 3), (1, 2, 4)):
        with drawing_from(*key):
            inside.append(draw())
    found.append(draw())
    assert found == undisturbed
    assert inside[0] == inside[1] != inside[2]


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


def test_an_order_is_agreed_on_once_in_every_epoch_before_it_is_used():
    agreed = []
    given = samples()
    given.agree = lambda epoch, digest: agreed.append((epoch, digest))
    for step in (0, 1, 6, 7, 8, 6):
        given.of_step(step)
    assert [epoch for epoch, _ in agreed] == [0, 1, 0]
    assert agreed[0] == agreed[2] == (0, given.order_digest(0))
    assert len(given.order_digest(0)) == 16
    assert given.order_digest(1) == samples().order_digest(1) != given.order_digest(0)
    short = Samples(5, 2, 1, lambda epoch: np.arange(5 - epoch))
    assert [short.of_step(step).tolist() for step in range(3)] == [[0, 1], [2, 3], [4]]
    with pytest.raises(UsageError, match="did not draw 5 samples for epoch 1"):
        short.of_step(3)


def test_a_step_takes_a_stretch_of_the_sequence_of_all_samples():
    given = samples()
    assert given.steps_per_epoch == 7
    assert [given.epoch_of(step) for step in (0, 6, 7, 13, 14)] == [0, 0, 1, 1, 2]
    assert [given.stretch(step) for step in (0, 5, 6, 7, 13)] == [(0, 16), (80, 16), (96, 7), (103, 16), (199, 7)]
    assert samples(32).steps_per_epoch == 2
    assert samples(1, 1, 1).of_step(5).tolist() == [0]
    assert [len(given.of_micro_batch(6, part)) for part in range(8)] == [0, 1, 1, 1, 1, 1, 1, 1]


def test_a_checkpoint_says_where_the_next_sample_is_and_whose_order_was_used():
    passport = {"the batch": "16", "the data set": "103 samples", "the seed": "7", "an epoch": "103", "ranks": "2"}
    position = Position(passport, samples())
    assert [(told["epoch"], told["sample"], told["ordered"]) for told in map(position.before, (0, 6, 7, 8))] == [
        (0, 0, 0), (0, 96, 0), (1, 0, 0), (1, 16, 1),
    ]  # fmt: skip
    assert position.before(0)["order"] == ""
    told = position.before(8)
    assert told["order"] == samples().order_digest(1)
    Position({**passport, "ranks": "4"}, samples()).refuse_others(told)
    Position(passport, samples(seed=8)).refuse_others(position.before(0))
    with pytest.raises(MismatchError, match=r"in the seed \(8 here, 7 there\): samples would be lost"):
        Position({**passport, "the seed": "8"}, samples()).refuse_others(told)
    with pytest.raises(MismatchError, match="in the order of epoch 1"):
        Position(passport, samples(seed=8)).refuse_others(told)
    with pytest.raises(MismatchError, match="has no position in the samples"):
        position.refuse_others({"epoch": 1})


def test_a_step_has_four_parts_for_each_rank_unless_it_is_told_how_many(monkeypatch):
    def parts(batch, micro_batches=None):
        return samples_of(range(100), batch, micro_batches, 3, None).micro_batches

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert [parts(batch) for batch in (3, 4, 40)] == [3, 4, 4]
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert [parts(11), parts(12), parts(40), parts(40, 7)] == [11, 12, 12, 7]
    assert samples_of(range(100), 8, None, 3, None).of_step(0).tolist() == samples(100, 8, 8, 3).of_step(0).tolist()
    backwards = samples_of(range(100), 4, 2, 3, [5, 3, 1, 0, 2])
    assert (backwards.size, backwards.of_step(0).tolist(), backwards.of_step(1).tolist()) == (5, [5, 3, 1, 0], [2])


def test_a_rank_with_another_order_than_the_first_leaves_with_a_status_of_its_own(caplog):
    registers = MemoryRegisters()
    asked = []

    def rank(number, seed, elders=()):
        given, left = samples(seed=seed), list(elders)
        connection = StoreConnection(number, 3, registers, registers)
        agree_on_orders(given, connection, None, lambda: asked.append(number) or bool(left and left.pop()))
        return given

    first, same, other = rank(0, 7), rank(1, 7), rank(2, 8)
    for given in (first, same):
        given.of_step(0)
    with pytest.raises(SystemExit) as left:
        other.of_step(0)
    assert left.value.code == 77
    assert "rank 2 is refused, the data set has another order in epoch 0 than in the rest of the job" in caplog.text
    assert asked == [0], "who joins lets the others begin an epoch; what stands need not be waited for"
    rank(1, 7, elders=(True, True)).of_step(7)
    assert asked == [0, 1, 1, 1]


# ------------------------------------------------------------------------------------------------ micro-batches


class Seen(torch.nn.Module):
    """Multiplies by a weight of 2, and has buffers for the sum of what it saw and for the greatest number seen."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((1,), 2.0))
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("greatest", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.total += x.sum()
        self.greatest += int(x.max())
        return self.weight * x


def work(size=8, loss=lambda model, batch: model(batch).sum()):
    """Samples are the numbers from 0 on, in order: four to a step, in two micro-batches."""
    model = Seen()
    ordered = Samples(size, 4, 2, lambda epoch: np.arange(size))
    return model, StepWork(model, loss, torch.arange(float(size)), ordered, 0, torch.stack)


def memory(made):
    return np.full(made.flat.size_bytes, 255, dtype=np.uint8)


def test_a_step_is_the_sum_of_its_micro_batches_and_what_was_computed_is_used_again():
    model, made = work()
    both, first = memory(made), memory(made)
    assert made.fill(0, (0, 1), both) == 2
    assert [view.item() for view in made.flat.views(both)] == [6.0, 6.0, 4, 12.0], "gradient, buffers, loss"
    assert (model.total.item(), model.greatest.item(), model.weight.grad) == (0.0, 0, None), "as they were"
    assert made.fill(0, (0,), first) == 1
    for kept, computed in (
        ([], 2),
        ([KeptBatch(0, frozenset({0}), first)], 1),
        ([KeptBatch(0, frozenset({0, 1}), both)], 0),
        ([KeptBatch(1, frozenset({0}), first)], 2),
        ([KeptBatch(0, frozenset({0, 5}), first)], 2),
    ):
        again = memory(made)
        assert made.fill(0, (0, 1), again, kept) == computed
        assert again.tobytes() == both.tobytes()


@pytest.mark.parametrize(("divisor", "weight"), [(4, 0.5), (1, -4.0)])
def test_a_sum_is_applied_with_the_mean_move_of_buffers(divisor, weight):
    model, made = work()
    total = memory(made)
    made.fill(0, (0, 1), total)
    loss = made.apply(0, total, divisor, torch.optim.SGD(model.parameters(), lr=1.0))
    assert (loss, model.weight.item(), model.weight.grad) == (3.0, weight, None)
    assert (model.total.item(), model.greatest.item()) == (3.0, 2), "6 / 2, and (1 + 3) / 2"


def test_the_last_step_of_an_epoch_has_fewer_samples_and_perhaps_a_micro_batch_without():
    model, made = work(5)
    total = memory(made)
    made.fill(1, (0, 1), total)
    assert made.apply(1, total, 1, torch.optim.SGD(model.parameters(), lr=1.0)) == 8.0
    assert (model.weight.item(), model.total.item(), model.greatest.item()) == (-2.0, 4.0, 4)
    for loss in (lambda model, batch: model(batch), lambda model, batch: 1.0):
        _, wrong = work(8, loss)
        with pytest.raises(UsageError, match="must return one number"):
            wrong.fill(0, (0,), memory(wrong))
