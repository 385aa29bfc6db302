from __future__ import annotations

import pytest

from ringside.errors import UsageError
from ringside.lab import parse_delay, parse_rate, payload_bytes_per_second


@pytest.mark.parametrize(
    ("text", "rate"), [("1gbit", 1e9), ("250mbit", 250e6), ("2.5Gbit", 2.5e9), ("800 kbit", 800e3), (1e6, 1e6)]
)
def test_rates(text: str | float, rate: float):
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text", ["1 elephant", "", "gbit", "1", "-1gbit", "1gbps", "1kbit", "200gbit", 0, float("nan")]
)
def test_what_is_no_rate_is_refused(text: str | float):
    with pytest.raises(UsageError, match="rate"):
        parse_rate(text)


@pytest.mark.parametrize(("text", "delay"), [("5ms", 5e-3), ("200us", 2e-4), ("1s", 1.0), ("0", 0.0), (0.02, 0.02)])
def test_delays(text: str | float, delay: float):
    assert parse_delay(text) == pytest.approx(delay)


@pytest.mark.parametrize("text", ["5", "fast", "-1ms", "11s", -1.0, float("nan")])
def test_what_is_no_delay_is_refused(text: str | float):
    with pytest.raises(UsageError, match="delay"):
        parse_delay(text)


def test_payload_is_what_headers_leave():
    assert payload_bytes_per_second("1gbit") == pytest.approx(125e6 * 1448 / 1514)
