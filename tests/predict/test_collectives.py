"""Collectives other than all-reduce: their laws beside the simulation of a schedule, and beside published tables."""

import pytest
from tests.predict.shared_tables import published

from ringside.predict import LinkClass, Topology, preset, price
from ringside.predict.laws import fabric
from ringside.predict.laws.knowledge import Knowledge
from ringside.predict.plan.options import collective
from ringside.predict.score import moved_law, preset_only
from ringside.predict.tables import read_tables
from ringside.predict.tables.checks import check_rows
from ringside.schedule import by_name

ETHERNET = Topology("four", (1,) * 4, between=LinkClass("ethernet", 20e-6, 1e9))


@pytest.mark.parametrize(
    ("name", "schedule", "tensors"),
    [
        ("all_gather", "ring_all_gather", 1), ("reduce_scatter", "ring_reduce_scatter", 1),
        ("alltoall", "direct_all_to_all", 4),
    ],
)  # fmt: skip
def test_without_a_library_a_collective_takes_what_its_schedule_does(name, schedule, tensors):
    for size in (8.0, 1e6, 1e9):
        simulated = price(by_name(schedule, 4), ETHERNET, tensors * size)
        found = collective(ETHERNET, name).predict([size]).times_s[0]
        assert found == pytest.approx(simulated, rel=1e-6)


def test_an_all_to_all_of_four_moves_three_quarters_of_what_every_rank_has():
    assert collective(ETHERNET, "alltoall").predict([1e9]).times_s[0] == pytest.approx(0.75, rel=0.01)


def test_a_message_takes_its_bytes_over_one_link():
    assert collective(ETHERNET, "sendrecv").predict([1e9]).times_s[0] == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("hosts", [2, 4, 16])
def test_a_librarys_all_to_all_among_hosts_is_near_the_simulation_of_its_messages(hosts):
    cluster = preset("dgx-h100", hosts=hosts)
    simulated = price(by_name("direct_all_to_all", cluster.ranks), cluster, cluster.ranks * 1e9)
    found = float(collective(cluster, "alltoall").predict([1e9]).times_s[0])
    assert found == pytest.approx(simulated, rel=0.1)
    assert collective(cluster, "alltoall").why_extrapolated(1e9)


def test_an_all_to_all_crosses_the_network_as_often_as_a_host_has_ranks():
    cluster = preset("dgx-h100", hosts=16)
    gather, exchange = (
        float(collective(cluster, name).predict([8e9]).times_s[0]) for name in ("all_gather", "alltoall")
    )
    assert exchange / gather == pytest.approx(8 * (1 - 8 / 128) / (1 - 1 / 128), rel=0.1)


@pytest.mark.parametrize(
    ("file", "most"),
    [
        ("vultr_b200_1n8g_allgather", 0.12), ("vultr_b200_2n16g_reducescatter", 0.30),
        ("gcp_a3mega_h100_2n16g_allgather", 0.32), ("vultr_b200_1n8g_sendrecv", 0.40),
    ],
)  # fmt: skip
def test_a_published_table_is_near_the_law_of_its_hardware_with_nothing_fitted(file, most):
    (table,) = read_tables(published(f"{file}.csv"))
    found = preset_only(check_rows(table), Knowledge())
    assert found.errors is not None
    assert found.errors.mape < most
    assert found.band_coverage > 0.8


def test_bumps_of_an_all_reduce_are_not_those_of_an_all_to_all():
    reduce, exchange = _table("all_reduce", 1.0), _table("alltoall", 0.5)
    assert moved_law([reduce], exchange, Knowledge()).beside is None
    assert moved_law([reduce], _table("all_gather", 0.5), Knowledge()).beside is not None


def _table(name, times):
    """Return a table of a plain line, so many times as long."""
    from ringside.predict.tables.table import Table, TableRow

    rows = [TableRow(i, 2.0**i, times * (2e-5 + 2.0**i / 1e11)) for i in range(10, 30, 2)]
    return Table(name, tuple(rows), ranks=8, hosts=1, cluster="DGX H100", collective=name, algorithm="auto")


def test_a_collective_of_one_host_has_its_hops():
    one = preset("dgx-h100", hosts=1)
    law = fabric.law(one, "sendrecv")
    assert law.mean[0] < fabric.law(one, "all_gather").mean[0]
