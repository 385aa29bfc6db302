"""A step's synchronisation played: who is guilty, and the times for a picture before and after."""

from __future__ import annotations

import numpy as np

from ringside.errors import UsageError
from ringside.predict.options import TREES, schedule_for
from ringside.predict.plan import choose
from ringside.predict.simulate import simulate
from ringside.predict.timeline import Timeline
from ringside.predict.what_if_price import lawful
from ringside.predict.what_if_step import Step

MOST_RANKS = 4096  # a larger simulation takes seconds
SEGMENTS = 8  # of what is pipelined: a tree, a tensor through a switch


def played(step: Step) -> Timeline | None:
    """Return one bucket's all-reduce, each rank as late as its own work is longer than the shortest.

    A library's algorithm is played by the schedule that is like it (`options.schedule_for`).

    Returns:
        None where there is nothing to play: one rank, or more than `MOST_RANKS`.
    """
    topology = step.topology
    if not 2 <= topology.ranks <= MOST_RANKS:
        return None
    size, plain = step.bucket_bytes, lawful(topology)
    name = choose(plain, size, step.algorithm).name
    segments = SEGMENTS if name in (*TREES, "nvls") else 1
    own = np.median(step.own_s, axis=0)
    late = {rank: float(more) for rank, more in enumerate(own - own.min()) if more > 0}
    try:
        return simulate(schedule_for(plain, name), topology, size, late=late, segments=segments)
    except UsageError:  # too large to be played
        return None
