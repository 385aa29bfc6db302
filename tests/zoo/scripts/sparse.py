"""An embedding with sparse gradients beside dense layers, each with an optimizer of its own."""

import torch
import torch.distributed as dist
from kit import begin, keep, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(200, 16, mode="sum", sparse=True)
        self.head = nn.Linear(16, 3)

    def forward(self, text):
        return self.head(self.words(text))


def main():
    rank, _ = begin()
    model = DDP(Tagger())
    dense = torch.optim.AdamW(model.module.head.parameters(), lr=1e-2)
    sparse = torch.optim.SparseAdam(model.module.words.parameters(), lr=1e-2)
    touched = 0
    for step in range(8):
        g = torch.Generator().manual_seed(10 * step + rank)
        text = torch.randint(200, (4, 6 + rank), generator=g)
        dense.zero_grad()
        sparse.zero_grad()
        model(text).square().mean().backward()
        touched += model.module.words.weight.grad.coalesce().indices().numel()
        dense.step()
        sparse.step()
    say(f"rank {rank}: {touched} rows")
    torch.save(model.module.state_dict(), f"model.{rank}.pt")
    keep("head", model.module.head)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
