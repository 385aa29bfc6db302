"""Ctrl-C, between two steps or in backward, on all ranks or on one; the script saves what it has, and ends with 130."""

import os
import signal
import sys

import torch
from kit import Net, batches, begin, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)


def main():
    place, who = sys.argv[1], sys.argv[2]
    rank, _ = begin()
    mine = who == "all" or int(who) == rank
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    try:
        for step, (x, y) in enumerate(batches(100, rank)):
            optimizer.zero_grad()
            output = model(x)
            if step == 5 and mine:
                if place == "backward":
                    output.register_hook(interrupt)
                else:
                    interrupt()
            nn.functional.cross_entropy(output, y).backward()
            optimizer.step()
    except KeyboardInterrupt:
        say(f"rank {rank}: interrupted in step {step}")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"last.{rank}.pt")
        sys.exit(130)
    except RuntimeError as error:  # the other rank has left
        say(f"rank {rank}: lost the other one in step {step}")
        torch.save(model.state_dict(), f"lost.{rank}.pt")
        raise SystemExit(4) from error


if __name__ == "__main__":
    main()
