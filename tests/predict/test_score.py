"""Scores: what is fitted and what is not, the three baselines, and every floor on the published tables."""

from dataclasses import replace

import numpy as np
import pytest

from ringside.errors import UsageError
from ringside.predict.laws.knowledge import Knowledge
from ringside.predict.score import (
    check_tables,
    errors_of,
    hockney,
    hold_out,
    interpolate,
    larger_sizes,
    line_flags,
    measured,
    nccl_constants,
    other_scale,
    preset_only,
    same_cluster,
    summary,
    with_ranks,
)
from ringside.predict.tables import read_tables
from ringside.predict.tables.checks import check_rows
from ringside.predict.tables.table import Flag, Table, TableRow
from ringside.predict.topology.files import preset

from .shared_tables import made, published

SIZES = 2.0 ** np.arange(3, 34)
THETA = np.log([25e-6, 2.5, 6.0, 180e9])
KNOWN = Knowledge()


def test_errors_are_ratios_to_the_measured_time():
    sizes, told, true = np.array([8.0, 2.0**20, 2.0**21]), np.array([1.1, 2.0, 3.6]), np.array([1.0, 2.0, 4.0])
    found = errors_of(sizes, told, true)
    assert found.mape == pytest.approx(0.2 / 3)
    assert found.median == pytest.approx(0.1)
    assert found.bias == pytest.approx(0.0, abs=1e-12)
    assert found.mape_large == pytest.approx(0.05)
    assert found.worst_size_bytes in (8, 2**21)


def test_rows_that_are_held_out_have_no_part_in_the_fit():
    table = check_rows(made(THETA, SIZES, noise=0.05))
    before = hold_out(table, KNOWN)
    moved = tuple(replace(row, time_s=row.time_s * 1.1) if i % 2 else row for i, row in enumerate(table.rows))
    after = hold_out(replace(table, rows=moved), KNOWN)
    assert np.array_equal(before.prediction.times_s, after.prediction.times_s)
    assert np.array_equal(before.prediction.high_s, after.prediction.high_s)
    assert before.errors.mape != after.errors.mape
    assert [row.size_bytes for row in before.scored] == list(SIZES[1::2])
    assert before.fitted == 16


def test_larger_sizes_are_not_seen():
    table = check_rows(made(THETA, SIZES, noise=0.02))
    score = larger_sizes(table, KNOWN, 16 << 20)
    assert min(row.size_bytes for row in score.scored) == 32 << 20
    assert score.fitted == int((SIZES <= 16 << 20).sum())
    cut = replace(
        table, rows=tuple(replace(r, time_s=2 * r.time_s) if r.size_bytes > 16 << 20 else r for r in table.rows)
    )
    assert np.array_equal(score.prediction.times_s, larger_sizes(cut, KNOWN, 16 << 20).prediction.times_s)


def test_a_preset_sees_no_row_at_all():
    table = replace(check_rows(made(THETA, SIZES)), cluster="NVIDIA H100 80GB HBM3")
    twice = replace(table, rows=tuple(replace(row, time_s=2 * row.time_s) for row in table.rows))
    one, other = (preset_only(each, KNOWN) for each in (table, twice))
    assert np.array_equal(one.prediction.times_s, other.prediction.times_s)
    assert one.fitted == 0
    assert "dgx-h100" in one.words


@pytest.mark.parametrize(
    ("score", "why"),
    [
        (lambda t: hold_out(replace(t, rows=t.rows[:1]), KNOWN), "1 usable rows; a hold-out needs 4"),
        (lambda t: hold_out(replace(t, rows=()), KNOWN), "0 usable rows"),
        (lambda t: larger_sizes(t, KNOWN, 1e15), "0 above"),
        (lambda t: preset_only(t, KNOWN), "give --preset NAME"),
        (lambda t: preset_only(replace(t, algorithm="MPI default"), KNOWN), "point-to-point tables"),
        (lambda t: other_scale([replace(t, rows=())], t, KNOWN), "no usable rows"),
    ],
)
def test_what_cannot_be_scored_says_why(score, why):
    found = score(check_rows(made(THETA, SIZES)))
    assert why in found.refused
    assert found.errors is None
    assert summary([found]).mape is None


def test_how_few_rows_are_enough_and_what_was_wrong_with_the_others_is_told():
    table = check_rows(made(THETA, SIZES))
    assert not hold_out(replace(table, rows=table.rows[:4]), KNOWN).refused
    assert not larger_sizes(replace(table, rows=table.rows[:3]), KNOWN, 16.0).refused
    few = replace(table, rows=table.rows[:3], flags=tuple(Flag(line, f"x{line}") for line in (7, 8, 9, 10)))
    assert hold_out(few, KNOWN).refused == ("3 usable rows; a hold-out needs 4 (line 7: x7; line 8: x8; line 9: x9)")
    refused = larger_sizes(replace(few, flags=()), KNOWN, 8.0).refused
    assert refused == "1 usable rows up to 8 bytes and 2 above; 2 and 1 are needed"
    assert larger_sizes(replace(few, flags=()), KNOWN, 32.0).refused.startswith(
        "3 usable rows up to 32 bytes and 0 above"
    )
    assert preset_only(replace(table, rows=()), KNOWN).refused == "no usable row"


def test_a_sweep_is_full_with_eighteen_rows_over_fifteen_doublings():
    for sizes, full_ in ((2.0 ** np.arange(18), True), (2.0 ** np.arange(17), False), (2.0 ** np.arange(10, 28), True)):
        assert hold_out(check_rows(made(THETA, sizes + 8)), KNOWN).table.count == len(sizes)
        rows = tuple(TableRow(line, size, 1e-5) for line, size in enumerate(sizes))
        assert hold_out(Table("t", rows, ranks=8), KNOWN).full_sweep is full_
    dense = tuple(TableRow(line, 8.0 * 2 ** (line / 2), 1e-5) for line in range(31))
    assert hold_out(Table("t", dense, ranks=8), KNOWN).full_sweep
    assert not hold_out(Table("t", dense[:-1], ranks=8), KNOWN).full_sweep


def test_another_scale_of_hardware_that_nobody_knows_is_predicted_from_what_was_measured():
    """Laws that nothing is known of, moved by rows of the same cluster: nearer than the law alone."""
    small, large = (check_rows(made(THETA, SIZES, ranks=ranks)) for ranks in (8, 16))
    found = other_scale([small], large, KNOWN)
    assert found.fitted == len(small.rows)
    assert found.errors.mape < 0.25
    assert "beside it what 1 other scale had" in found.words
    assert found.baselines["nccl_constants"] is None
    assert found.baselines["hockney"] is not None
    assert preset_only(replace(large, cluster="H100"), KNOWN).baselines["hockney"] is None


def test_flags_are_told_once_a_line_and_counts_are_added_only_where_they_are_missing():
    flags = (Flag(4, "first"), Flag(2, "x"), Flag(4, "second"))
    assert line_flags(Table("t", (), flags)) == (Flag(2, "x"), Flag(4, "first"))
    for ranks, hosts, found in ((0, 0, (8, 2)), (4, 0, (4, 2)), (0, 1, (8, 1)), (4, 1, (4, 1))):
        told = with_ranks(Table("t", (), ranks=ranks, hosts=hosts), 8, 2)
        assert (told.ranks, told.hosts) == found


def test_tables_are_of_one_cluster_where_words_tell_several_apart():
    a, b, other = (Table(name, (), cluster=name[0]) for name in ("a1", "b1", "a2"))
    assert same_cluster([a, b, other], a) == [a, other]
    assert same_cluster([a, other], b) == [a, other]  # of another one, but there is only one
    assert same_cluster([a, other], a) == [a, other]
    assert same_cluster([a, b], Table("c1", (), cluster="c")) == [a, b]


def test_a_wrong_preset_is_refused():
    with pytest.raises(UsageError, match="neither a preset nor a topology file"):
        preset_only(check_rows(made(THETA, SIZES)), Knowledge("dgx-z100"))


def test_point_to_point_tables_alone_are_refused():
    with pytest.raises(UsageError, match="no table of a collective"):
        check_tables([Table("p", (TableRow(1, 8, 1e-5),), collective="p2p_latency")])


# ------------------------------------------------------------------------------------------------ baselines


def test_a_hockney_line_finds_a_hockney_line():
    times = 20e-6 + SIZES / 100e9
    assert hockney(SIZES[::2], times[::2], SIZES) == pytest.approx(times, rel=1e-6)
    assert np.all(hockney([8, 16], [1e-5, 0.9e-5], [32]) > 0)


def test_interpolation_is_exact_on_a_power_law_and_goes_on_beyond():
    times = 1e-6 * SIZES**0.7
    assert interpolate(SIZES[4:20:2], times[4:20:2], SIZES) == pytest.approx(times)
    assert interpolate([8, 8], [1e-5, 4e-5], [8, 64]) == pytest.approx([2e-5, 2e-5])
    # 10, 20 and 80 µs at 1, 4 and 16 KiB: halves and doubles as on either side of the nearest two
    between = interpolate([1024, 4096, 16384], [10e-6, 20e-6, 80e-6], [256, 1024, 2048, 16384, 65536])
    assert between == pytest.approx([5e-6, 10e-6, 14.142e-6, 80e-6, 320e-6], rel=1e-3)


def test_nccls_constants_are_a_timer_that_is_right_by_order_of_magnitude():
    times = nccl_constants(preset("dgx-h100", 1), SIZES)
    assert np.all(np.diff(times) > 0)
    assert 1e-6 < times[0] < 40e-6
    assert SIZES[-1] / times[-1] == pytest.approx(280e9, rel=0.2)
    assert np.all(nccl_constants(preset("dgx-h100", 4), SIZES) > 0)


@pytest.mark.parametrize(
    ("name", "hosts", "size", "latency_us", "gigabytes_per_s"),
    [  # by hand, from tuning.cc of NCCL 2.30.7: what its choice takes
        ("dgx-h100", 1, 8, 6.6 + 14 * 0.6, 141 * 8 / 14),  # Ring LL
        ("dgx-h100", 1, 1 << 20, 6.6 + 14 * 0.6, 141 * 8 / 14),
        ("dgx-h100", 1, 1 << 30, 25, 0.85 * 370.8 * 8 / 9),  # NVLS
        ("dgx-h100", 2, 8, 6.8 + 2 * (7 * 0.6 + 5.0), 0.5 * 45),  # Tree LL
        ("dgx-h100", 2, 1 << 20, 14.0 + 2 * (7 * 1.25 + 8.5), 0.5 * 0.92 * 370.8 * 0.6),  # Tree LL128, corrected
        ("dgx-h100", 2, 1 << 25, 14.0 + 26 * 1.9 + 4 * 4.0, 0.92 * 370.8 * 16 / 30),  # Ring LL128
        ("dgx-h100", 4, 64, 6.8 + 2 * (7 * 0.6 + 2 * 5.0), 0.5 * 35),
        ("dgx-h100", 16, 1 << 33, 8.4 + 222 * 3.4 + 32 * 14.0, 370.8 * 128 / 254),  # Ring Simple
        ("dgx-b200", 1, 1 << 21, 6.6 + 14 * 0.6, 282 * 8 / 14),
        ("dgx-b200", 2, 1 << 25, 25 + 2 * 20.9, 0.5 * 0.74 * 721.8),  # NVLS Tree
        ("dgx-b200", 2, 1 << 30, 8.4 + 2 * (7 * 4.0 + 14.0), 0.5 * 0.92 * 721.8 * 0.9),  # Tree Simple, corrected
        ("dgx-b200", 4, 1 << 27, 14.0 + 54 * 1.9 + 8 * 4.0, 0.92 * 384 * 32 / 62),
        ("gb200-nvl72", 4, 8, 25 + 4 * 20.9, 0.5 * 0.74 * 721.8),
        ("dgx-a100", 1, 1 << 23, 14.0 + 14 * 1.9, 0.92 * 240 * 8 / 14),
        ("dgx-a100", 2, 1 << 24, 14.0 + 2 * (7 * 1.25 + 8.5), 0.5 * 0.92 * 240 * 0.9),
        ("pcie-box", 1, 8, 6.6 + 14 * 1.0, 0.5 * 24 * 8 / 14),
        ("pcie-box", 1, 1 << 20, 14.0 + 14 * 2.5, 0.92 * 24 * 8 / 14),
        ("pcie-box", 1, 1 << 30, 8.4 + 14 * 5.7, 24 * 8 / 14),
        ("ethernet-10g", 8, 8, 6.8 + 2 * 3 * 5.0, 0.5 * 1.177 / 3.8),
        ("ethernet-10g", 8, 1 << 30, 8.4 - 2 * 5.7 + 16 * 14.0, 1.177 * 8 / 14),
    ],
)
def test_nccls_constants_are_those_of_its_tuner(name, hosts, size, latency_us, gigabytes_per_s):
    (found,) = nccl_constants(preset(name, hosts), [size])
    assert found == pytest.approx(latency_us * 1e-6 + size / (gigabytes_per_s * 1e9), rel=1e-9)


# ------------------------------------------------------------------------------------------------ the floors


@pytest.fixture(scope="module")
def gpus():
    """The published tables of GPU clusters with ten rows and more."""
    names = [
        p
        for p in sorted(published().glob("*.csv"))
        if not p.name.startswith(("INDEX", "osu", "vidur", "nccl", "simai"))
    ]
    tables, _ = check_tables([table for path in names for table in read_tables(path)])
    return [table for table in tables if len(table.rows) >= 10 and table.collective == "all_reduce"]


@pytest.fixture(scope="module")
def held(gpus):
    return [hold_out(table, KNOWN) for table in gpus]


def full(scores):
    return [score for score in scores if score.full_sweep]


# Slack is a tenth of each floor: other versions of NumPy round otherwise.


def test_hold_out_floors(held):
    assert len(held) >= 19
    assert len(full(held)) >= 13
    for scores in (held, full(held)):
        total = summary(scores)
        assert total.mape <= 0.07
        assert total.mape_large <= 0.055
        assert total.mape < total.baselines["interpolation"] + 0.002
        assert total.mape < total.baselines["hockney"] / 2


def test_the_band_holds_95_percent_of_the_rows(held):
    assert 0.90 <= summary(held).band_coverage <= 0.98


def test_larger_sizes_floor(gpus):
    scores = [larger_sizes(table, KNOWN, 16 << 20) for table in gpus]
    for some in (scores, full(scores)):
        total = summary(some)
        assert total.mape <= 0.132
        assert total.mape < total.baselines["interpolation"] / 2


def test_preset_floor(gpus):
    scores = [preset_only(table, KNOWN) for table in gpus]
    assert sum(not score.refused for score in scores) >= 18
    for some in (scores, full(scores)):
        total = summary(some)
        assert total.mape <= 0.20
        assert total.mape < total.baselines["nccl_constants"]


@pytest.mark.parametrize(
    ("fit", "test"),
    [
        ("issue309_aion_h100_2n16g", "issue309_aion_h100_4n32g"),
        ("coreweave_gb200_1rack72g", "coreweave_gb200_2rack144g"),
    ],
)
def test_another_scale_floor(fit, test):
    (fitted,), (tested,) = (read_tables(published(f"{name}.csv")) for name in (fit, test))
    score = other_scale([check_rows(fitted)], check_rows(tested), KNOWN)
    assert score.errors.mape <= 0.20
    assert score.errors.mape < score.baselines["interpolation"].mape
    assert score.band_coverage >= 0.9


def test_cpu_clusters_of_another_scale_are_inside_their_band():
    paths = [
        published(f"osu_{what}.csv")
        for what in ("cpu_32nodes", "cpu_64nodes", "p2p_latency_32nodes", "p2p_latency_64nodes")
    ]
    tables, pairs = check_tables([table for path in paths for table in read_tables(path)])
    known = Knowledge("auto", pairs)
    small = [table for table in tables if table.hosts == 32]
    for table in (table for table in tables if table.hosts == 64):
        fitted = [one for one in small if one.cluster == table.cluster]
        if fitted:
            score = other_scale(fitted, table, known)
            assert score.band_coverage >= 0.9, table.name
            assert len(measured(score.scored)) == len(table.rows)
