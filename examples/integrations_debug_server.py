"""PyTorch's debug server with a page of Ringside's: the verdicts, and who waits for whom.

    torchrun --nproc-per-node 2 examples/integrations_debug_server.py --steps 1000     # then open http://localhost:25999/ringside

It requires torch 2.13 and `pip install jinja2 tabulate aiohttp`. Anyone who reaches the port can read it.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.debug import start_debug_server, stop_debug_server
from torch.nn.parallel import DistributedDataParallel

import ringside
from ringside.integrations.debug_server import handlers


def main() -> None:
    """Train on the ranks that torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="training steps (default: 1000)")
    parser.add_argument("--port", type=int, default=25999, help="of the server (default: 25999)")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    start_debug_server(options.port, handlers=handlers())  # the one line, on every rank
    model = DistributedDataParallel(nn.Linear(64, 64))
    ringside.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(options.steps):
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
    if dist.get_rank() == 0:
        stop_debug_server()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
