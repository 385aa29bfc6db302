"""One shot."""

from __future__ import annotations

import numpy as np

from ringside.schedule.schedule import Round, Schedule


def one_shot(n: int) -> Schedule:
    """One shot: everybody sends everything to everybody, and each adds for itself. One round, for tiny messages.

    The "one-shot" all-reduce of NVLink systems (TensorRT-LLM, vLLM); in MPI terms an all-gather followed by a local
    sum.

    Return the one-round all-reduce of `n` ranks.

    One chunk, 1 round (0 for one rank), n-1 tensors sent and received per rank over n-1 ports. Every rank adds in rank
    order, so all have the canonical ((x0+x1)+x2)+... without a second round.

    Raises:
        UsageError: n < 1.
    """
    return Schedule("one_shot", n, 1, 1 if n > 1 else 0, _one_shot_round, (n,))


def _one_shot_round(n: int, k: int) -> Round:
    src = np.repeat(np.arange(n, dtype=np.int32), n - 1)
    dst = (src + np.tile(np.arange(1, n, dtype=np.int32), n)) % n
    return Round(src, dst, np.zeros_like(src), np.ones(len(src), dtype=np.bool_))
