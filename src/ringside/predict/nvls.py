"""NVLS: every GPU reduces its slice by reading it through the switch, and writes the sum through it to all.

NVIDIA's NVLink SHARP (NCCL 2.17). A GPU sends its whole tensor for others to add up and its own slice's sum, and
receives its slice's sum and the whole result: S + S/n each way. So with W bytes per second of every GPU's way to the
switch, algbw tends to W n/(n+1) when it is pipelined; no bus bandwidth of a ring can be read off it.
"""

from __future__ import annotations

import numpy as np

from ringside.schedule import Round, Schedule


def nvls(n: int) -> Schedule:
    """Return the NVLS all-reduce of `n` ranks around one switch, vertex n, that reduces and multicasts.

    n chunks, 4 rounds (0 for one rank): all send all chunks up, the switch hands owner r the sum of chunk r, owners
    send it up again, and the switch hands it to all, the owner too. (n+1)/n of the tensor sent and received per rank
    over one port. Canonical: the switch adds in rank order. Pipeline it: in 64 segments it is what NVLS does.

    Raises:
        UsageError: n < 1.
    """
    alone = n <= 1
    return Schedule("nvls", n, max(n, 1), 0 if alone else 4, _nvls_round, (n,), switches=0 if alone else 1)


def _nvls_round(n: int, k: int) -> Round:
    rank = np.arange(n, dtype=np.int32)
    if k in (1, 2):  # an owner's own chunk
        switch = np.full(n, n, dtype=np.int32)
        src, dst, chunk = (switch, rank, rank) if k == 1 else (rank, switch, rank)
    else:  # everybody's every chunk
        each, chunk = np.repeat(rank, n), np.tile(rank, n)
        switch = np.full(n * n, n, dtype=np.int32)
        src, dst = (each, switch) if k == 0 else (switch, each)
    return Round(src, dst, chunk, np.full(len(chunk), k == 0))
