import math
import os

from ringside.engine.topology import cpu_quota, usable_cores


def test_a_quota_counts(tmp_path):
    allowed = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path) == allowed
    for text, expected in (
        ("max 100000", allowed),
        ("100000 100000", 1),
        ("50000 100000", 1),
        ("9000000 100000", allowed),
    ):
        (tmp_path / "cpu.max").write_text(text)
        assert usable_cores(tmp_path) == expected
    assert cpu_quota(tmp_path) == 90
    (tmp_path / "cpu.max").write_text("150000 100000")
    assert cpu_quota(tmp_path) == 1.5
    assert cpu_quota(tmp_path / "nowhere") == math.inf


def test_version_one_of_control_groups(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))
    assert cpu_quota(tmp_path) == math.inf
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("100000\n")
    assert usable_cores(tmp_path) == 1
