"""Collectives among the ranks of a process group, on one host or several: a weighted mean, a sub-group, and why.

    torchrun --nproc-per-node 2 examples/between_hosts.py
    ringside lab --hosts 2 --ranks-per-host 2 -- python examples/between_hosts.py

The second line runs it on hosts made of network namespaces (requires root).
"""

import torch
import torch.distributed as dist

import ringside


def main() -> None:
    """Reduce a few tensors over the ranks that a launcher started, and print on rank 0."""
    dist.init_process_group("gloo")
    with ringside.communicator(timeout=60) as comm:
        gradient = torch.full((1 << 20,), float(comm.rank))
        comm.all_reduce(gradient)

        # Ranks had 10, 11, ... samples: the mean over samples, not over ranks.
        loss = torch.tensor([1.0 + comm.rank])
        comm.all_reduce(loss, op="avg", weights=10.0 + comm.rank)

        # Even and odd ranks apart, at the same time.
        parity = comm.split(comm.rank % 2)
        members = parity.all_gather(torch.tensor([comm.rank]))
        parity.close()

        if comm.rank == 0:
            print(f"{comm.size} ranks on {len(comm.roster.hosts)} hosts")
            print(f"sum {gradient[0].item():g}, mean over samples {loss.item():.4f}, even ranks {members.tolist()}")
            print(comm.explain(gradient.nbytes).splitlines()[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
