"""Modules that put another tensor in a buffer's place: the same numbers as in place, on any number of ranks."""

import json
from pathlib import Path

import pytest
from tests.survive.herd import run_isolated

from ringside.errors import UsageError

torch = pytest.importorskip("torch")

from ringside.survive.data.micro_batches import StepWork  # noqa: E402
from ringside.survive.data.samples import Samples, shuffled  # noqa: E402

SCRIPT = str(Path(__file__).with_name("buffering.py"))


def test_buffers_that_are_replaced_move_as_those_that_are_written_into_on_any_number_of_ranks():
    in_place, replaced, two = map(json.loads, run_isolated(SCRIPT, limit_s=150).splitlines())
    assert in_place["errors"] == replaced["errors"] == two["errors"] == []
    expected = in_place["ended"]["0"]
    assert (expected["calls"], expected["begun"], expected["same"]) == (24, True, True)
    assert replaced["ended"] == {"0": expected}
    assert two["ended"] == {"0": expected, "1": expected}
    assert two["deaths"] == 1


def work_of(change, **buffers):
    """Return what computes micro-batches of a model whose loss does something to its buffers."""
    model = torch.nn.Linear(2, 1)
    for name, buffer in buffers.items():
        model.register_buffer(name, buffer, persistent=not name.startswith("hidden"))

    def loss(model, batch):
        change(model)
        return model(batch).sum()

    return model, computing(model, loss)


def computing(model, loss):
    return StepWork(model, loss, torch.ones(8, 2), Samples(8, 8, 2, shuffled(8, 0)), 0, torch.stack)


def compute(work):
    memory = torch.zeros(work.flat.size_bytes, dtype=torch.uint8).numpy()
    work.add(0, 0, memory)
    return memory


def grown(model):
    model.ema = torch.zeros(3)


def widened(model):
    model.ema = model.ema.double()


def gone(model):
    model.ema = None


def come(model):
    model.register_buffer("late", torch.zeros(1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (grown, r"buffer ema of a Linear was torch.float32 of shape \(2,\) and became torch.float32 of shape \(3,\)"),
        (widened, "became torch.float64"),
        (gone, "became nothing"),
        (come, "buffer late of a Linear was nothing"),
    ],
)
def test_a_buffer_that_becomes_another_kind_is_refused_by_name(change, said):
    _, work = work_of(change, ema=torch.zeros(2))
    with pytest.raises(UsageError, match=said):
        compute(work)


def test_what_a_module_only_keeps_to_spare_time_is_as_it_was_after_every_micro_batch():
    def keep(model):
        assert model.hidden is None
        model.hidden, model.hidden_too = torch.ones(5), torch.ones(7)

    model, work = work_of(keep, hidden=None, hidden_too=torch.zeros(2))
    compute(work)
    compute(work)
    assert model.hidden is None
    assert model.hidden_too.tolist() == [0, 0]


def test_a_buffer_in_two_places_stays_one_and_may_come_of_the_graph():
    def loss(model, batch):
        model.ema = 0.5 * model.weight.sum() + model.ema
        return model(batch).sum()

    model, _ = work_of(None, ema=torch.zeros(2))
    shared = model.twice = torch.nn.Linear(1, 1)
    shared.register_buffer("ema", model.ema)
    known = model.ema
    work = computing(model, loss)
    memory = compute(work)
    assert model.ema is known is shared.ema
    assert known.tolist() == [0, 0]
    moved = work.flat.views(memory)[4]
    assert torch.equal(moved, torch.full((2,), 0.5 * float(model.weight.detach().sum())))
