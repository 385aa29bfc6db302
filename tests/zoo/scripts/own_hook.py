"""The user's own communication hook: one of PyTorch's (fp16, PowerSGD), or one that is written here."""

import sys

import torch
import torch.distributed as dist
from kit import Net, begin, keep, say, train
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP


def summed(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Add up without dividing, and count."""
    state.append(bucket.index())
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def main():
    rank, _ = begin()
    model = DDP(Net(), bucket_cap_mb=0.01)
    seen: list[int] = []
    if sys.argv[1] == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif sys.argv[1] == "builtin":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    elif sys.argv[1] == "power":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        model.register_comm_hook(seen, summed)
    try:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    except RuntimeError as error:
        say(f"rank {rank}: a second one: {error}")
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 6, rank)
    say(f"rank {rank}: {seen}")
    keep("model", model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
