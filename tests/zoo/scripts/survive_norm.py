"""Exactly-once training of a model with batch norm and dropout, with a schedule; the last line is in the block."""

import torch
from counting import BATCH, Counted, Noisy, loss, note
from torch import nn

import ringside


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Counted(nn.BatchNorm1d(32), nn.Dropout(0.2))
    optimizer = torch.optim.SGD(model.groups(0.05), lr=0.05, momentum=0.9, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 1.0])
    with ringside.survive.training(
        model, optimizer, Noisy(), loss_fn=loss, batch_size=BATCH, micro_batches=4, steps=48, scheduler=scheduler
    ) as t:
        for step in t:
            note(t, step, model)
        if t.rank == 0:
            parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            torch.save({key: part.state_dict() for key, part in parts.items()}, "final.pt")


if __name__ == "__main__":
    main()
