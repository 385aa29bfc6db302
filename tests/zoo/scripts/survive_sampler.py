"""Exactly-once training with torch's usual recipe for a reproducible shuffle; the last line saves on rank 0."""

import torch
from counting import BATCH, SAMPLES, Counted, Noisy, loss, note
from torch.utils.data import RandomSampler

import ringside


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Counted()
    optimizer = torch.optim.SGD(model.groups(0.05), lr=0.05, momentum=0.9)
    sampler = RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(5))
    with ringside.survive.training(
        model, optimizer, Noisy(), loss_fn=loss, batch_size=BATCH, steps=48, sampler=sampler
    ) as t:
        for step in t:
            note(t, step, model)
    if t.rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "final.pt")


if __name__ == "__main__":
    main()
