"""The tables of NVIDIA's aiconfigurator: files of the same shape, made here, and the package where it is installed."""

import pytest

from ringside.errors import UsageError
from ringside.predict import fit
from ringside.predict.fit import installed_system
from ringside.predict.tables import aiconfigurator, read_tables
from ringside.predict.tables.aiconfigurator import Package

pytestmark = pytest.mark.core
COLUMNS = "framework,version,device,op_name,kernel_source,nccl_dtype,num_gpus,message_size,latency"


def write(path, version="2.29.2", dtypes=("half",), repeats=1, gpus=(2, 4, 8)):
    """Write a text of its shape: 20 µs and 200 GB/s, repeats 10% apart."""
    lines = [COLUMNS]
    for op in ("all_reduce", "all_gather"):
        for dtype in dtypes:
            for count in gpus:
                for power in range(8, 29):
                    for repeat in range(repeats):
                        size = 2**power * aiconfigurator.DTYPE_BYTES[dtype]
                        milliseconds = (20e-6 + size / 200e9) * (1 + 0.1 * repeat) * 1e3
                        lines.append(
                            f"TRTLLM,{version},NVIDIA H200,{op},NCCL,{dtype},{count},{2**power},{milliseconds:.6g}"
                        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A package with one system in two versions, one of them in another's folder."""
    write(tmp_path / "data" / "h200_sxm" / "nccl" / "2.26.2" / "nccl_perf.txt", "2.26.2")
    write(tmp_path / "data" / "h200_sxm" / "nccl" / "2.29" / "nccl_perf.txt", "2.29.2", repeats=3)
    package = Package("aiconfigurator", "0.0", tmp_path / "data")
    monkeypatch.setattr(aiconfigurator, "installed", lambda: [package])
    return package


def test_sizes_are_elements_times_bytes_and_latencies_ms(tmp_path):
    tables = read_tables(
        write(tmp_path / "data" / "h200_sxm" / "nccl" / "2.29.2" / "nccl_perf.txt", dtypes=("half", "int8"))
    )
    assert len(tables) == 2 * 2 * 3
    half = next(table for table in tables if (table.dtype, table.ranks, table.collective) == ("half", 8, "all_reduce"))
    assert (half.rows[0].size_bytes, half.rows[-1].size_bytes) == (512, 2**29)
    assert half.rows[-1].time_s == pytest.approx(20e-6 + 2**29 / 200e9, rel=1e-4)
    assert (half.hosts, half.library, half.cluster) == (1, "NCCL 2.29.2", "NVIDIA H200")
    assert {table.rows[0].size_bytes for table in tables if table.dtype == "int8"} == {256}


def test_of_more_gpus_than_a_server_has_the_number_of_hosts_is_not_known(tmp_path):
    tables = read_tables(write(tmp_path / "data" / "h200_sxm" / "nccl" / "2.29.2" / "nccl_perf.txt", gpus=(8, 16)))
    assert {(table.ranks, table.hosts) for table in tables} == {(8, 1), (16, 0)}


def test_repeats_of_a_size_are_one_row_between_their_ends(tmp_path):
    tables = read_tables(write(tmp_path / "data" / "h200_sxm" / "nccl" / "2.29.2" / "nccl_perf.txt", repeats=3))
    row = tables[0].rows[0]
    assert len(tables[0].rows) == 21
    assert row.high_s == pytest.approx(1.2 * row.low_s, rel=1e-4)
    assert row.time_s == pytest.approx(1.1 * row.low_s, rel=1e-4)


def test_the_version_of_the_rows_is_believed_before_the_folders(tmp_path):
    tables = read_tables(write(tmp_path / "data" / "h200_sxm" / "nccl" / "2.23" / "nccl_perf.txt", "2.29.2"))
    assert {table.library for table in tables} == {"NCCL 2.29.2"}


@pytest.mark.parametrize(
    "row",
    [
        "TRTLLM,2.29.2,NVIDIA H200,all_reduce,NCCL",
        f"TRTLLM,2.29.2,NVIDIA H200,all_reduce,NCCL,half,{'8' * 5000},256,0.02",
    ],
)
def test_a_row_that_names_no_table_is_a_flag_of_the_one_before_it(tmp_path, row):
    path = write(tmp_path / "nccl_perf.txt", gpus=(8,))
    path.write_text(f"{path.read_text()}{row}\n")
    *_, last = read_tables(path)
    assert (last.collective, len(last.rows), [flag.line for flag in last.flags]) == ("all_gather", 21, [44])
    path.write_text(f"{COLUMNS}\n{row}\n")
    (alone,) = read_tables(path)
    assert (alone.rows, len(alone.flags)) == ((), 1)


def test_a_cell_that_is_too_large_is_no_csv(tmp_path):
    path = tmp_path / "nccl_perf.txt"
    path.write_text(f"{COLUMNS}\nTRTLLM,{'2' * 140_000}\n")
    with pytest.raises(UsageError, match=r"no CSV \(field larger than field limit"):
        read_tables(path)


def test_a_system_is_predicted_from_its_tables(system):
    topology, words = installed_system("h200", 8, "2.29")
    assert topology.ranks == 8
    assert {len(times.sizes_bytes) for times in topology.measured} == {21}
    assert "aiconfigurator 0.0 (Apache-2.0), NVIDIA H200, NCCL 2.29.2, half, 2, 4, 8 GPUs" in words
    assert "NCCL 2.26.2" in installed_system("h200", 8, "2.26")[1]
    assert installed_system("h200", 16)[0].hosts == 2


def test_an_unknown_version_names_those_there_are(system):
    with pytest.raises(UsageError, match=r"h200 was measured with 2\.26\.2, 2\.29\.2"):
        installed_system("h200", 8, "2.19")


def test_each_package_that_is_used_is_named_and_a_year_is_that_of_its_copyright(system, tmp_path, monkeypatch):
    folder = tmp_path / "old" / "h200_sxm" / "nccl" / "2.29"
    write(folder / "nccl_perf.txt", "2.29.2", gpus=(16,))
    (folder / "collection_meta.yaml").write_text("# Copyright (c) 2025 NVIDIA\n")
    old = Package("older", "0.4", tmp_path / "old")
    monkeypatch.setattr(aiconfigurator, "installed", lambda: [system, old])
    words = installed_system("h200", 8, "2.29")[1]
    assert "aiconfigurator 0.0 and older 0.4 (Apache-2.0)" in words
    assert words.endswith("2, 4, 8, 16 GPUs; copyright 2025")
    assert "older" not in installed_system("h200", 8, "2.26")[1]


def test_a_system_without_tables_of_halves_is_said_to_have_none(tmp_path, monkeypatch):
    write(tmp_path / "data" / "h200_sxm" / "nccl" / "2.29" / "nccl_perf.txt", dtypes=("int8",))
    monkeypatch.setattr(aiconfigurator, "installed", lambda: [Package("aiconfigurator", "0.0", tmp_path / "data")])
    with pytest.raises(UsageError, match="h200: its installed tables have no all-reduce of halves"):
        installed_system("h200", 8, "2.29")


def test_without_the_package_a_preset_is_taken_and_the_command_said(monkeypatch):
    monkeypatch.setattr(aiconfigurator, "installed", list)
    topology, words = installed_system("h200", 8)
    assert (topology.name, topology.measured) == ("dgx-h200", ())
    assert fit.INSTALL in words
    with pytest.raises(UsageError, match="not known"):
        installed_system("abacus", 8)


def test_the_package_itself():
    pytest.importorskip("aiconfigurator_core", reason="aiconfigurator-core is not installed")
    pytest.importorskip("pyarrow", reason="its tables are Parquet: pyarrow is not installed")
    _, words = installed_system("h200", 8, "2.29")
    assert "NCCL 2.29.2" in words


def test_rows_with_wrong_sums_are_refused(tmp_path):
    path = tmp_path / "job-n-00016-N-0004.csv"
    path.write_text(
        "size,count,type,redop,root,time,algbw,busbw,#wrong,time,algbw,busbw,#wrong\n"
        "1024,256,float,sum,-1,10.0,0.10,0.19,0,10.0,0.10,0.19,0\n"
        "2048,512,float,sum,-1,11.0,0.19,0.35,3.5e+07,11.0,0.19,0.35,0\n"
        "4096,1024,float,sum,-1,12.0,0.34,0.64,0,12.0,0.34,0.64,7\n"
    )
    (table,) = read_tables(path)
    assert (table.ranks, table.hosts, len(table.rows), table.wrong_sums) == (16, 4, 1, 2)
    assert [flag.reason for flag in table.flags] == ["wrong sums: 3.5e+07 out of place", "wrong sums: 7 in place"]
