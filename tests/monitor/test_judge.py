"""Slow hardware or more work: where one verdict ends and the other begins."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ringside.monitor.slow_rank.detector import judge_excess


@pytest.mark.parametrize(
    ("excess", "more_work", "kind"),
    [
        (0.30, 0.22, "uneven_work"),  # seven tenths are explained, however large the rest
        (0.30, 0.18, "slow_rank"),  # six tenths are not
        (0.12, 0.08, "uneven_work"),  # what remains is below the effect gate of 5%
        (0.20, 0.12, "slow_rank"),  # it is above, though less than half
        (0.06, 0.025, "slow_rank"),  # it is below, and more than half
        (0.06, 0.035, "uneven_work"),
        (0.20, -0.20, "slow_rank"),  # fewer samples explain nothing
        (-0.02, -0.02, "slow_rank"),
    ],
)
def test_more_samples_explain_an_excess_as_far_as_they_go(excess: float, more_work: float, kind: str) -> None:
    own, samples = np.full((40, 4), 0.1), np.full((40, 4), 32.0)
    own[:, 2] *= math.exp(excess)
    samples[:, 2] *= math.exp(more_work)
    verdict = judge_excess(2, own, samples, since_step=0, detected_step=40)
    assert verdict.kind == kind
    assert verdict.evidence["more_samples_ratio"] == pytest.approx(math.expm1(more_work))
    assert judge_excess(2, own, None, since_step=0, detected_step=40).kind == "slow_rank"


@pytest.mark.parametrize(("more_tokens", "kind"), [(0.30, "uneven_work"), (0.05, "slow_rank")])
def test_more_tokens_of_experts_are_more_work(more_tokens: float, kind: str) -> None:
    """Every rank has as many samples, and to one of them more tokens are sent."""
    own, samples, routed = np.full((40, 4), 0.1), np.full((40, 4), 32.0), np.full((40, 4), 1e6)
    own[:, 2] *= math.exp(0.25)
    routed[:, 2] *= math.exp(more_tokens)
    verdict = judge_excess(2, own, samples, routed, since_step=0, detected_step=40)
    assert verdict.kind == kind
    assert verdict.evidence["more_samples_ratio"] == 0.0
    assert verdict.evidence["more_routed_ratio"] == pytest.approx(math.expm1(more_tokens))
    assert ("tokens" in verdict.cause) == (kind == "uneven_work")
