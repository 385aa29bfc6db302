"""All-reduce of NumPy arrays between processes of one host; it does not require PyTorch.

    torchrun --nproc-per-node 2 --no-python python examples/numpy_all_reduce.py

Anything that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT can replace torchrun. Without them it is a world of
one.
"""

import numpy as np

import ringside


def main() -> None:
    """Sum an array of each rank, in private and in symmetric memory, at once and in the background."""
    with ringside.init() as comm:
        x = np.full((2, 3), comm.rank + 1.0, dtype=np.float32)
        comm.all_reduce(x)  # in place; every rank now holds the same sum

        fast = comm.empty(1 << 20, np.float32)  # memory that all ranks have mapped: nothing is copied
        fast[:] = comm.rank
        work = comm.all_reduce(fast, op="max", async_op=True)
        busy = sum(range(1000))  # meanwhile, something else
        work.wait()

        mean = comm.all_reduce(np.arange(4.0) * comm.rank, op="avg")
        comm.barrier()
        if comm.rank == 0:
            print(f"{comm.size} ranks")
            print("sum", x[0].tolist())
            print("max", float(fast[0]), float(fast[-1]))
            print("mean", mean.tolist())
            print("meanwhile", busy)


if __name__ == "__main__":
    main()
