"""Several groups: a model over all ranks, one per rank alone, one over a second group, collectives beside."""

import torch
import torch.distributed as dist
from kit import Net, batches, begin, keep, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, size = begin()
    alone = [dist.new_group([each]) for each in range(size)][rank]
    again = dist.new_group(list(range(size)))
    trunk, own, head = DDP(Net()), DDP(Net(16), process_group=alone), DDP(Net(24), process_group=again)
    optimizer = torch.optim.SGD([*trunk.parameters(), *own.parameters(), *head.parameters()], lr=0.1)
    total = torch.zeros(1)
    for x, y in batches(6, rank):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(trunk(x) + own(x), y) + nn.functional.cross_entropy(head(x), y)
        work = dist.all_reduce(loss.detach().clone(), group=again, async_op=True)
        loss.backward()
        optimizer.step()
        work.wait()
        total += work.result()[0]
    everybody = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(everybody, total, group=again)
    say(f"rank {rank}: {' '.join(f'{value.item():.6f}' for value in everybody)}")
    keep("trunk", trunk)
    keep("own", own)
    keep("head", head)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
