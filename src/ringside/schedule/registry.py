"""The algorithms by name."""

from __future__ import annotations

from collections.abc import Callable

from ringside.errors import UsageError
from ringside.schedule.algorithms.direct import (
    direct,
    direct_all_gather,
    direct_all_to_all,
    direct_gather,
    direct_reduce_scatter,
    direct_scatter,
    dissemination_barrier,
    one_shot,
    parameter_server,
)
from ringside.schedule.algorithms.doubling import halving_doubling, recursive_doubling
from ringside.schedule.algorithms.hierarchical import in_network, square_hierarchical
from ringside.schedule.algorithms.ring import (
    chain,
    chain_broadcast,
    chain_reduce,
    ring,
    ring_all_gather,
    ring_reduce_scatter,
)
from ringside.schedule.algorithms.tree import binomial_broadcast, binomial_reduce, tree, two_tree
from ringside.schedule.schedule import Schedule

Make = Callable[[int], Schedule]

# All-reduce algorithms. `hierarchical` is cut into hosts as square as can be: `ringside.schedule.host_sizes`.
ALGORITHMS: dict[str, Make] = {
    "ring": ring,
    "direct": direct,
    "parameter_server": parameter_server,
    "recursive_doubling": recursive_doubling,
    "halving_doubling": halving_doubling,
    "tree": tree,
    "two_tree": two_tree,
    "chain": chain,
    "one_shot": one_shot,
    "in_network": in_network,
    "hierarchical": square_hierarchical,
}

# Other collectives; those with a root take it as a second argument, 0 by default.
COLLECTIVES: dict[str, Make] = {
    "ring_reduce_scatter": ring_reduce_scatter,
    "direct_reduce_scatter": direct_reduce_scatter,
    "ring_all_gather": ring_all_gather,
    "direct_all_gather": direct_all_gather,
    "binomial_broadcast": binomial_broadcast,
    "binomial_reduce": binomial_reduce,
    "chain_broadcast": chain_broadcast,
    "chain_reduce": chain_reduce,
    "direct_gather": direct_gather,
    "direct_scatter": direct_scatter,
    "direct_all_to_all": direct_all_to_all,
    "dissemination_barrier": dissemination_barrier,
}


def by_name(name: str, ranks: int) -> Schedule:
    """Return the schedule called `name`, of `ALGORITHMS` or `COLLECTIVES`, for `ranks` ranks.

    Raises:
        UsageError: There is no such algorithm (the message lists those that exist), or `ranks` is below 1.
    """
    if name not in ALGORITHMS and name not in COLLECTIVES:
        raise UsageError(
            f"there is no algorithm {name!r}; there are {', '.join(sorted(ALGORITHMS))}, "
            f"and for other collectives {', '.join(sorted(COLLECTIVES))}"
        )
    if ranks < 1:
        raise UsageError(f"{name} needs at least 1 rank, not {ranks}")
    return (ALGORITHMS.get(name) or COLLECTIVES[name])(ranks)
