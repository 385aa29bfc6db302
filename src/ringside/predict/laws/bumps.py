"""What times have beside a law's curve: bumps, steps, jumps at named switches, and what other tables show of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

Regimes = NDArray[np.int64]

REACH, STEP_REACH = 4.0, 0.7  # of a bump and of a step, in doublings of the size
BUMP, STEP = 0.18, 0.04  # their standard deviations before a table has spoken, of log time
JUMP = 0.25  # at a named switch, likewise; chosen by hand
NOISE = 0.015
SMOOTH = 0.5  # least variance of bumps, in units of the usual
SCALES = 2.0  # doublings of the ranks over which tables have bumps in common; chosen by hand


def bumps(a: Floats, b: Floats, scale: float, of_a: Regimes, of_b: Regimes) -> Floats:
    """Return the covariance of bumps, steps and jumps at sizes, float64 [len(a), len(b)], from log2 and regimes.

    Bumps are smooth (Matérn-3/2); steps, where a protocol or a count of channels changes, are not (Matérn-1/2). Rows a
    doubling apart cannot tell a step from noise; dense rows can. However well dense rows agree with their neighbours,
    that implies little about bumps beyond them: their variance does not fall below `SMOOTH` of the usual. Regimes are
    numbered: what lies behind a named switch is off by a jump.
    """
    far = np.abs(a[:, None] - b[None, :])
    smooth = np.sqrt(3.0) * far / REACH
    wide, narrow = max(scale, SMOOTH) * BUMP**2, scale * STEP**2
    same = (of_a[:, None] == of_b[None, :]) & (of_a[:, None] > 0)
    found: Floats = wide * (1.0 + smooth) * np.exp(-smooth) + narrow * np.exp(-far / STEP_REACH) + JUMP**2 * same
    return found


@dataclass(frozen=True, eq=False)
class Beside:
    """What tables of a cluster have beside their curves: the nearer two are, the more they have in common.

    Args:
        x: log2 of the sizes of each table.
        regimes: Of each of these rows.
        rest: What its rows have beside its curve, of log time.
        apart: How far the tables are from each other and, the last, from what is predicted: doublings of ranks.
    """

    x: Sequence[Floats]
    regimes: Sequence[Regimes]
    rest: Sequence[Floats]
    apart: Floats

    def given(self, x: Floats, scale: float, of_x: Regimes) -> tuple[Floats, Floats]:
        """Return what is expected at sizes, from log2 and regimes, and its covariance, float64 [n], [n, n]."""
        alike = np.exp(-self.apart / SCALES)
        table = np.repeat(np.arange(len(self.x)), [len(one) for one in self.x])
        known, of_known = np.concatenate(self.x), np.concatenate(self.regimes)
        rows = bumps(known, known, scale, of_known, of_known) * alike[np.ix_(table, table)]
        rows += scale * NOISE**2 * np.eye(len(known))
        toward = bumps(x, known, scale, of_x, of_known) * alike[-1, table]
        share: Floats = np.linalg.solve(rows, toward.T).T
        expected: Floats = share @ np.concatenate(self.rest)
        covariance: Floats = bumps(x, x, scale, of_x, of_x) - share @ toward.T
        return expected, covariance
