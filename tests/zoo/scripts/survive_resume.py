"""Exactly-once training with checkpoints: all workers may die, and training goes on from the newest."""

import torch
from counting import BATCH, Counted, Noisy, loss, note
from torch.utils.data import SubsetRandomSampler

import ringside


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Counted()
    optimizer = torch.optim.SGD(model.groups(0.05), lr=0.05, momentum=0.9)
    with ringside.survive.training(
        model,
        optimizer,
        Noisy(),
        loss_fn=loss,
        batch_size=BATCH,
        steps=32,
        sampler=SubsetRandomSampler(range(64)),
        checkpoint_dir="checkpoints",
        checkpoint_every=5,
    ) as t:
        for step in t:
            note(t, step, model)
        if t.rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "final.pt")


if __name__ == "__main__":
    main()
