"""NVLS as a schedule: it is right, and its law is that of the published sweeps."""

import csv
from fractions import Fraction
from pathlib import Path

import pytest

from ringside.predict import LinkClass, Switch, Topology, price
from ringside.predict.plan.options import nvls
from ringside.schedule import verify

SWEEP = Path(__file__).parents[1] / "data" / "bandwidth" / "mleng_nvls_gpucount_h200.csv"


def host(n, rate, alpha=0.0):
    """Return one host of n ranks around a switch that reduces."""
    return Topology("one host", (n,), inside=LinkClass("nvswitch", 0.0, 1e12), nvls=Switch(alpha, rate))


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_it_is_an_all_reduce(n):
    audit = verify(nvls(n))
    assert audit.ok, audit.problems
    if n > 1:
        assert audit.traffic.max_bytes_sent == audit.traffic.max_bytes_received == Fraction(n + 1, n)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_pipelined_it_tends_to_its_law(n):
    rate, size, segments = 300e9, 1e9, 512
    took = price(nvls(n), host(n, rate), size, segments=segments)
    assert size / took == pytest.approx(rate * n / (n + 1), rel=4 / segments)


def test_published_sweeps_follow_the_law():
    with SWEEP.open() as file:
        rows = [row for row in csv.DictReader(file) if row["algo"] == "NVLS"]
    measured = {int(row["gpus"]): float(row["algbw_GBps"]) * 1e9 for row in rows}
    # One rate of the way to the switch, from the smallest and the largest number of GPUs; the others are predicted.
    ends = [measured[n] * (n + 1) / n for n in (min(measured), max(measured))]
    rate = sum(ends) / 2
    for n, algbw in measured.items():
        predicted = 8 * 2**30 / price(nvls(n), host(n, rate), 8 * 2**30, segments=1024)
        assert predicted == pytest.approx(algbw, rel=0.015), n
