"""Direct algorithms: everybody's own piece straight to where it belongs, without a rank in between."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ringside.schedule.collective import ALL_GATHER, ALL_TO_ALL, BARRIER, REDUCE_SCATTER, rooted
from ringside.schedule.combine import reverse
from ringside.schedule.schedule import Round, Schedule


def direct(n: int) -> Schedule:
    """Direct: every owner reduces its slice straight from all peers, then hands it to all of them.

    The two-shot pattern of NVLink systems and of shared memory; "direct spread" in R. Thakur, R. Rabenseifner, W.
    Gropp: "Optimization of collective communication operations in MPICH", IJHPCA 19 (2005).

    Return the direct all-reduce of `n` ranks.

    Round 0: everybody sends chunk k to its owner, rank k, which adds all of them in rank order. Round 1: owner k sends
    the result to everybody. n chunks, 2 rounds (0 for one rank), 2(n-1)/n of the tensor sent and received per rank,
    n-1 ports. The result is the canonical ((x0+x1)+x2)+... of every chunk, so it does not depend on the number of
    chunks.

    Raises:
        UsageError: n < 1.
    """
    return Schedule("direct", n, n, 2 if n > 1 else 0, _direct_round, (n, 0), rotational=True)


def direct_reduce_scatter(n: int) -> Schedule:
    """Return the first round of `direct`: rank r ends with the canonical sum of chunk r; raise `UsageError`: n < 1."""
    return Schedule("direct_reduce_scatter", n, n, min(n - 1, 1), _direct_round, (n, 0), 0, REDUCE_SCATTER, True)


def direct_all_gather(n: int) -> Schedule:
    """Return the second round of `direct`: everybody hands its chunk to all others; raise `UsageError`: n < 1."""
    return Schedule("direct_all_gather", n, n, min(n - 1, 1), _direct_round, (n, 1), 0, ALL_GATHER, True)


def _direct_round(n: int, first: int, k: int) -> Round:
    # Each rank begins with its right neighbour, so that not all of them call on rank 0 first.
    dst = np.arange(1, n, dtype=np.int32)
    reducing = first + k == 0
    return Round(np.zeros_like(dst), dst, dst if reducing else np.zeros_like(dst), np.full(n - 1, reducing))


# -------------------------------------------------------------------------------------------------
# One shot.


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


# -------------------------------------------------------------------------------------------------
# The parameter server.


def parameter_server(n: int) -> Schedule:
    """The parameter server: one rank adds up everything and hands it back. It grows linearly with the ranks.

    M. Li et al.: "Scaling distributed machine learning with the parameter server", OSDI 2014, with a single server.

    Return the all-reduce of `n` ranks in which rank 0 is the server.

    Round 0: everybody sends the whole tensor to rank 0, which adds in rank order; round 1: rank 0 sends the sum back.
    One chunk, 2 rounds (0 for one rank); rank 0 sends and receives n-1 tensors over n-1 ports, the others one each.
    Canonical: ((x0+x1)+x2)+...

    Raises:
        UsageError: n < 1.
    """
    return Schedule("parameter_server", n, 1, 2 if n > 1 else 0, _server_round, (n,))


def _server_round(n: int, k: int) -> Round:
    clients = np.arange(1, n, dtype=np.int32)
    server = np.zeros_like(clients)
    src, dst = (clients, server) if k == 0 else (server, clients)
    return Round(src, dst, np.zeros_like(clients), np.full(n - 1, k == 0))


# -------------------------------------------------------------------------------------------------
# Gather, scatter, all-to-all and barrier.


def direct_gather(n: int, root: int = 0) -> Schedule:
    """Return the gather in one round: everybody sends its chunk (rank r owns chunk r) to rank `root`.

    n chunks; the root receives (n-1)/n of the tensor over n-1 ports, in rank order.

    Raises:
        UsageError: n < 1, or there is no such root.
    """
    collective = rooted("gather", n, root)
    return Schedule("direct_gather", n, n, min(n - 1, 1), _gather_round, (n, root), collective=collective)


def direct_scatter(n: int, root: int = 0) -> Schedule:
    """Return the scatter in one round: rank `root` sends chunk r to rank r; raise `UsageError` as `direct_gather`."""
    rooted("scatter", n, root)  # a wrong root is said of the scatter
    return replace(reverse(direct_gather(n, root)), name="direct_scatter")


def direct_all_to_all(n: int) -> Schedule:
    """Return the all-to-all in one round: rank i sends chunk i*n+j to rank j, beginning with its right neighbour.

    n*n chunks; every rank sends and receives (n-1)/n² of the tensor (the tensor is all ranks' data together) over n-1
    ports.

    Raises:
        UsageError: n < 1.
    """
    return Schedule("direct_all_to_all", n, n * n, min(n - 1, 1), _all_to_all_round, (n,), collective=ALL_TO_ALL)


def dissemination_barrier(n: int) -> Schedule:
    """Return the barrier: in round k rank r tells rank r + 2^k mod n whom it has heard of.

    D. Hensgen, R. Finkel, U. Manber: "Two algorithms for barrier synchronization", Int. J. Parallel Programming 17
    (1988).

    ceil(log2(n)) rounds, the fewest there can be, one port. Its one chunk carries nothing; a contribution in it stands
    for "has arrived", and may arrive twice.

    Raises:
        UsageError: n < 1.
    """
    rounds = max(n - 1, 0).bit_length()
    return Schedule("dissemination_barrier", n, 1, rounds, _barrier_round, (n,), collective=BARRIER)


def _gather_round(n: int, root: int, k: int) -> Round:
    src = np.delete(np.arange(n, dtype=np.int32), root)
    return Round(src, np.full_like(src, root), src, np.zeros(len(src), dtype=np.bool_))


def _all_to_all_round(n: int, k: int) -> Round:
    src = np.repeat(np.arange(n, dtype=np.int32), n - 1)
    dst = (src + np.tile(np.arange(1, n, dtype=np.int32), n)) % n
    return Round(src, dst, src * n + dst, np.zeros(len(src), dtype=np.bool_))


def _barrier_round(n: int, k: int) -> Round:
    src = np.arange(n, dtype=np.int32)
    return Round(src, (src + (1 << k)) % n, np.zeros_like(src), np.ones(n, dtype=np.bool_))
