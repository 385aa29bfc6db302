"""torch.save of everything: the DDP model, its module, the optimizer, the scheduler; and the way back."""

import io
import pickle

import torch
import torch.distributed as dist
from kit import Net, begin, keep, say, train
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = begin()
    model = DDP(Net())
    torch.save(model, f"untrained.{rank}.pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    train(model, optimizer, 5, rank, after=lambda step: scheduler.step())
    torch.save({"ddp": model, "module": model.module, "optimizer": optimizer}, f"everything.{rank}.pt")
    torch.save(scheduler.state_dict(), f"scheduler.{rank}.pt")
    torch.save([parameter.grad for parameter in model.parameters()], f"gradients.{rank}.pt")
    again = torch.load(f"everything.{rank}.pt", weights_only=False)
    train(again["ddp"], again["optimizer"], 3, rank)
    third = pickle.loads(pickle.dumps(again["ddp"]))
    train(third, torch.optim.SGD(third.parameters(), lr=0.1), 3, rank)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    say(f"rank {rank}: {type(again['ddp']).__name__}, {sorted(set(model.__dict__) - set(again['ddp'].__dict__))}")
    say(f"rank {rank}: {buffer.tell()} bytes")
    keep("again", again["ddp"])
    keep("third", third)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
