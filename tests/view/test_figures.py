"""Names of fields and their values in words."""

import pytest

from ringside.text import figure, title


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("throttled_ratio", 0.382, "throttled 38.2%"),
        ("others_waited_for_cpu_ratio", 0.0, "others waited for cpu 0.0%"),
        ("quota_cpus", 1.5, "quota 1.50 CPUs"),
        ("major_faults_per_step", 410.2, "major faults per step 410"),
        ("gpu_clock_mhz", 1110.0, "gpu clock 1110 MHz"),
        ("gpu_celsius", 88.0, "gpu 88.0 °C"),
        ("gpu_cap_watts", 350.0, "gpu cap 350 W"),
        ("gpu_clock_reasons", "power cap", "gpu clock reasons power cap"),
    ],
)
def test_evidence_has_words_and_units(name: str, value: float | str, words: str):
    assert f"{title(name)} {figure(name, value)}".replace("\xa0", " ") == words
