"""The field's laws hold in what is priced, and its popular mistakes do not."""

import math

import numpy as np
import pytest

from ringside.errors import UsageError
from ringside.predict import LinkClass, Topology, closed_form, preset, price, simulate
from ringside.predict.plan.options import GPU_LINKS, names, option, options, simulated_band
from ringside.predict.plan.plan import PlanQuestion, plan
from ringside.schedule import by_name

LINK = LinkClass("ethernet", 10e-6, 1e9)


def flat(ranks):
    """Return so many hosts of one rank, without anything but latency and rate."""
    return Topology("flat", (1,) * ranks, between=LINK)


def seconds(topology, name, size):
    return float(option(topology, name).predict([size]).times_s[0])


# ------------------------------------------------------------------------------------------------ laws


@pytest.mark.parametrize("n", [2, 3, 8, 17])
def test_a_ring_takes_2n_minus_2_rounds_and_sends_2n_minus_2_by_n_of_the_tensor(n):
    size = 1e9
    found = plan(PlanQuestion(flat(n), size, algorithm="ring"))
    assert found.rounds == 2 * (n - 1)
    assert found.wires.per_rank_bytes == pytest.approx(2 * (n - 1) / n * size)
    assert found.priced.seconds.value == pytest.approx(2 * (n - 1) * (10e-6 + size / n / 1e9))


def test_a_parameter_server_is_linear_in_the_ranks():
    times = [seconds(flat(n), "parameter_server", 1e9) for n in (3, 5, 9, 17)]
    assert times[1] / times[0] == pytest.approx(2, rel=1e-3)
    assert times[2] / times[1] == pytest.approx(2, rel=1e-3)
    assert times[3] / times[2] == pytest.approx(2, rel=1e-3)


def test_a_trees_latency_grows_with_the_logarithm_a_rings_with_the_number():
    tree = [seconds(flat(n), "tree", 1.0) for n in (8, 64)]
    ring = [seconds(flat(n), "ring", 1.0) for n in (8, 64)]
    assert tree[1] / tree[0] == pytest.approx(math.log2(64) / math.log2(8), rel=0.01)
    assert ring[1] / ring[0] == pytest.approx(63 / 7, rel=0.01)


@pytest.mark.parametrize("n", [8, 16])
def test_two_trees_use_the_full_bandwidth_where_one_tree_uses_half(n):
    size = 10e9
    two, one = (seconds(flat(n), name, size) for name in ("two_tree", "tree"))
    assert two == pytest.approx(2 * size / 1e9, rel=0.05)  # a rank sends and takes 2·S at most: nothing is idle
    assert one > 1.45 * two


def test_the_three_curves_of_the_literature_at_24576_ranks():
    cluster = preset("dgx-h100", 3072)
    assert cluster.ranks == 24_576
    ring, hierarchical, tree = (seconds(cluster, name, 8.0) for name in ("ring", "hierarchical", "tree"))
    assert ring > 3 * hierarchical > 100 * tree
    two_tree = price(by_name("two_tree", cluster.ranks), cluster, 8.0)  # what the library's tree is
    assert ring > 100 * two_tree
    large = [price(by_name(name, cluster.ranks), cluster, 100e9, segments=1) for name in ("ring", "two_tree")]
    assert large[0] < large[1]  # where bytes count, an uncut tree is no match for a ring
    # Constants alone, all hops alike and nothing else spent: 2(n-1) against 2·log2(n) hops. They overstate the gain.
    alone = 2 * 24_575 / (2 * math.ceil(math.log2(24_576)))
    assert 100 < ring / tree < 0.6 * alone


def test_a_library_choice_among_two_hosts_and_nvls_law_on_one():
    one = preset("dgx-h100", 1)
    rates = [n / (n + 1) for n in (4, 8)]
    times = [seconds(one.sized(1, n), "nvls", 8e9) for n in (4, 8)]
    assert times[0] / times[1] == pytest.approx(rates[1] / rates[0], rel=0.01)


# ------------------------------------------------------------------------------------------------ mistakes


def test_mistake_a_tree_is_priced_uncut():
    """Textbooks give a tree 2·log2(n)·S/B; cut into segments its levels work at the same time."""
    n, size = 16, 10e9
    textbook = price(by_name("tree", n), flat(n), size)
    assert textbook > 2 * (math.log2(n) - 1) * 2 * size / 1e9 * 0.9
    assert seconds(flat(n), "tree", size) < 0.45 * textbook


def test_mistake_network_latency_on_every_hop_of_a_node_major_ring():
    cluster = preset("dgx-h100", 16)
    every_hop = 2 * (cluster.ranks - 1) * cluster.between.alpha_s
    hops = 2 * (cluster.ranks - 1) - 2 * cluster.hosts
    crossing = 2 * cluster.hosts * cluster.between.alpha_s + hops * cluster.inside.alpha_s
    law = math.exp(option(cluster, "ring").law.mean[0])
    assert law < 0.6 * every_hop
    assert crossing < law < crossing + 20e-6  # and what a library spends beside hops
    exact = price(by_name("ring", cluster.ranks), cluster, 0)
    assert exact < 0.6 * every_hop


def test_mistake_busbw_is_the_wires_speed_with_nvls():
    cluster = preset("dgx-h100", 1)
    found = plan(PlanQuestion(cluster, 8e9))
    assert found.priced.algorithm == "nvls"
    wire = found.wires.per_rank_bytes / found.priced.seconds.value
    assert wire <= cluster.nvls.bytes_per_s
    assert found.busbw.value > 1.1 * cluster.inside.bytes_per_s  # more than any link carries


def test_mistake_busbw_is_the_wires_speed_with_a_tree_of_two_hosts():
    cluster = preset("p4de", 2)
    found = plan(PlanQuestion(cluster, 8e9))
    assert found.priced.algorithm == "tree"
    assert found.wires.interface_bytes_per_s.value < cluster.between.bytes_per_s
    assert found.busbw.value > 1.4 * cluster.nics * cluster.between.bytes_per_s


def test_mistake_halving_doubling_off_powers_of_two_is_as_good_as_on_them():
    times = [seconds(flat(n), "halving_doubling", 1e9) for n in (8, 9, 16)]
    assert times[1] > 1.9 * times[0]
    assert times[1] > 1.8 * times[2]  # the ninth rank makes it slower than sixteen
    assert seconds(flat(9), "ring", 1e9) < 0.6 * times[1]


def test_mistake_a_ring_of_1024_takes_1024_steps():
    assert option(flat(1024), "ring").rounds == 2046


def test_mistake_8_gpus_with_50_gb_put_400_gb_on_the_wires():
    cluster = preset("dgx-h100", 1)
    ring = plan(PlanQuestion(cluster, 50e9, algorithm="ring")).wires
    assert ring.total_bytes == pytest.approx(700e9)
    assert ring.per_rank_bytes == pytest.approx(87.5e9)
    nvls = plan(PlanQuestion(cluster, 50e9, algorithm="nvls")).wires
    assert nvls.total_bytes == pytest.approx(450e9)


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize("n", [2, 3, 5, 8, 12])
def test_what_ranks_send_is_what_their_schedules_list(n):
    for one in options(flat(n)):
        schedule = by_name(one.name, n)
        chunks = sum(len(schedule.round(k)) for k in range(schedule.rounds))
        assert one.sent == pytest.approx(chunks / schedule.chunks), one.name


@pytest.mark.parametrize("name", ["dgx-a100", "dgx-h100", "gb200-nvl72", "pcie-box", "ethernet-10g", "loopback"])
def test_every_option_has_a_band_around_it_and_says_what_supports_it(name):
    cluster = preset(name)
    for one in options(cluster):
        told = one.predict([1e3, 1e6, 1e9])
        assert np.all(told.low_s < told.times_s)
        assert np.all(told.times_s < told.high_s)
        assert np.all(np.diff(told.times_s) > 0)
        assert bool(one.why_extrapolated(1e6)) == bool(told.extrapolated[1])
        assert one.basis == "schedule" or cluster.inside.kind in GPU_LINKS


def test_beyond_published_tables_bands_widen_and_it_is_called_extrapolated():
    widths = []
    for hosts in (4, 8, 64):
        one = option(preset("dgx-h100", hosts))
        told = one.predict([1e8])
        widths.append(float(told.high_s[0] / told.low_s[0]))
        assert bool(told.extrapolated[0]) == (hosts > 4)
    assert widths[0] < widths[1] < widths[2]
    assert option(preset("dgx-h100", 2)).predict([1e9, 1e12]).extrapolated.tolist() == [False, True]


def test_one_rank_and_unknown_algorithms_are_refused_with_what_exists():
    with pytest.raises(UsageError, match="nobody to reduce with"):
        option(flat(1))
    with pytest.raises(UsageError, match="ring, direct") as caught:
        plan(PlanQuestion(flat(4), 1e6, algorithm="nvls"))
    assert "halving_doubling" in str(caught.value)


def test_a_switch_that_reduces_is_an_option_only_where_there_is_one():
    assert "nvls" in names(preset("dgx-h100", 1))
    assert "nvls" not in names(preset("dgx-a100", 1))
    assert "in_network" not in names(preset("ethernet-10g"))


def test_a_simulation_has_the_band_of_clusters_like_its_topology():
    for size in (0.5, 1.0, 1e9):
        timeline = simulate(by_name("ring", 16), preset("dgx-h100"), size)
        band = simulated_band(timeline)
        assert band.value == timeline.seconds
        assert 0 < band.low < band.value < band.high
        assert band.high - band.value > band.value - band.low  # even in logarithms
    late = simulate(by_name("ring", 16), preset("dgx-h100"), 1e6, late={3: 1.0})
    usual = simulated_band(simulate(by_name("ring", 16), preset("dgx-h100"), 1e6))
    found = simulated_band(late)
    assert found.high - found.value == pytest.approx(usual.high - usual.value)  # lateness is as given


def test_there_is_no_formula_where_no_switch_adds_up():
    assert closed_form(by_name("in_network", 4), preset("ethernet-10g", 4), [8.0]) is None
    assert closed_form(by_name("in_network", 16), preset("dgx-h100", 2), [8.0]) is not None
    assert closed_form(by_name("ring", 4), preset("ethernet-10g", 5), [8.0]) is None
