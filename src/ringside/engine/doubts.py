"""Links that look slow are timed again before anybody is told so, or goes around them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ringside.engine.links import SLOW, beside, doubted, plainly_slow, usual_beside
from ringside.engine.network import Floats

if TYPE_CHECKING:
    from ringside.engine.probing import Prober

_LEAST_AGAIN = 3  # turns, however long they take: links so slow are timed for long each time


def without_doubt(prober: Prober, upper: Floats, known: Floats) -> Floats:
    """Time links that look slow again, and return the rates to go by: only what is plainly slow stays so.

    In the first place a link has three timings, on a busy machine one.

    Args:
        prober: Times links; every rank of the group calls this alike.
        upper: Bytes per second of each link, as it looked, float64 [n, n].
        known: A first idea of the same.
    """
    suspects = doubted(upper) if prober.effort.again else []
    if not suspects:
        return upper
    n, began = len(prober.vertices), prober.clock()
    rows = [[link, *beside(link, suspects, n)] for link in suspects]
    turns: list[list[list[float]]] = []
    for turn in range(prober.effort.again):
        if turn >= _LEAST_AGAIN and prober.late(began, prober.effort.again_s):
            break
        turns.append([[prober.bulk_rate(link, float(known[link])) for link in row] for row in rows])
    width = max(map(len, rows))
    padded = np.array([[row + [0.0] * (width - len(row)) for row in turn] for turn in turns])
    times = prober.total(padded)
    sure: Floats = upper.copy()
    for at, row in enumerate(rows):
        own, others = times[:, at, 0], times[:, at, 1 : len(row)].ravel()
        if not plainly_slow(own.tolist(), others.tolist()):
            sure[row[0]] = max(float(np.percentile(own, 75)), SLOW * usual_beside(upper, row[0]))
    return sure


__all__ = ["without_doubt"]
