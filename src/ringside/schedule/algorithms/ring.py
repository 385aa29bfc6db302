"""The ring and the chain: every rank sends to a neighbour only."""

from __future__ import annotations

from dataclasses import replace

from ringside.schedule.collective import ALL_GATHER, REDUCE_SCATTER, rooted
from ringside.schedule.combine import reverse
from ringside.schedule.schedule import Round, Schedule


def ring(n: int) -> Schedule:
    """The ring: the fewest bytes per rank there can be, one neighbour at a time.

    P. Patarasuk, X. Yuan: "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009), §4.

    Return the ring all-reduce of `n` ranks: reduce-scatter, then all-gather, each in n-1 rounds.

    Every rank only ever sends to its right neighbour (r+1) mod n. In the first half chunk c travels from rank c+1 once
    around to rank c, each rank adding its own; in the second half the finished chunk travels around from rank c.
    n chunks, 2(n-1) rounds, 2(n-1)/n of the tensor sent and received per rank (the lower bound), one port, right for
    every n ≥ 1.

    Raises:
        UsageError: n < 1.
    """
    half = n - 1
    return Schedule("ring", n, n, 2 * half, _ring_round, (n, 0), rotational=True, stretches=(half, half))


def ring_reduce_scatter(n: int) -> Schedule:
    """Return the first half of the ring: after n-1 rounds rank r has the sum of chunk r; raise `UsageError`: n < 1."""
    return Schedule("ring_reduce_scatter", n, n, n - 1, _ring_round, (n, 0), 0, REDUCE_SCATTER, True, (n - 1,))


def ring_all_gather(n: int) -> Schedule:
    """Return the second half of the ring: chunk r travels from rank r to all; n-1 rounds; raise `UsageError`: n < 1."""
    return Schedule("ring_all_gather", n, n, n - 1, _ring_round, (n, n - 1), 0, ALL_GATHER, True, (n - 1,))


def _ring_round(n: int, first: int, k: int) -> Round:
    reducing = first + k < n - 1
    behind = first + k + 1 if reducing else first + k - (n - 1)
    return Round.of([(0, 1, -behind % n, reducing)])


# -------------------------------------------------------------------------------------------------
# The chain.


def chain(n: int) -> Schedule:
    """The chain: a prefix sum that walks from rank 0 to the last, and the result that walks back. Made to be pipelined.

    The linear pipeline that P. Sanders, J. Speck, J. L. Träff (Parallel Computing 35, 2009) measure their trees
    against.

    Return the all-reduce of `n` ranks along a line.

    Rank k adds what came from rank k-1 to its own and passes it on; the last rank sends the result back down the line.
    One chunk, 2(n-1) rounds, at most 2 tensors sent and received per rank, one port. Canonical: the running sum is
    ((x0+x1)+x2)+... by construction, however many segments it is pipelined in. With m segments the two directions of
    every link are busy at once and the time tends to that of 1 tensor over one link.

    Raises:
        UsageError: n < 1.
    """
    return Schedule("chain", n, 1, 2 * (n - 1), _chain_round, (n,))


def _chain_round(n: int, k: int) -> Round:
    if k < n - 1:
        return Round.of([(k, k + 1, 0, True)])
    last = 2 * (n - 1) - k
    return Round.of([(last, last - 1, 0, False)])


def chain_broadcast(n: int, root: int = 0) -> Schedule:
    """Return the broadcast of rank `root`'s tensor along a line of `n` ranks: root, root + 1, ..., around the last.

    One chunk, n-1 rounds, 1 tensor sent and received per rank, one port: where segments of the tensor follow each other
    it tends to the time of 1 tensor over one link, however many ranks there are.

    Raises:
        UsageError: n < 1, or there is no such root.
    """
    collective = rooted("broadcast", n, root)
    return Schedule("chain_broadcast", n, 1, max(n - 1, 0), _broadcast_round, (n, root), collective=collective)


def chain_reduce(n: int, root: int = 0) -> Schedule:
    """Return the reduce of `n` ranks' tensors to rank `root`: the broadcast backwards; raise `UsageError` alike."""
    rooted("reduce", n, root)  # a wrong root is said of the reduce
    return replace(reverse(chain_broadcast(n, root)), name="chain_reduce")


def _broadcast_round(n: int, root: int, k: int) -> Round:
    return Round.of([((root + k) % n, (root + k + 1) % n, 0, False)])
