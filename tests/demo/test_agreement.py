import threading

import pytest

pytest.importorskip("torch")
from torch.distributed import HashStore

from ringside.demo.train import EVERY, Agreement


def walk(store, rank, limit, decide, done):
    agreement = Agreement(store, rank, limit, decide)
    step = 0
    while agreement.goes_on(step):
        step += 1
    done[rank] = step


@pytest.mark.parametrize(
    ("limit", "wanted", "end"), [(50, 50, 50), (50, 30, 30), (5, 99, 5), (50, 0, EVERY), (1, 0, 1)]
)
def test_all_ranks_end_at_the_step_that_rank_0_decided(limit, wanted, end):
    store, done = HashStore(), {}
    ranks = [threading.Thread(target=walk, args=(store, rank, limit, lambda: wanted, done)) for rank in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(30)
    assert done == dict.fromkeys(range(3), end)
