"""A checkpoint is a place in a sequence of samples: whoever has another sequence does not go on from it."""

from collections import Counter

import pytest

from ringside.errors import MismatchError

torch = pytest.importorskip("torch")

from ringside.survive.state.checkpoint import Checkpoints  # noqa: E402
from ringside.survive.train import training  # noqa: E402

SIZE = 320


class Noted(torch.utils.data.Dataset):
    """Remembers which samples were taken."""

    def __init__(self, size=SIZE):
        self.size, self.taken = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.taken.append(index)
        return torch.ones(1) * index


def shuffle(seed, size=SIZE):
    return torch.utils.data.RandomSampler(range(size), generator=torch.Generator().manual_seed(seed))


def train(directory, steps, size=SIZE, batch_size=8, **given):
    """Train alone; return the samples that were taken."""
    data, model = Noted(size), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    shape = {"batch_size": batch_size, "micro_batches": 4, "checkpoint_dir": directory, "checkpoint_every": 10, **given}
    with training(model, optimizer, data, loss_fn=lambda model, x: model(x).sum(), steps=steps, **shape) as t:
        for _ in t:
            pass
    return data.taken


OTHERS = {
    "batch": ({"batch_size": 16}, r"the batch \(16 samples here, 8 samples there\)"),
    "seed": ({"seed": 3}, r"the seed \(3 here, 0 there\)"),
    "data set": ({"size": 400}, r"the data set \(400 samples here, 320 samples there\)"),
    "all": ({"batch_size": 4, "seed": 1}, r"the batch \(4 .*\); the seed \(1 here"),
    "sampler": ({"sampler": shuffle(5)}, r"the order of epoch 0 \(digest \w+ here, \w+ there\)"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_who_has_other_samples_is_refused_with_what_differs_and_loses_nothing(tmp_path, what):
    given, said = OTHERS[what]
    first = train(tmp_path, steps=10)
    with pytest.raises(MismatchError, match=said):
        train(tmp_path, steps=20, **given)
    second = train(tmp_path, steps=40)
    assert Counter(Counter(first + second).values()) == {1: SIZE}


def test_another_order_of_a_sampler_is_seen_though_all_numbers_are_the_same(tmp_path):
    first = train(tmp_path, steps=50, sampler=shuffle(5), checkpoint_every=50)  # in the second epoch
    with pytest.raises(MismatchError, match="the order of epoch 1"):
        train(tmp_path, steps=60, sampler=shuffle(6))
    second = train(tmp_path, steps=80, sampler=shuffle(5))
    assert Counter(Counter(first + second).values()) == {2: SIZE}


def test_steps_may_be_cut_otherwise(tmp_path):
    first = train(tmp_path, steps=10)
    second = train(tmp_path, steps=40, micro_batches=2)
    assert Counter(Counter(first + second).values()) == {1: SIZE}


def test_a_checkpoint_says_where_it_is(tmp_path):
    train(tmp_path, steps=10)
    said = Checkpoints(tmp_path).newest()["position"]
    assert (said["epoch"], said["sample"], said["ordered"]) == (0, 80, 0)
    assert said["passport"]["the batch"] == "8 samples"
