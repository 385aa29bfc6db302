"""The algorithms, one file per family: functions of the number of ranks that return a `Schedule`; here, by name.

direct        Direct algorithms: everybody's own piece straight to where it belongs, without a rank in between
doubling      Recursive doubling
hierarchical  Hierarchical
ring          The ring and the chain: every rank sends to a neighbour only
tree          The tree
"""

from __future__ import annotations

from collections.abc import Callable

from ringside.errors import UsageError
from ringside.schedule.algorithms import direct, doubling, hierarchical, ring, tree
from ringside.schedule.schedule import Schedule
from ringside.text import did_you_mean

Make = Callable[[int], Schedule]

# All-reduce algorithms. `hierarchical` is cut into hosts as square as can be: `ringside.schedule.host_sizes`.
ALGORITHMS: dict[str, Make] = {
    "ring": ring.ring,
    "direct": direct.direct,
    "parameter_server": direct.parameter_server,
    "recursive_doubling": doubling.recursive_doubling,
    "halving_doubling": doubling.halving_doubling,
    "tree": tree.tree,
    "two_tree": tree.two_tree,
    "chain": ring.chain,
    "one_shot": direct.one_shot,
    "in_network": hierarchical.in_network,
    "hierarchical": hierarchical.square_hierarchical,
}

# Other collectives; those with a root take it as a second argument, 0 by default.
COLLECTIVES: dict[str, Make] = {
    "ring_reduce_scatter": ring.ring_reduce_scatter,
    "direct_reduce_scatter": direct.direct_reduce_scatter,
    "ring_all_gather": ring.ring_all_gather,
    "direct_all_gather": direct.direct_all_gather,
    "binomial_broadcast": tree.binomial_broadcast,
    "binomial_reduce": tree.binomial_reduce,
    "chain_broadcast": ring.chain_broadcast,
    "chain_reduce": ring.chain_reduce,
    "direct_gather": direct.direct_gather,
    "direct_scatter": direct.direct_scatter,
    "direct_all_to_all": direct.direct_all_to_all,
    "dissemination_barrier": direct.dissemination_barrier,
}


def by_name(name: str, ranks: int) -> Schedule:
    """Return the schedule called `name`, of `ALGORITHMS` or `COLLECTIVES`, for `ranks` ranks.

    Raises:
        UsageError: There is no such algorithm (the message lists those that exist), or `ranks` is below 1.
    """
    if name not in ALGORITHMS and name not in COLLECTIVES:
        raise UsageError(
            f"there is no algorithm {name!r}{did_you_mean(name, [*ALGORITHMS, *COLLECTIVES])}; "
            f"there are {', '.join(sorted(ALGORITHMS))}, "
            f"and for other collectives {', '.join(sorted(COLLECTIVES))}"
        )
    if ranks < 1:
        raise UsageError(f"{name} needs at least 1 rank, not {ranks}")
    return (ALGORITHMS.get(name) or COLLECTIVES[name])(ranks)
