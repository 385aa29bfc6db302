"""What a collective takes: by its formula where there is one, else by simulation. The two agree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ringside.predict.closed_form import closed_form
from ringside.predict.simulate import checked_size, finish_seconds
from ringside.predict.topology import Topology
from ringside.predict.wires import wires_for
from ringside.schedule import Schedule

Floats = NDArray[np.float64]


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
    wires_for(schedule, topology)  # says what does not fit
    found = closed_form(schedule, topology, checked) if segments == 1 else None
    if found is not None:
        return found
    latest: Floats = finish_seconds(schedule, topology, checked, segments=segments).max(axis=1)
    return latest
