"""An exponential moving average of the DDP model, as diffusion models and detectors are trained."""

import torch
import torch.distributed as dist
from kit import Net, batches, begin, keep, say, train
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def main():
    rank, _ = begin()
    model = DDP(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 2, rank)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    train(model, optimizer, 6, rank, after=lambda step: ema.update_parameters(model))
    with torch.no_grad():
        difference = sum((model(x) - ema(x)).abs().sum() for x, _ in batches(2, rank))
    say(f"rank {rank}: the average is {difference:.6f} away after {int(ema.n_averaged)} steps")
    keep("model", model)
    keep("ema", ema)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
