"""Tables in all their forms, and what cannot be read in each, line by line."""

import json

import pytest

from ringside.errors import UsageError
from ringside.predict.tables import read_tables
from ringside.predict.tables.checks import check_rows
from ringside.predict.tables.table import bus_factor, figure
from ringside.text import parse_size

from .shared_tables import published
from .written_tables import HEADER, LOG, ROWS, result


def write(tmp_path, text, name="table.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_csv_with_several_clusters_is_several_tables(tmp_path):
    path = write(
        tmp_path, HEADER + "a,1,8,auto,1024,10,0.10,0.18\nb,2,16,auto,1024,20,0.05,0.10\na,1,8,auto,2048,11,0.19,0.33\n"
    )
    first, second = read_tables(path)
    assert (first.cluster, first.hosts, first.ranks, len(first.rows)) == ("a", 1, 8, 2)
    assert (second.cluster, second.hosts, second.ranks, len(second.rows)) == ("b", 2, 16, 1)
    assert first.name == "table: a, 1 hosts, 8 ranks"
    assert first.rows[1].line == 4
    assert first.rows[0].time_s == pytest.approx(10e-6)


def test_columns_are_found_by_name_in_any_order_and_unit(tmp_path):
    # Of two columns of one kind, such as out of place and in place, the first counts.
    path = write(tmp_path, "busbw (Gbps);Time (ms);;Size (B);Time (us);Size (B)\n16.384;0.5;x;1M;7;8\n")
    (table,) = read_tables(path)
    (row,) = table.rows
    assert row.size_bytes == 1 << 20
    assert row.time_s == pytest.approx(0.5e-3)
    assert row.busbw.value == pytest.approx(16.384e9 / 8)


def test_every_unreadable_line_of_a_csv_is_named(tmp_path):
    lines = [
        "c,1,8,auto,1024,10,0.10,0.18",
        "c,1,8,auto,2048",  # cut by a line wrap
        "11,0.19,0.33",  # its end
        "c,1,8,auto,many,12,0.3,0.5",
        "c,1,8,auto,4096,soon,0.3,0.5",
        'c,"1,8,auto,8192,14,0.59,1.02',  # a quote that never closes
        "c,1,8,auto,16384,15,fast,1.91",
        "c,1,8,auto,32768,16,2.05,3.58,extra",
        HEADER.strip(),  # pasted twice
        "c,1,8,auto,65536,17,3.86,6.75",
    ]
    (table,) = read_tables(write(tmp_path, HEADER + "\n".join(lines) + "\n"))
    assert [int(row.size_bytes) for row in table.rows] == [1024, 65536]
    reasons = {flag.line: flag.reason for flag in table.flags}
    assert sorted(reasons) == [3, 4, 5, 6, 7, 8, 9]
    assert "line wrap" in reasons[3]
    assert "line wrap" in reasons[4]
    assert "no size" in reasons[5]
    assert "no time" in reasons[6]
    assert "no number" in reasons[8]
    assert "another table" in reasons[9]
    assert table.count == 9


@pytest.mark.parametrize("prefix", ["", "[1,0]<stdout>:", "0: ", "2026-02-16T10:00:04.000000000Z "])
def test_a_log_of_nccl_tests_whatever_stands_before_its_lines(tmp_path, prefix):
    text = LOG + "".join(prefix + line + "\n" for line in ROWS.splitlines())
    (table,) = read_tables(write(tmp_path, text, "nccl.log"))
    assert (table.ranks, table.hosts, table.cluster) == (4, 2, "NVIDIA H100 80GB HBM3")
    assert [int(row.size_bytes) for row in table.rows] == [1 << 20, 4 << 20, 16 << 20]
    assert table.rows[0].time_s == pytest.approx(50e-6)
    assert table.rows[0].busbw.value == pytest.approx(31.46e9)
    assert not check_rows(table).flags


def test_an_old_log_without_the_column_root_and_an_all_gather(tmp_path):
    text = (
        "# all_gather_perf\n"
        + LOG
        + "  1048576  65536  float  50.00  20.97  15.73  0e+00  49.00  21.40  16.05  0e+00\n"
    )
    (table,) = read_tables(write(tmp_path, text, "nccl.log"))
    assert table.collective == "all_gather"
    assert table.rows[0].algbw.value == pytest.approx(20.97e9)
    assert not check_rows(table).flags


def test_rows_of_a_log_that_a_terminal_wrapped_or_ranks_overwrote_are_named(tmp_path):
    text = LOG + ROWS + (
        "    33554432       8388608     float     sum      -1    600.0\n   55.92   83.89    N/A\n"
        "    67108864      16777216     float     sum      -1   NCCL WARN   1200.0   55.92   83.89\n"
    )  # fmt: skip
    (table,) = read_tables(write(tmp_path, text, "nccl.log"))
    assert len(table.rows) == 3
    assert ["line wrap" in flag.reason for flag in table.flags] == [True, True, False]
    assert [flag.line for flag in table.flags] == [14, 15, 16]


def test_figures_that_a_program_left_out_are_named(tmp_path):
    rows = (
        "  1024  256  float  sum  -1   N/A   20.97   31.46   0   49.00   21.40   32.10   0\n"
        "  2048  512  float  sum  -1   10.0    N/A     N/A   0   49.00   21.40   32.10   0\n"
        "  4096  1024  float  sum  -1  10.0   oops   0.61\n"
    )
    (table,) = read_tables(write(tmp_path, LOG + rows, "nccl.log"))
    assert [(row.size_bytes, row.time_s, row.algbw) for row in table.rows] == [(2048, pytest.approx(1e-5), None)]
    assert [flag.reason for flag in table.flags] == ["'N/A' is no time", "'oops' is among the figures"]


def test_a_cell_that_is_longer_than_any_costs_its_row(tmp_path):
    path = write(tmp_path, HEADER + "a,1,8,auto,2048,11,0.19,0.33\na,1,8,auto,4096,12,0.10," + "9" * 200_000 + "\n")
    (table,) = read_tables(path)
    assert [row.size_bytes for row in table.rows] == [2048]
    assert [flag.line for flag in table.flags] == [3]


def test_a_file_that_is_too_large_for_a_table_is_not_read(tmp_path):
    path = write(tmp_path, "x")
    with path.open("r+b") as file:
        file.truncate((256 << 20) + 1)
    with pytest.raises(UsageError, match="larger than 256 MiB; a table of measurements is smaller"):
        read_tables(path)


def test_a_second_run_in_one_log_is_a_second_table(tmp_path):
    tables = read_tables(write(tmp_path, LOG + ROWS + LOG + ROWS, "two.log"))
    assert [table.name for table in tables] == ["two", "two (2)"]
    assert [len(table.rows) for table in tables] == [3, 3]


def test_the_json_of_nccl_tests(tmp_path):
    device = {"hostname": "a", "device_info": "NVIDIA H100 80GB HBM3"}
    devices = [device, device, {**device, "hostname": "b"}, {**device, "hostname": "b"}]
    bad = [{"size": "x"}, {"size": 8, "out_of_place": None, "in_place": {"time": "soon"}}, {"size": 16}, 7]
    data = {"config": {"devices": devices}, "results": [result(1 << 20, 50.0), *bad, result(4 << 20, 100.0)]}
    (table,) = read_tables(write(tmp_path, json.dumps(data), "run.json"))
    assert (table.ranks, table.hosts) == (4, 2)
    assert [row.time_s for row in table.rows] == pytest.approx([50e-6, 100e-6])
    assert [flag.line for flag in table.flags] == [2, 3, 4, 5]
    assert not check_rows(table).flags[4:]


@pytest.mark.parametrize("text", ['{"results": 3}', "[]", '{"a": [}', '[{"results": []}, 3]'])
def test_json_that_is_no_result_is_refused_in_one_line(tmp_path, text):
    with pytest.raises(UsageError, match="-J FILE") as caught:
        read_tables(write(tmp_path, text, "run.json"))
    assert "\n" not in str(caught.value)


def test_osu_all_reduce_and_point_to_point(tmp_path):
    text = "mpirun -np 144 -N 4 osu_allreduce\n# OSU MPI Allreduce Latency Test v7.0\n# Size       Avg Latency(us)\n"
    text += "4                      11.69\n8                      15.34\n16\nx  3\n3x  4.0\n"
    (table,) = read_tables(write(tmp_path, text, "osu.txt"))
    assert (table.collective, table.ranks, table.hosts) == ("all_reduce", 144, 4)
    assert [row.time_s for row in table.rows] == pytest.approx([11.69e-6, 15.34e-6])
    assert [(flag.line, flag.reason) for flag in table.flags] == [
        (6, "cut by a line wrap: no figure follows the size"), (8, "'3x' is no size in bytes"),
    ]  # fmt: skip
    both = "# OSU MPI Latency Test v7.0\n# Size  Latency (us)\n0 1.2\n1 1.3\n"
    both += "# OSU MPI Bandwidth Test v7.0\n# Size  Bandwidth (MB/s)\n1024 2000.0\n"
    latency, bandwidth = read_tables(write(tmp_path, both, "p2p.txt"))
    assert latency.collective == "p2p_latency"
    assert bandwidth.collective == "p2p_bandwidth"
    assert bandwidth.rows[0].time_s == pytest.approx(1024 / 2e9)


@pytest.mark.parametrize(
    ("content", "what"), [(b"\0\1\2", "not a text file"), (b"", "no columns"), (b"a,b\n1,2\n", "no columns")]
)
def test_what_is_no_table_is_refused(tmp_path, content, what):
    path = tmp_path / "x.csv"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=what):
        read_tables(path)
    with pytest.raises(UsageError, match="No such file"):
        read_tables(tmp_path / "absent.csv")


@pytest.mark.parametrize(
    ("text", "size"),
    [("8", 8), ("16M", 16 << 20), ("2 GiB", 2 << 30), ("1.5K", 1536), ("1e6", 1e6), ("-1", None), ("M", None)],
)
def test_sizes(text, size):
    assert parse_size(text, binary=True) == size


def test_a_figure_knows_its_last_digit():
    assert figure("12.50").half_digit == pytest.approx(0.005)
    assert figure("3e2").half_digit == pytest.approx(50)
    assert figure("n/a") is None


def test_bus_factors():
    assert bus_factor("all_reduce", 8) == pytest.approx(1.75)
    assert bus_factor("all_gather", 16) == pytest.approx(0.9375)
    assert bus_factor("sendrecv", 4) == 1


def test_every_published_table_is_read():
    names = [path for path in published().glob("*.csv") if "tuning" not in path.name and path.name != "INDEX.csv"]
    tables = [table for path in names for table in read_tables(path)]
    assert len(tables) >= 60
    assert sum(len(table.rows) for table in tables) > 12_000
