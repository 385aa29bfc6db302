"""Exactly-once training in which rank 0, whose last line saves, may die just before that line."""

import torch
from counting import BATCH, Counted, Noisy, loss, note, strike

import ringside


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Counted()
    optimizer = torch.optim.SGD(model.groups(0.05), lr=0.05)
    with ringside.survive.training(model, optimizer, Noisy(), loss_fn=loss, batch_size=BATCH, steps=16) as t:
        for step in t:
            note(t, step, model, wait=False)
        strike("end")
    if t.rank == 0:
        torch.save({"model": model.state_dict(), "step": t.step}, "final.pt")


if __name__ == "__main__":
    main()
