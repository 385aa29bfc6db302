"""Collective algorithms as data: made, proved right, and run in the plainest way. Pure NumPy.

`ring(8)` is a `Schedule`; `verify(ring(8))` is the proof and the audit. Every other room reads schedules: engines run
them, the predictor prices them, the drawing shows them.
"""

from ringside.schedule.algorithms import ALGORITHMS, COLLECTIVES, by_name
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
from ringside.schedule.algorithms.hierarchical import hierarchical, host_sizes, in_network
from ringside.schedule.algorithms.ring import (
    chain,
    chain_broadcast,
    chain_reduce,
    ring,
    ring_all_gather,
    ring_reduce_scatter,
)
from ringside.schedule.algorithms.tree import binomial_broadcast, binomial_reduce, tree, two_tree
from ringside.schedule.collective import Collective
from ringside.schedule.combine import on_group, pipelined, relabel, reverse, striped
from ringside.schedule.proof.audit import Audit, Problem
from ringside.schedule.proof.verify import verify
from ringside.schedule.schedule import Round, Schedule, chunk_bounds, contributions, from_rounds, run
from ringside.schedule.traffic import Traffic, traffic

__all__ = [
    "ALGORITHMS", "COLLECTIVES", "Audit", "Collective", "Problem", "Round", "Schedule", "Traffic",
    "binomial_broadcast", "binomial_reduce", "by_name", "chain", "chain_broadcast", "chain_reduce",
    "chunk_bounds", "contributions", "direct", "direct_all_gather", "direct_all_to_all", "direct_gather",
    "direct_reduce_scatter", "direct_scatter", "dissemination_barrier", "from_rounds", "halving_doubling",
    "hierarchical", "host_sizes", "in_network", "on_group", "one_shot", "parameter_server", "pipelined",
    "recursive_doubling", "relabel", "reverse", "ring", "ring_all_gather", "ring_reduce_scatter", "run",
    "striped", "traffic", "tree", "two_tree", "verify",
]  # fmt: skip
