"""A fork of a rank has memory of its own: what it does to its gradients happens to nobody else."""

from __future__ import annotations

import multiprocessing

import pytest

torch = pytest.importorskip("torch")

from ringside.pytorch.shared_storage import empty_shared, storage_of  # noqa: E402


def scribble(tensors, queue):
    for tensor in tensors:
        tensor.fill_(1e6)
    queue.put([float(tensor.sum()) for tensor in tensors] + [storage_of(tensor) is None for tensor in tensors])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of a process with threads, as all that trains is
def test_what_a_forked_child_writes_into_its_gradients_reaches_nobody():
    context = multiprocessing.get_context("fork")
    gone = empty_shared(5000, torch.float32)
    bucket, other = (empty_shared(numel, torch.float32).fill_(3.0) for numel in (5000, 1))
    del gone
    queue = context.SimpleQueue()
    for _ in range(2):
        child = context.Process(target=scribble, args=([bucket[:2500], bucket[2500:], other], queue))
        child.start()
        assert queue.get() == [2500e6, 2500e6, 1e6, True, True, True]
        child.join()
        assert child.exitcode == 0
        assert torch.equal(bucket, torch.full((5000,), 3.0))
        assert torch.equal(other, torch.full((1,), 3.0))
        assert storage_of(bucket) is not None
    queue.close()
