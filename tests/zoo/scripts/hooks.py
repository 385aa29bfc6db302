"""Hooks on tensors, parameters and modules; optimizer steps in backward; the counts and orders are printed."""

from collections import Counter

import torch
import torch.distributed as dist
from kit import Net, batches, begin, keep, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = begin()
    model = DDP(Net(), bucket_cap_mb=0.01)
    seen, orders = Counter(), []
    for name, parameter in model.named_parameters():
        parameter.register_hook(
            lambda gradient, name=name: seen.update([f"tensor {name}"]) or gradient.clamp(-0.1, 0.1)
        )
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: orders.append(name))
    model.register_forward_pre_hook(lambda module, args: seen.update(["forward pre"]) or (args[0] * 0.5,))
    model.register_forward_hook(lambda module, args, output: seen.update(["forward"]) or output * 2)
    model.register_full_backward_hook(lambda module, inputs, outputs: seen.update(["backward"]))
    model.module.head.register_full_backward_pre_hook(lambda module, outputs: seen.update(["head"]))
    model.register_state_dict_post_hook(lambda module, state, prefix, local: seen.update(["state_dict"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: seen.update(["step"]))
    for x, y in batches(6, rank):
        optimizer.zero_grad()
        output = model(x)
        output.register_hook(lambda gradient: gradient * 1.5)
        nn.functional.cross_entropy(output, y).backward()
        optimizer.step()
    keep("model", model)
    counts = ", ".join(f"{name} {count}" for name, count in sorted(seen.items()))
    say(f"rank {rank}: {counts}; first to last {' '.join(orders[:4])}; hooks {len(model._forward_hooks)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
