"""A training script as users write them; nothing in it knows of Ringside. Only its backend is chosen by BACKEND.

It trains a small classifier with DistributedDataParallel on data that is made up: a sampler per rank, gradient
accumulation, clipping, mixed precision, a schedule of learning rates, validation with metrics reduced over the ranks,
early stopping that rank 0 decides, checkpoints that rank 0 writes and all ranks read again, and a sub-group of metrics.
The last line is a hash of the parameters.
"""

import argparse
import contextlib
import hashlib
import os
import random
import tempfile
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class Config:
    epochs: int = 3
    batch: int = 8
    accumulate: int = 2
    lr: float = 0.05
    clip: float = 1.0
    patience: int = 2
    width: int = 48
    classes: int = 5
    samples: int = 192
    history: list = field(default_factory=list)


class Blobs(Dataset):
    """Points around a centre per class; every rank makes the same ones."""

    def __init__(self, config, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(config.classes, (config.samples,), generator=generator)
        centres = torch.randn(config.classes, 16, generator=torch.Generator().manual_seed(0)) * 2
        self.points = centres[self.labels] + torch.randn(config.samples, 16, generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.points[index], self.labels[index]


class Net(nn.Module):
    """Two layers with a batch norm, whose statistics DDP broadcasts, and an embedding with sparse gradients' cousin."""

    def __init__(self, config):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, config.width), nn.BatchNorm1d(config.width), nn.ReLU())
        self.prior = nn.Embedding(config.classes, config.width)
        self.head = nn.Linear(config.width, config.classes)
        self.unused = nn.Linear(3, 3)

    def forward(self, x, hint=None):
        hidden = self.body(x)
        if hint is not None:
            hidden = hidden + 0.01 * self.prior(hint)
        return self.head(hidden)


class Meter:
    """A running mean whose parts are on all ranks."""

    def __init__(self):
        self.total, self.count = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)

    def add(self, value, count):
        self.total += float(value) * count
        self.count += count

    def mean(self, group=None):
        works = [dist.all_reduce(part, group=group, async_op=True) for part in (self.total, self.count)]
        for work in works:
            work.wait()
        return (self.total / self.count.clamp(min=1)).item()


def seed_everything(seed):
    random.seed(seed)
    torch.manual_seed(seed)


def is_main():
    return dist.get_rank() == 0


def share_config(args):
    """Rank 0 decides the configuration; the others take it over."""
    box = [Config(epochs=args.epochs) if is_main() else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def loaders(config):
    train, valid = Blobs(config, 1), Blobs(config, 2)
    sampler = DistributedSampler(train, shuffle=True, seed=3)
    train_loader = DataLoader(train, batch_size=config.batch, sampler=sampler, drop_last=True)
    valid_sampler = DistributedSampler(valid, shuffle=False)
    return train_loader, DataLoader(valid, batch_size=config.batch, sampler=valid_sampler), sampler


def train_epoch(model, loader, optimizer, scheduler, config, epoch):
    model.train()
    meter, loss_of = Meter(), nn.CrossEntropyLoss()
    for step, (x, y) in enumerate(loader):
        last = (step + 1) % config.accumulate == 0
        with contextlib.nullcontext() if last else model.no_sync():
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=epoch > 0):
                loss = loss_of(model(x, y if step % 3 else None).float(), y) / config.accumulate
            loss.backward()
        meter.add(loss.detach() * config.accumulate, len(y))
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
    return meter.mean()


@torch.no_grad()
def validate(model, loader, config, group):
    model.eval()
    right, confusion = Meter(), torch.zeros(config.classes, config.classes, dtype=torch.int32)
    worst = torch.tensor(float("inf"))
    for x, y in loader:
        logits = model.module(x)
        guess = logits.argmax(1)
        right.add((guess == y).float().mean(), len(y))
        confusion.index_put_((y, guess), torch.ones(len(y), dtype=torch.int32), accumulate=True)
        worst = torch.minimum(worst, logits.max(1).values.min())
    dist.reduce(confusion, dst=0, group=group)
    dist.all_reduce(worst, op=dist.ReduceOp.MIN, group=group)
    accuracy = right.mean(group)
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, {"rank": dist.get_rank(), "batches": len(loader)}, group=group)
    assert [each["rank"] for each in everybody] == list(range(dist.get_world_size()))
    if is_main():
        assert int(confusion.sum()) == sum(each["batches"] for each in everybody) * config.batch
    return accuracy, worst.item()


def should_stop(history, config):
    """Rank 0 looks at the history; all ranks do what it says."""
    stop = torch.zeros(1, dtype=torch.bool)
    if is_main() and len(history) > config.patience:
        stop[0] = max(history[-config.patience :]) < max(history[: -config.patience])
    flag = stop.to(torch.uint8)
    dist.broadcast(flag, src=0)
    return bool(flag)


def checkpoint(model, optimizer, scheduler, directory):
    """Rank 0 writes, all wait, all read."""
    path = os.path.join(directory, "checkpoint.pt")
    if is_main():
        torch.save(
            {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "lr": scheduler.state_dict()},
            path,
        )
    dist.barrier()
    state = torch.load(path, weights_only=True)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["lr"])
    dist.barrier()


def gather_norms(model):
    """Rank 0 hears of everybody's parameter norms, which must agree."""
    norm = torch.stack([parameter.detach().norm() for parameter in model.parameters()]).sum()
    rows = [torch.zeros(()) for _ in range(dist.get_world_size())] if is_main() else None
    dist.gather(norm, rows, dst=0)
    if is_main():
        assert all(torch.equal(row, rows[0]) for row in rows), rows
    return norm.item()


def shuffle_between_ranks(rank, size):
    """Trade rows of different numbers, as mixtures of experts do, and give them back."""
    counts = [(rank + j) % 3 + 1 for j in range(size)]
    rows = torch.arange(sum(counts) * 2, dtype=torch.float32).view(-1, 2) + 100 * rank
    their = torch.zeros(size, dtype=torch.int64)
    dist.all_to_all_single(their, torch.tensor(counts))
    took = torch.empty(int(their.sum()), 2)
    dist.all_to_all_single(took, rows, their.tolist(), counts)
    back = torch.empty_like(rows)
    dist.all_to_all_single(back, took, counts, their.tolist())
    assert torch.equal(back, rows)
    return took.sum().item()


def pass_around(rank, size):
    """Send a token around the ring."""
    token = torch.tensor([float(rank)])
    work = dist.isend(token, (rank + 1) % size)
    got = torch.zeros(1)
    dist.recv(got, (rank - 1) % size)
    work.wait()
    return got.item()


def digest(model):
    sums = hashlib.sha256()
    for value in model.state_dict().values():
        sums.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sums.hexdigest()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--store", default=os.environ.get("STORE", ""))
    args = parser.parse_args(os.environ.get("ARGUMENTS", "").split())
    dist.init_process_group(
        os.environ["BACKEND"],
        init_method=f"file://{args.store}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=60),
    )
    rank, size = dist.get_rank(), dist.get_world_size()
    seed_everything(7)
    config = share_config(args)
    metrics = dist.new_group(list(range(size)))
    train_loader, valid_loader, sampler = loaders(config)
    model = DDP(Net(config), find_unused_parameters=True, bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.epochs * len(train_loader))
    with tempfile.TemporaryDirectory() as own:
        box = [own]
        dist.broadcast_object_list(box, src=0)
        for epoch in range(config.epochs):
            sampler.set_epoch(epoch)
            loss = train_epoch(model, train_loader, optimizer, scheduler, config, epoch)
            accuracy, worst = validate(model, valid_loader, config, metrics)
            config.history.append(accuracy)
            checkpoint(model, optimizer, scheduler, box[0])
            if is_main():
                print(f"epoch {epoch}: loss {loss:.6f}, accuracy {accuracy:.4f}, worst {worst:.4f}")
            if should_stop(config.history, config):
                break
        norm = gather_norms(model)
        dist.barrier()
    shuffled, token = shuffle_between_ranks(rank, size), pass_around(rank, size)
    print(f"rank {rank}: norm {norm:.6f}, shuffled {shuffled:g}, token {token:g}")
    print(digest(model.module))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
