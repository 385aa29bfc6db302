"""Rows that contradict themselves, or the rows around them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringside.predict.tables import read_tables
from ringside.predict.tables.checks import check_rows, infer_ranks, largest_rising
from ringside.predict.tables.table import Figure, Table, TableRow, bus_factor

from .shared_tables import made, published

SIZES = 2.0 ** np.arange(10, 34)
THETA = np.log([20e-6, 2.0, 6.0, 200e9])


def changed(table, index, **changes):
    rows = list(table.rows)
    old = rows[index]
    fields = {
        "line": old.line,
        "size_bytes": old.size_bytes,
        "time_s": old.time_s,
        "algbw": old.algbw,
        "busbw": old.busbw,
    }
    rows[index] = TableRow(**{**fields, **changes})
    return Table(table.name, tuple(rows), ranks=table.ranks, hosts=table.hosts)


def only_flag(table):
    flags = check_rows(table).flags
    assert len(flags) == 1, flags
    return flags[0]


@pytest.mark.parametrize("ranks", [2, 8, 72, 128])
def test_honest_tables_have_no_flags(ranks):
    for seed in range(5):
        table = check_rows(made(THETA, SIZES, noise=0.05, seed=seed, ranks=ranks))
        assert not table.flags
        assert len(table.rows) == len(SIZES)


@pytest.mark.parametrize(
    ("forge", "what"),
    [
        (lambda row: {"algbw": Figure(row.algbw.value * 1.073741824, 5e6)}, "sizes that are GiB"),
        (lambda row: {"algbw": Figure(row.algbw.value / 1.073741824, 5e6)}, "GiB/s"),
        (lambda row: {"algbw": Figure(row.algbw.value * 8, 5e6)}, "in Gbit/s"),
        (lambda row: {"algbw": Figure(row.algbw.value / 8, 5e6)}, "an eighth: is the size in bits"),
        (lambda row: {"algbw": Figure(row.algbw.value * 1.048576, 5e6)}, "1.0486 times: MiB for MB"),
        (lambda row: {"algbw": Figure(row.algbw.value / 1.048576, 5e6)}, "1/1.0486: MiB for MB"),
        (lambda row: {"algbw": Figure(row.algbw.value * 1e3, 5e6)}, "in ms, not µs"),
        (lambda row: {"algbw": Figure(row.algbw.value / 1e3, 5e3)}, "in ns, not µs"),
        (lambda row: {"algbw": row.busbw}, "it is the bus bandwidth"),
        (lambda row: {"algbw": Figure(row.algbw.value * 1.25, 5e6)}, "is not size/time"),
        (lambda row: {"busbw": Figure(row.busbw.value * 1.1, 5e6)}, "where 8 ranks give 1.75"),
        (lambda row: {"busbw": Figure(row.algbw.value * 1.875, 5e6)}, "it is that of 16 ranks"),
        (lambda row: {"algbw": None, "busbw": Figure(row.busbw.value * 8, 5e6)}, "in Gbit/s (bits, not bytes)"),
        (lambda row: {"algbw": None, "busbw": Figure(row.busbw.value * 1.1, 5e6)}, "is not 1.750 size/time"),
        (lambda row: {"time_s": row.time_s * 1e3, "algbw": row.algbw}, "is not size/time"),
        (lambda row: {"time_s": 0.0}, "longer than nothing"),
        (lambda row: {"time_s": -1e-6}, "longer than nothing"),
        (lambda row: {"size_bytes": 0.0}, "size 0"),
        (lambda row: {"size_bytes": row.time_s * 1e6 + 0.5}, "whole number"),
        (lambda row: {"time_s": 1e6}, "longer than a day"),
        (lambda row: {"time_s": row.time_s / 1e6, "algbw": None, "busbw": None}, "faster than any link"),
        (lambda row: {"time_s": row.time_s * 3, "algbw": None, "busbw": None}, "a spike"),
        (lambda row: {"time_s": row.time_s / 6, "algbw": None, "busbw": None}, "or those are impossibly fast"),
    ],
)
def test_a_forged_row_is_named_and_no_other(forge, what):
    table = made(THETA, SIZES)
    index = 17  # large enough for two digits of bandwidth to tell
    flag = only_flag(changed(table, index, **forge(table.rows[index])))
    assert flag.line == table.rows[index].line
    assert what in flag.reason


def test_a_whole_table_in_other_units_is_refused_row_by_row():
    table = made(THETA, SIZES[12:])
    rows = tuple(
        TableRow(row.line, row.size_bytes, row.time_s, Figure(row.algbw.value / 1.073741824, 5e6), row.busbw)
        for row in table.rows
    )
    found = check_rows(Table("gib", rows, ranks=8))
    assert not found.rows
    assert all("GiB/s" in flag.reason for flag in found.flags)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (TableRow(1, 8.0, 1e5), ""),
        (TableRow(1, 8.0, 1.001e5), "longer than a day"),
        (TableRow(1, 2e10, 1e-3), ""),
        (TableRow(1, 2.001e10, 1e-3), "faster than any link"),
        (TableRow(1, 1.0, 1e-6), ""),
        (TableRow(1, 0.0, 1e-6), "size 0: nothing was moved"),
        (TableRow(1, -1.0, 1e-6), "a negative size"),
        (TableRow(1, float("inf"), 1.0), "is no whole number of bytes"),
        (TableRow(1, 8.0, float("nan")), "a call takes longer than nothing"),
        (TableRow(1, 1e6, 1e-3, None, Figure(1e9, 5e6)), "busbw 1 GB/s is not 0.000 size/time"),  # of one rank
    ],
)
def test_what_a_row_by_itself_cannot_be(row, why):
    found = check_rows(Table("one", (row,), ranks=1))
    assert (len(found.rows), len(found.flags)) == ((0, 1) if why else (1, 0))
    assert all(why in flag.reason for flag in found.flags)


@pytest.mark.parametrize(
    ("place", "factor", "flagged"),
    [(0, 1.39, False), (0, 1.41, True), (5, 1.39, False), (5, 1.41, True), (11, 1.41, False)],
)
def test_a_spike_stands_out_from_both_neighbours_or_from_the_first_two(place, factor, flagged):
    times = np.full(12, 20e-6)
    times[place] *= factor
    rows = tuple(TableRow(line, 2.0 ** (3 + line), time) for line, time in enumerate(times))
    flags = check_rows(Table("flat", rows, ranks=8)).flags
    assert [flag.line for flag in flags] == [place] * flagged
    assert all(flag.reason.endswith("beside 20.0 µs for a larger message: a spike") for flag in flags)


def test_repeated_rows_are_named_and_repeats_of_a_measurement_are_kept():
    table = made(THETA, SIZES)
    sixth = table.rows[5]
    again = Table("twice", (*table.rows, TableRow(40, sixth.size_bytes, sixth.time_s, sixth.algbw)), ranks=8)
    assert "the same size and time as line 7" in only_flag(again).reason
    other = TableRow(99, table.rows[5].size_bytes, table.rows[5].time_s * 1.02)
    assert not check_rows(Table("more", (*table.rows, other), ranks=8)).flags


def test_rows_are_sorted_by_size():
    table = made(THETA, SIZES)
    found = check_rows(Table("mixed", table.rows[::-1], ranks=8))
    assert [row.size_bytes for row in found.rows] == sorted(SIZES)


def test_a_dip_in_bandwidth_is_found_but_a_lasting_drop_is_a_regime():
    table = made(THETA, SIZES)
    dip = changed(table, 18, time_s=table.rows[18].time_s * 1.9, algbw=None, busbw=None)
    assert only_flag(dip).line == table.rows[18].line
    drop = tuple(
        TableRow(row.line, row.size_bytes, row.time_s * (1.8 if index >= 14 else 1.0))
        for index, row in enumerate(table.rows)
    )
    assert not check_rows(Table("slower from 16 MB on", drop, ranks=8)).flags


@pytest.mark.parametrize(("rows", "factor", "flagged"), [(3, 2.4, 3), (4, 2.4, 0), (4, 2.6, 4), (4, 1.9, 0)])
def test_small_messages_that_are_slow_for_a_stretch_are_a_regime_unless_it_is_short_or_far_off(rows, factor, flagged):
    """Messages that take 20 µs each, whatever their size, until bandwidth counts; some of them `factor` times that."""
    sizes = 2.0 ** np.arange(6, 30)
    times = [20e-6 + size / 1e11 * (size > 1 << 20) for size in sizes]
    table = Table(
        "slow at first",
        tuple(
            TableRow(line, size, time * (factor if 4 <= line < 4 + rows else 1.0))
            for line, (size, time) in enumerate(zip(sizes, times, strict=True))
        ),
        ranks=8,
    )
    assert [flag.line for flag in check_rows(table).flags] == list(range(4, 4 + flagged))


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 16, 32, 64, 72, 96, 128, 144])
def test_ranks_are_inferred_from_the_ratio_of_bandwidths(ranks):
    table = made(THETA, SIZES, ranks=ranks)
    assert check_rows(Table("unsaid", table.rows)).ranks == ranks


def test_the_ratio_of_an_all_gather_is_known_too():
    rows = [
        TableRow(i, size, 1e-4 * size / 1e6, Figure(10e9, 5e6), Figure(10e9 * bus_factor("all_gather", 16), 5e6))
        for i, size in enumerate(SIZES[14:])
    ]
    found = check_rows(Table("gathered", tuple(rows), ranks=16))
    assert found.collective == "all_gather"
    assert not found.flags


def test_of_counts_that_fit_the_one_is_taken_that_machines_have():
    for ratio, ranks in ((1.94, 64), (1.93, 32)):  # within 1.5% are 23 to 65, and 21 to 48 ranks
        rows = [TableRow(i, 1e6, 1e-3, Figure(1e9, 7.5e6), Figure(ratio * 1e9, ratio * 7.5e6)) for i in range(3)]
        assert infer_ranks(rows) == ranks


def test_rows_too_coarse_to_tell_say_nothing():
    assert infer_ranks([TableRow(1, 8, 1e-5, Figure(0.0, 5e6), Figure(0.0, 5e6))]) == 0


@given(st.lists(st.floats(0.1, 100), max_size=12), st.floats(1, 3))
def test_the_largest_rising_subset_is_rising_and_largest(values, tolerance):
    values = np.array(values)
    keep = largest_rising(values, tolerance, np.ones(len(values)))
    chosen = values[keep]
    assert all(later * tolerance >= max(chosen[:i]) for i, later in enumerate(chosen) if i)
    assert keep.sum() == most(tuple(values), tolerance)


def most(values, tolerance):
    """Try every subset."""
    best = 0
    for mask in range(1 << len(values)):
        chosen = [value for i, value in enumerate(values) if mask >> i & 1]
        if len(chosen) > best and all(v * tolerance >= max(chosen[:i]) for i, v in enumerate(chosen) if i):
            best = len(chosen)
    return best


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("dgxh100_2n16g_pathology", {8, 8192, 16384, 32768, 65536, 131072}),
        ("oci_gb200_2rack_32n128g", {1 << 30}),
        ("h100_2n4g", {32, 512 << 10, 256 << 20}),
        ("mi350x_1n8g_mpi", {64 << 20, 512 << 20, 1 << 30, 2 << 30}),
    ],
)
def test_the_pathologies_that_the_published_tables_are_known_for_are_flagged(name, sizes):
    (table,) = read_tables(published(f"{name}.csv"))
    assert sizes <= {flag.size_bytes for flag in check_rows(table).flags}


def test_ranks_of_published_tables_agree_with_what_they_say():
    for path in sorted(published().glob("[a-n]*g.csv")):
        (table,) = read_tables(path)
        said, found = table.ranks, infer_ranks(table.rows, table.collective)
        # One says 144 GPUs in two racks, and its own bandwidths are those of 128.
        assert found in (0, {144: 128}.get(said, said)), path.name
