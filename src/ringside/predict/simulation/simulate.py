"""A schedule played over a topology: exactly when every rank has finished, in max-plus arithmetic.

The rules of the model, and nothing else:

1.  **Rounds.** A vertex takes part in a round when it has finished the one before it; there is no barrier. It has
    finished when all it sends in the round has left, all that is sent to it has arrived, and it has added that up. It
    need not have entered a round for a message of that round to arrive: there is always a place for it.
2.  **Messages.** All chunks from one vertex to another in a round travel as one message. It begins when its sender
    takes part, occupies the sender for its time on the wire, and arrives `alpha_s` after it has left. Both directions
    of everything are independent of each other (full duplex), and so are all messages of a round, but for rule 3.
3.  **Sharing.** Time on the wire is the longest of: the message's bytes by its link's rate, and for everything that it
    shares with others of the same round (the port of its sender and of its receiver inside a host; the host's memory
    or bus; the network interface of its sender's and of its receiver's host; the uplinks of their leaves) all of that
    round's bytes through it by its rate. For equal messages that start together this is a fair share; for others it is
    the time in which the last of them is through. Messages of different rounds do not slow each other down.
4.  **Work.** For each message that a rank sends or takes, it works `overhead_s`: for all that it sends before they
    begin, for all that it takes at the end. What it receives to add up it adds when all has arrived, at
    `reduce_bytes_per_s`. Switches reduce at line rate, have a port for everybody, and do no work.
5.  **Start.** Rank r takes part in round 0 at `late[r]`, or at 0.

Chunks are exact shares of the tensor, 1/chunks each. Pipelining is a schedule of its own
(`ringside.schedule.pipelined`; `segments` below), whose rounds then hold messages of several of the original's.

J. Baccelli et al., "Synchronization and Linearity" (1992), for the algebra; A. Alexandrov et al., "LogGP" (SPAA 1995),
for overhead and gap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ringside.errors import UsageError
from ringside.predict.simulation.closed_form import closed_form
from ringside.predict.simulation.rounds import PreparedRounds, stretches
from ringside.predict.simulation.timeline import Timeline, checkpoint_every
from ringside.predict.topology.topology import Topology
from ringside.predict.topology.wires import Floats, wires_for
from ringside.schedule import Schedule, pipelined

Late = Mapping[int, float]

MOST_RANKS = 1 << 17  # a ring of them takes half a minute
MOST_PLAYED = 1 << 22  # sizes times pairs of vertices that are played at once; each may have a message


def simulate(
    schedule: Schedule, topology: Topology, size_bytes: float, *, late: Late | None = None, segments: int = 1
) -> Timeline:
    """Play a schedule over a topology; see the module for what that means.

    Args:
        schedule: Any collective, of as many ranks as the topology.
        topology: What it runs over.
        size_bytes: Of the tensor, 0 or more.
        late: By rank, how much later than the others it begins, seconds.
        segments: Pieces that every chunk is pipelined in.

    Returns:
        When everybody finished (`finish_seconds`, float64 [ranks]), and why.

    Raises:
        UsageError: They do not fit together, a figure cannot be, or the schedule lists more than memory or patience
            holds.
    """
    schedule = schedule if segments == 1 else pipelined(schedule, segments)
    wires = wires_for(schedule, topology)
    size = checked_size(size_bytes)
    ready = _start(schedule, topology, late)
    if schedule.ranks > MOST_RANKS:
        raise UsageError(
            f"{schedule.ranks} ranks take minutes to simulate: take at most {MOST_RANKS}, or fewer --hosts"
        )
    every = checkpoint_every(schedule)
    kept = [ready]
    for stretch in stretches(schedule):
        round_ = PreparedRounds(stretch, wires)
        at, end = stretch.first, stretch.first + stretch.rounds
        while at < end:
            until = min((at // every + 1) * every, end)
            ready = round_.play(ready, size, until - at)
            at = until
            if at % every == 0:
                kept.append(ready)
    return Timeline(schedule, topology, size, dict(late or {}), ready, np.array(kept), every)


def finish_seconds(
    schedule: Schedule, topology: Topology, sizes: Sequence[float], *, late: Late | None = None, segments: int = 1
) -> Floats:
    """Return when every rank finishes, for several sizes at once, seconds, float64 [sizes, ranks].

    Arguments and errors as for `simulate`; `sizes` in bytes.
    """
    schedule = schedule if segments == 1 else pipelined(schedule, segments)
    wires = wires_for(schedule, topology)
    checked = np.array([checked_size(size) for size in sizes])[:, None]
    ready = np.tile(_start(schedule, topology, late), (len(checked), 1))
    at_once = max(1, MOST_PLAYED // schedule.vertices**2)
    parts = [slice(first, first + at_once) for first in range(0, len(checked), at_once)]
    for stretch in stretches(schedule):
        round_ = PreparedRounds(stretch, wires)
        for part in parts:
            ready[part] = round_.play(ready[part], checked[part], stretch.rounds)
    return ready[:, : schedule.ranks]


def checked_size(size_bytes: float) -> float:
    """Return a number of bytes as a float; raise `UsageError` unless it is finite and 0 or more."""
    size = float(size_bytes)
    if not (math.isfinite(size) and size >= 0):
        raise UsageError(f"a tensor has 0 bytes or more, not {size_bytes}")
    return size


def _start(schedule: Schedule, topology: Topology, late: Late | None) -> Floats:
    ready = np.zeros(schedule.vertices)
    for rank, seconds in (late or {}).items():
        if not 0 <= rank < topology.ranks:
            raise UsageError(f"rank {rank} cannot be late: ranks are 0 to {topology.ranks - 1}")
        if not (math.isfinite(seconds) and seconds >= 0):
            raise UsageError(f"rank {rank} is late by 0 seconds or more, not {seconds:g}")
        ready[rank] = seconds
    return ready


# -------------------------------------------------------------------------------------------------
# What a collective takes: by its formula where there is one, else by simulation. The two agree.


def price(schedule: Schedule, topology: Topology, size_bytes: float, *, segments: int = 1) -> float:
    """Return what a collective takes until its last rank has finished, seconds.

    Args:
        schedule: Of as many ranks as the topology.
        topology: What it runs over.
        size_bytes: Of the tensor, 0 or more.
        segments: Pieces that every chunk is pipelined in.

    Raises:
        UsageError: They do not fit together, a figure cannot be, or there is no formula and the schedule is too large
            to simulate.
    """
    return float(prices(schedule, topology, [size_bytes], segments=segments)[0])


def prices(schedule: Schedule, topology: Topology, sizes: Sequence[float], *, segments: int = 1) -> Floats:
    """Return what a collective takes for each of several sizes, seconds, float64 [sizes]; otherwise as `price`."""
    checked = [checked_size(size) for size in sizes]
    wires_for(schedule, topology)  # raises where they do not fit
    found = closed_form(schedule, topology, checked) if segments == 1 else None
    if found is not None:
        return found
    latest: Floats = finish_seconds(schedule, topology, checked, segments=segments).max(axis=1)
    return latest
