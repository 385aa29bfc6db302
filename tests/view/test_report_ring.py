"""The report's ring: every rank has its place on it, and the longest wait the widest arrow."""

from __future__ import annotations

import math
import re

import pytest

from ringside.view.html.rings import CENTRE, MOST_NAMES, RADIUS, waits_ring


def places(drawn: str) -> list[tuple[float, float]]:
    found = re.findall(r'<circle class="node[^"]*" cx="([\d.]+)" cy="([\d.]+)"', drawn)
    return [(float(x), float(y)) for x, y in found]


def widths(drawn: str) -> list[float]:
    return [float(width) for width in re.findall(r'stroke-width="([\d.]+)"', drawn)]


@pytest.mark.parametrize("ranks", [1, 2, 5, 64])
def test_ranks_stand_evenly_on_the_ring_from_the_top_on(ranks: int) -> None:
    spots = places(waits_ring([], ranks, set()))
    assert len(spots) == ranks
    assert spots[0] == pytest.approx((CENTRE, CENTRE - RADIUS), abs=0.1)
    for rank, (x, y) in enumerate(spots):
        angle = math.atan2(x - CENTRE, CENTRE - y) % (2 * math.pi)  # clockwise from the top
        assert angle == pytest.approx(2 * math.pi * rank / ranks, abs=0.01)
        assert math.hypot(x - CENTRE, y - CENTRE) == pytest.approx(RADIUS, abs=0.1)


def test_the_longest_wait_has_the_widest_arrow_and_arrows_among_many_ranks_are_thinner() -> None:
    waits = [(0, 1, 0.4), (2, 1, 0.1)]
    few, many = widths(waits_ring(waits, MOST_NAMES, set())), widths(waits_ring(waits, MOST_NAMES + 1, set()))
    assert few == [2.2, 6.0]  # the longest is drawn last, over the others
    assert many == [1.5, 3.0]
