"""The laws of all-reduce on a fabric, and which fabric a table's words stand for."""

import math
from dataclasses import replace

import numpy as np
import pytest

from ringside.errors import UsageError
from ringside.predict import LinkClass, Topology
from ringside.predict.laws.fabric import (
    BASE,
    CHAIN,
    DEPTH,
    LAUNCH_S,
    NETWORK_RING,
    NETWORK_TREE,
    NVLS,
    PIPELINE,
    RAMP,
    RATE,
    RING,
    candidates,
    fill_growth,
    law,
    nvls_rate,
)
from ringside.predict.laws.knowledge import Knowledge, named_topology
from ringside.predict.tables import read_tables
from ringside.predict.tables.table import Table
from ringside.predict.topology.files import preset, presets

from .shared_tables import published


def rate(topology, name):
    return next(one.bytes_per_s for one in candidates(topology) if one.name == name)


def test_a_ring_moves_2_n_minus_1_over_n_of_the_tensor():
    one = preset("dgx-a100", 1)
    assert rate(one, "ring") == pytest.approx(RING * 240e9 * 8 / 14)
    two = preset("dgx-a100", 2)
    assert rate(two, "ring") == pytest.approx(NETWORK_RING * 8 * 24e9 * 16 / 30)


def test_nvls_is_w_n_over_n_plus_1():
    one = preset("dgx-h100", 1)
    assert rate(one, "nvls") == pytest.approx(NVLS * one.nvls.bytes_per_s * 8 / 9)
    assert nvls_rate(300e9, 2) == pytest.approx(200e9)


def test_a_tree_between_two_hosts_sends_the_tensor_once_and_from_three_on_twice():
    slow = replace(preset("p4de", 2))
    assert rate(slow, "tree") == pytest.approx(min(NETWORK_TREE * 4 * 12e9, CHAIN * 240e9))
    assert rate(preset("p4de", 3), "tree") == pytest.approx(NETWORK_TREE * 4 * 12e9 / 2)


def test_ranks_share_the_interfaces_of_their_host():
    whole = preset("dgx-a100", 4)
    assert rate(replace(whole, nics=4), "ring") == pytest.approx(rate(whole, "ring") / 2)
    assert rate(replace(whole, oversubscription=2.0), "ring") == pytest.approx(rate(whole, "ring") / 2)


def test_latency_grows_with_the_logarithm_of_the_hosts():
    bases = [math.exp(law(preset("dgx-h100", hosts)).mean[BASE]) for hosts in (2, 4, 8, 16)]
    steps = np.diff(bases)
    assert np.all(steps > 0)
    assert steps == pytest.approx(np.full(3, steps[0]))


def test_an_algorithm_that_a_table_names_is_taken_at_its_word():
    two = preset("dgx-h100", 2)
    assert law(two, algorithm="Ring").mean[RATE] == pytest.approx(np.log(rate(two, "ring")))
    assert law(two).mean[RATE] == pytest.approx(np.log(rate(two, "nvls_tree")))


def test_hosts_of_one_rank_have_no_hop_inside():
    bare = Topology("bare", (1,) * 4, between=LinkClass("roce", 5e-6, 1e9), overhead_s=1e-6)
    found = {one.name: one for one in candidates(bare)}
    assert found["ring"].hops_s == pytest.approx(2 * 4 * 5e-6 + 1e-6)  # as NCCL counts: two between hosts for each
    assert {one.bound for one in found.values()} == {"between"}


def test_one_rank_is_refused():
    with pytest.raises(UsageError, match="nobody to reduce with"):
        law(preset("loopback").sized(1, 1))


@pytest.mark.parametrize(
    ("cluster", "hosts", "ranks", "name", "nics", "rate"),
    [
        ("AWS 2x p5.48xlarge (H100, 3.2T EFAv2)", 2, 16, "p5", 32, 12e9),
        ("AWS 2x p4de.24xlarge (A100-80, 4x100G EFA)", 2, 16, "p4de", 4, 12e9),
        ("NVIDIA H100 80GB HBM3", 1, 8, "dgx-h100", 8, 48e9),
        ("gj-aion 4x HGX H100 IB 400G", 4, 32, "dgx-h100", 8, 48e9),
        ("OCI 2x BM.GPU.B4.8 (A100-40, 16x100G RoCE)", 2, 16, "dgx-a100", 16, 12e9),
        ("2 nodes x 2 H100", 2, 4, "dgx-h100", 2, 48e9),
        ("CoreWeave GB200 NVL72 2 racks", 36, 144, "gb200-nvl72", 72, 48e9),
        ("2 nodes x 1 GPU, 25G-class RoCE VF", 2, 2, "dgx-a100", 1, 3e9),
        ("NVIDIA A100-SXM4-80GB", 2, 16, "dgx-a100", 8, 24e9),
        ("NVIDIA H100 80GB HBM3", 4, 32, "dgx-h100", 8, 48e9),
        ("16x A100 40GB, NDR", 2, 16, "dgx-a100", 8, 48e9),
        ("2x8 H200, 8x400GbE", 2, 16, "dgx-h200", 8, 48e9),
        ("Azure ND A100 v4, 8 x 200Gb HDR", 2, 16, "dgx-a100", 8, 24e9),
    ],
)
def test_words_stand_for_hardware(cluster, hosts, ranks, name, nics, rate):
    found = named_topology(Table("t", (), ranks=ranks, hosts=hosts, cluster=cluster))
    assert found is not None
    assert found.name == name
    assert found.ranks == ranks
    if found.hosts > 1:
        assert (found.nics, found.between.bytes_per_s) == (nics, pytest.approx(rate))


@pytest.mark.parametrize(
    ("cluster", "name", "kind", "gigabytes_per_s"),
    [
        ("AWS p4d.24xlarge", "p4de", "nvswitch", 240),
        ("p5en", "p5", "nvswitch", 370.8),
        ("gb300", "gb200-nvl72", "nvswitch", 721.8),
        ("B300", "dgx-b200", "nvswitch", 721.8),
        ("A3-mega", "dgx-h100", "nvswitch", 370.8),
        ("H20", "dgx-h100", "nvswitch", 370.8),
        ("H800", "dgx-h100", "nvswitch", 370.8 * 400 / 900),  # 400 GB/s of NVLink where the H100 has 900
        ("A800 80GB", "dgx-a100", "nvswitch", 240 * 400 / 600),
        ("H100 PCIe", "h100 pcie", "pcie", 50),
        ("H200 NVLS", "dgx-h200", "nvswitch", 370.8),
        ("H200 NVL", "h200 nvl", "pcie", 50),  # a card
        ("a100 pcie", "pcie", "pcie", 25),
        ("MI300X", "mi300x", "nvlink", 336),
        ("MI325X", "mi325x", "nvlink", 336),
        ("MI350X", "mi350x", "nvlink", 360),
        ("V100 32GB PCIe", "v100 32gb pcie", "pcie", 12),
        ("V100", "v100", "nvlink", 120),
        ("T4", "t4", "pcie", 12),
        ("RTX PRO 6000", "rtx pro 6000", "pcie", 50),
        ("RTX 4090", "rtx", "pcie", 25),
        ("A10G", "a10g", "pcie", 25),
    ],
)
def test_words_name_gpus(cluster, name, kind, gigabytes_per_s):
    found = named_topology(Table("t", (), ranks=8, hosts=1, cluster=cluster))
    assert (found.name, found.inside.kind) == (name, kind)
    assert found.inside.bytes_per_s == pytest.approx(gigabytes_per_s * 1e9)
    if name not in presets():
        alpha_s = 3e-6 if kind == "nvlink" else 2e-6
        assert (found.inside.alpha_s, found.nics, found.ranks) == (alpha_s, 8, 8)
        assert (found.between.alpha_s, found.between.bytes_per_s) == (4e-6, 48e9)


@pytest.mark.parametrize(
    ("words", "nics", "gigabits_per_s", "kind", "alpha_s"),
    [
        ("", 8, 200, "infiniband", 4e-6),  # as the preset
        ("8x400G RoCE", 8, 400, "roce", 4e-6),
        ("100GbE", 1, 100, "infiniband", 4e-6),  # one of a speed that hosts have one of
        ("200GbE, TCP", 8, 200, "ethernet", 20.6e-6),  # and as many as ranks of one that hosts have many of
        ("4x50g", 4, 50, "infiniband", 4e-6),
        ("1024GB of memory, 40GB, 80 GB", 8, 200, "infiniband", 4e-6),
        ("100Gb", 1, 100, "infiniband", 4e-6),
        ("1.6 Tbps", 8, 200, "infiniband", 4e-6),
        ("3.2T", 8, 400, "infiniband", 4e-6),
        ("XDR", 8, 800, "infiniband", 4e-6),
        ("EDR", 8, 100, "infiniband", 4e-6),
        ("FDR", 8, 56, "infiniband", 4e-6),
        ("cx8", 8, 400, "infiniband", 4e-6),
        ("EFA", 8, 200, "roce", 27.7e-6),
        ("Slingshot", 8, 200, "roce", 4e-6),
        ("tcpx", 8, 200, "ethernet", 400e-6),
        ("tcp-xo", 8, 200, "ethernet", 15e-6),
    ],
)
def test_words_name_networks(words, nics, gigabits_per_s, kind, alpha_s):
    found = named_topology(Table("t", (), ranks=16, hosts=2, cluster=f"A100, {words}"))
    assert (found.nics, found.between.kind, found.between.alpha_s) == (nics, kind, alpha_s)
    assert found.between.bytes_per_s == pytest.approx(gigabits_per_s * 0.12e9)


@pytest.mark.parametrize(
    ("cluster", "ranks", "hosts", "sizes"),
    [
        ("H20", 17, 0, (6, 6, 5)),
        ("h100", 17, 2, (9, 8)),
        ("h100", 2, 1, (2,)),
        ("GB200 NVL72 two racks", 144, 36, (72, 72)),
        ("gb300 3 racks", 200, 50, (67, 67, 66)),
        ("GB200 9 racks", 4, 1, (1, 1, 1, 1)),
        ("GB200", 72, 18, (72,)),
        ("GB200", 73, 19, (37, 36)),
    ],
)
def test_counts_are_spread_over_hosts_or_racks(cluster, ranks, hosts, sizes):
    assert named_topology(Table("t", (), ranks=ranks, hosts=hosts, cluster=cluster)).ranks_per_host == sizes


@pytest.mark.parametrize("cluster", ["", "a machine", "AMD EPYC with 512 GB of memory"])
def test_words_that_name_nothing_stand_for_nothing(cluster):
    assert named_topology(Table("t", (), ranks=8, hosts=1, cluster=cluster)) is None


def test_racks_are_hosts_where_nvlink_spans_them():
    found = Knowledge("gb200-nvl72").topology(Table("t", (), ranks=144, hosts=36))
    assert (found.hosts, found.ranks) == (2, 144)
    assert Knowledge("gb200-nvl72").topology(Table("t", (), ranks=100, hosts=1)).ranks_per_host == (100,)
    for ranks, hosts, sizes in ((0, 0, (8, 8)), (20, 5, (4,) * 5), (3, 5, (1, 1, 1)), (16, 0, (8, 8))):
        assert Knowledge("dgx-h100").topology(Table("t", (), ranks=ranks, hosts=hosts)).ranks_per_host == sizes
    assert named_topology(Table("t", (), ranks=1, hosts=1, cluster="h100")) is None
    assert Knowledge("dgx-h100").topology(Table("t", (), ranks=20, hosts=3)).ranks_per_host == (7, 7, 6)


def test_the_nvls_law_holds_on_the_published_sweep_over_gpu_counts():
    sweep = [t for t in read_tables(published("mleng_nvls_gpucount_h200.csv")) if t.algorithm == "NVLS"]
    assert [table.ranks for table in sweep] == [5, 6, 7, 8]
    measured = np.array([table.rows[0].size_bytes / table.rows[0].time_s for table in sweep])
    shape = np.array([nvls_rate(1.0, table.ranks) for table in sweep])
    width = np.exp(np.log(measured / shape).mean())
    assert np.abs(width * shape / measured - 1).max() < 0.015
    ring = [t for t in read_tables(published("mleng_nvls_gpucount_h200.csv")) if "off" in t.algorithm]
    bus = np.array([2 * (t.ranks - 1) / t.ranks * t.rows[0].size_bytes / t.rows[0].time_s for t in ring])
    assert bus.max() / bus.min() < 1.015


def test_the_curve_of_a_preset_is_near_what_its_clusters_measure():
    for name, bound in (("dgxc_h100_1n8g", 0.25), ("aws_p4de_a100_2n16g", 0.2), ("issue309_aion_h100_2n16g", 0.15)):
        (table,) = read_tables(published(f"{name}.csv"))
        topology = named_topology(table)
        sizes = np.array([row.size_bytes for row in table.rows])
        times = np.array([row.time_s for row in table.rows])
        error = np.abs(np.exp(PIPELINE.log_slopes(law(topology).mean, sizes)[0]) / times - 1)
        assert np.median(error) < bound, name


def test_the_fill_grows_as_the_hops_do():
    """32 hosts have 5 times the network's hops of 2, and by as much longer is the fill in seconds."""
    two, many = (law(preset("dgx-a100", hosts)) for hosts in (2, 32))
    growth = fill_growth(many, two)
    hops = many.hops_s / two.hops_s
    t0 = (LAUNCH_S + many.hops_s) / (LAUNCH_S + two.hops_s)
    assert growth[DEPTH] == pytest.approx(math.log(hops / t0))  # depth is in units of t0
    assert growth[RAMP] == pytest.approx(math.log(hops / math.sqrt(t0)))
    assert growth[BASE] == growth[RATE] == 0.0
    assert not fill_growth(many, many).any()
    assert not fill_growth(many, law(preset("dgx-a100", 1))).any()
