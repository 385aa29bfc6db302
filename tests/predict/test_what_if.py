"""What a change does to a step: exact where it is arithmetic, priced alike on both sides where it is not."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringside.engine.net.exchange.block_scaling import BlockScaling
from ringside.errors import UsageError
from ringside.predict import LinkClass, LinkOverride, Topology, preset, price
from ringside.predict.plan.plan import PlanQuestion, plan
from ringside.predict.what_if import (
    WIRE_BYTES,
    PredictedStep,
    StepChange,
    as_measured,
    bucket_seconds,
    played,
    what_if,
)
from ringside.schedule import ring

FLAT = Topology("flat", (1,) * 6, between=LinkClass("ethernet", 10e-6, 1e9))
H100 = preset("dgx-h100", 4)


def step(topology=FLAT, size=1e8, compute=0.25, **others):
    return PredictedStep(topology, size, np.full((1, topology.ranks), compute), **others)


def test_a_slow_rank_costs_its_own_excess_and_is_named():
    found = what_if(step(H100, buckets=20), StepChange(slower={3: 0.12}))
    assert found.delta.value == pytest.approx(0.03)
    assert found.extrapolated == ()
    day = found.rank_hours_per_day
    assert day.value == pytest.approx(32 * 24 * 0.03 / found.step_s[1])
    timeline = played(found.after)
    assert (timeline.guilty.kind, timeline.guilty.ranks) == ("late rank", (3,))
    assert timeline.guilty.seconds == pytest.approx(0.03)


@pytest.mark.parametrize("share", [-0.5, 0.0, 0.07])
def test_who_is_not_the_slowest_costs_nothing_until_he_is(share):
    own = np.array([[0.1, 0.2, 0.11]])
    found = what_if(PredictedStep(preset("loopback", 1, 3), 1e6, own), StepChange(slower={0: share}))
    assert found.delta.value == 0


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 5), st.integers(0, 4), st.floats(0.01, 3.0), st.integers(0, 1000))
def test_recorded_own_times_are_replayed_exactly(ranks, slow, share, seed):
    own = np.exp(np.random.default_rng(seed).normal(-2, 0.1, (40, ranks)))
    recorded = PredictedStep(preset("loopback", 1, ranks), 1e6, own, exposed_s=np.full(40, 0.004))
    slow %= ranks
    slower = own.copy()
    slower[:, slow] *= 1 + share
    exact = (slower.max(axis=1) - own.max(axis=1)).mean()
    found = what_if(recorded, StepChange(slower={slow: share}))
    assert found.delta.value == pytest.approx(exact)
    assert found.delta.low <= exact <= found.delta.high
    assert found.step_s[0] == pytest.approx(own.max(axis=1).mean() + 0.004)
    assert found.extrapolated == ()


def test_a_repaired_rank_gives_back_what_it_costs():
    own = np.full((50, 4), 0.1) + np.linspace(0, 1e-3, 50)[:, None]
    slow = own.copy()
    slow[:, 2] *= 1.3
    recorded = PredictedStep(preset("loopback", 1, 4), 1e6, slow, exposed_s=np.full(50, 0.01))
    found = what_if(recorded, StepChange(repaired=(2,)))
    assert found.delta.value == pytest.approx(-(0.3 * own[:, 0]).mean())
    assert -4 * 24 < found.rank_hours_per_day.low <= found.rank_hours_per_day.high < 0
    with pytest.raises(UsageError, match="others' median"):
        what_if(recorded, StepChange(repaired=(0, 1, 2, 3)))


def test_a_slow_link_costs_its_exact_delay_and_is_named():
    found = what_if(step(compute=0.0, algorithm="ring"), StepChange(slow_links=((1, 2, 4.0),)))
    exact = price(ring(6), FLAT.with_slow_link(1, 2, 4.0), 1e8) - price(ring(6), FLAT, 1e8)
    assert found.delta.value == pytest.approx(exact)
    assert played(found.after).guilty[:2] == ("slow link", (1, 2))
    assert found.rank_hours_per_day is None


@pytest.mark.parametrize("link", [(7, 15, 4.0), (3, 4, 4.0)])
def test_a_link_of_a_gpu_cluster_moves_the_librarys_law(link):
    plain = step(H100, 28e6, 0.0)
    found = what_if(plain, StepChange(slow_links=(link,)))
    before, after = (one.bucket.value for one in found.left)
    assert 1.3 * before < after < 4 * before
    assert found.delta.low < found.delta.value < found.delta.high
    assert "no published table has a slow link" in found.extrapolated[0]
    assert played(found.after).guilty[:2] == ("slow link", link[:2])


def test_a_lost_rail_and_an_oversubscribed_network_narrow_the_network():
    base = what_if(step(H100, 1e9, 0.0), StepChange(bucket_bytes=1e9)).left[0].bucket.value
    rail = what_if(step(H100, 1e9, 0.0), StepChange(lost_rails=(2,)))
    half = what_if(step(H100, 1e9, 0.0), StepChange(oversubscription=2.0))
    assert base * 7 / 8 < rail.left[1].bucket.value * 7 / 8 < 1.01 * base
    assert 1.7 * base < half.left[1].bucket.value < 2.01 * base
    assert played(rail.after).guilty[:2] == ("narrow host", (2,))


def test_switches_between_hosts_pay_from_three_hosts_on_and_no_table_shows_it():
    """A tree's inner host sends the tensor twice; a switch takes it once. Between two hosts a tree is as good."""
    many, two = (what_if(step(preset("dgx-h100", hosts), 1e9, 0.0), StepChange(sharp=True)) for hosts in (16, 2))
    assert many.delta.high < 0
    assert abs(two.delta.value) < 0.1 * two.left[0].bucket.value
    assert any("no published table shows switches" in why for why in many.extrapolated)
    with pytest.raises(UsageError, match="there is no 'in_network'"):
        what_if(step(), StepChange(sharp=True))


def test_in_the_only_host_its_own_switch_reduces_if_it_can():
    assert what_if(step(preset("dgx-h100", 1), 1e9, 0.0), StepChange(sharp=True)).after.algorithm == "nvls"
    with pytest.raises(UsageError, match="there is no 'in_network'"):
        what_if(step(preset("dgx-a100", 1), 1e9, 0.0), StepChange(sharp=True))


@pytest.mark.parametrize(
    ("name", "most"),
    [("dgx-h100", 8 * 48e9), ("dgx-a100", 232e9)],  # all interfaces of a host; NVLink without a switch that adds
)
def test_a_host_sends_its_tensor_once_to_a_switch_whatever_the_number_of_hosts(name, most):
    rates = [
        1e9 / what_if(step(preset(name, h), 1e9, 0.0), StepChange(sharp=True)).left[1].bucket.value for h in (4, 64)
    ]
    assert rates[1] == pytest.approx(rates[0], rel=0.02)
    assert rates[0] < most


def test_a_day_holds_no_more_than_its_hours():
    alone = what_if(step(), StepChange(hosts=1))
    assert alone.left[1].seconds.value == 0
    assert -24 < alone.rank_hours_per_day.low < alone.rank_hours_per_day.high < 0
    assert played(alone.after) is None


def test_buckets_hosts_and_algorithms():
    fewer = what_if(step(size=1e8, buckets=40), StepChange(bucket_bytes=25e6))
    assert fewer.after.buckets == 4
    more = what_if(step(H100, 1e9, 0.2, buckets=40), StepChange(hosts=16))
    assert (more.after.topology.ranks, more.after.own_s.shape) == (128, (1, 128))
    assert any("published tables end at 4 hosts" in why for why in more.extrapolated)
    ring_instead = what_if(step(H100, 1e6, 0.0), StepChange(algorithm="ring"))
    assert ring_instead.delta.value > 0


def test_a_recorded_run_moves_as_its_prices_move():
    own = np.full((30, 6), 0.1)
    recorded = PredictedStep(
        FLAT, 1e8, own, buckets=1, algorithm="ring", exposed_s=np.full(30, 0.5), measured=((1e8, 0.5),)
    )
    found = what_if(recorded, StepChange(slow_links=((0, 1, 2.0),)))
    assert found.left[0].seconds.value == 0.5
    factor = price(ring(6), FLAT.with_slow_link(0, 1, 2.0), 1e8) / price(ring(6), FLAT, 1e8)
    assert found.left[1].seconds.value == pytest.approx(0.5 * factor, rel=0.05)
    assert found.left[1].seconds.high < 1.2 * found.left[1].seconds.value  # the same messages: only the link differs
    assert found.extrapolated
    smaller = what_if(recorded, StepChange(bucket_bytes=1e7)).left[1].seconds
    assert smaller.high > 1.5 * smaller.value  # nobody has seen such messages


def test_the_scatter_of_a_recorded_run_is_in_the_band_of_its_difference():
    own, seen = np.full((30, 6), 0.1), 0.5 + 0.1 * np.resize([-1.0, 1.0], 30)
    recorded = PredictedStep(FLAT, 1e8, own, algorithm="ring", exposed_s=seen, measured=((1e8, 0.5),))
    found = what_if(recorded, StepChange(slow_links=((0, 1, 2.0),)))
    left, delta = found.left[0].seconds, found.delta
    assert left.low < 0.47 < 0.53 < left.high
    assert delta.low / delta.value < left.low / left.value < left.high / left.value < delta.high / delta.value
    assert found.steps[0].value == pytest.approx(found.step_s[0])


def test_a_run_grows_by_no_more_than_its_messages_do():
    """What a run had left may be more than its last bucket: it is no factor for what is hidden until then."""
    own = np.full((30, 6), 0.1)
    recorded = PredictedStep(FLAT, 1e8, own, 20, "ring", exposed_s=np.full(30, 0.05), measured=((5e6, 2e-3),))
    found = what_if(recorded, StepChange(slow_links=((0, 1, 4.0),)))
    before, after = (one.bucket.value for one in found.left)
    assert 0 < found.delta.value <= 20 * (after - before)
    faster = what_if(recorded, StepChange(bucket_bytes=1e6))
    assert faster.left[1].seconds.low >= 0
    assert faster.delta.low >= -0.05


def test_no_table_is_of_a_narrowed_network_and_that_is_said():
    for change in (StepChange(lost_rails=(2,)), StepChange(oversubscription=2.0)):
        (why,) = what_if(step(H100, 1e9, 0.0), change).extrapolated
        assert why.startswith("no published table is of ")


def test_latency_and_wire_are_told_apart_by_nobody_and_the_band_says_so():
    """What a slow link does to a message hangs on how much of its time is wire; one measured size does not tell."""
    small = PredictedStep(
        FLAT, 2e5, np.full((30, 6), 0.1), algorithm="ring", exposed_s=np.full(30, 1e-3), measured=((2e5, 1e-3),)
    )
    delta = what_if(small, StepChange(slow_links=((0, 1, 4.0),))).delta
    assert delta.low < 0.9 * delta.value < 1.1 * delta.value < delta.high


def test_what_was_measured_moves_a_plan():
    plain, seen = (
        plan(PlanQuestion(FLAT, 1e8, "ring", compute_s=0.2, measured=points)) for points in ((), ((5e7, 0.4),))
    )
    assert plain.priced.seconds.value < 0.5 * seen.priced.seconds.value
    width = [one.priced.seconds.high / one.priced.seconds.low for one in (plain, seen)]
    assert width[1] < 0.5 * width[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (StepChange(slower={9: 0.1}), "there is no rank 9: ranks are 0 to 5"),
        (StepChange(slower={1: -2.0}), "more than -100%"),
        (StepChange(slower={1: math.nan}), "more than -100%"),
        (StepChange(slow_links=((0, 9, 2.0),)), "no link from rank 0 to rank 9"),
        (StepChange(slow_links=((0, 1, 0.0),)), "give a number above 0"),
        (
            StepChange(slow_links=((0, 3, 2.0),)),
            "ring sends nothing from rank 0 to rank 3: take a link it uses, such as 0:1",
        ),
        (StepChange(lost_rails=(0,)), "has one rail"),
        (StepChange(lost_rails=(7,)), "hosts are 0 to 5"),
        (StepChange(oversubscription=0.5), "at least 1"),
        (StepChange(bucket_bytes=0.0), "more than 0"),
        (StepChange(hosts=0), "at least 1"),
        (StepChange(algorithm="magic"), "there is no 'magic'"),
    ],
)
def test_what_cannot_be_is_refused_in_words(change, reason):
    with pytest.raises(UsageError, match=reason):
        what_if(step(algorithm="ring"), change)


@pytest.mark.parametrize(("megabytes", "buckets"), [(100, 1), (50, 2), (49.99, 3), (200, 1)])
def test_buckets_are_as_many_as_hold_all_of_it(megabytes, buckets):
    one = step(topology=preset("ethernet-10g", 2), size=1e8, algorithm="ring")
    found = what_if(one, StepChange(bucket_bytes=megabytes * 1e6))
    assert found.after.buckets == buckets


def test_one_host_has_no_network_to_narrow_and_one_rank_nothing_to_play():
    box = step(topology=preset("dgx-h100", 1))
    with pytest.raises(UsageError, match="dgx-h100 is one host: there is no network to oversubscribe"):
        what_if(box, StepChange(oversubscription=2.0))
    assert what_if(box, StepChange(oversubscription=2.0, hosts=2)).after.topology.oversubscription == 2.0
    assert played(box).blamed is not None
    assert played(step(topology=preset("dgx-h100", 1, 1))) is None


def test_a_share_of_unknown_work_is_refused():
    with pytest.raises(UsageError, match="--compute-seconds"):
        what_if(step(compute=0.0), StepChange(slower={1: 0.1}))


# -------------------------------------------------------------------------------------------------
# A recorded run over the links that it recorded.


def recorded(own=0.1, *, bucket_s=0.05, buckets=4, hosts=3, size=4e6, **others):
    """A run whose buckets took `bucket_s` over links of 100 MB/s: what the links do not take is the ranks' own."""
    network = Topology("run", (1,) * hosts, between=LinkClass("ethernet", 20e-6, 100e6))
    measured = ((size / buckets, bucket_s),)
    times = own if isinstance(own, np.ndarray) else np.full((30, hosts), own)
    topology, share = as_measured(network, "ring", measured)
    own_links = {"measured": measured, "has_own_links": True, "link_share": share}
    step = PredictedStep(topology, size, times, buckets, "ring", **own_links, **others)
    return replace(step, exposed_s=step.left_s(bucket_s))


@pytest.mark.parametrize("bucket_s", [0.01, 0.02, 0.2])
def test_what_links_do_not_take_of_a_bucket_stays_when_they_are_faster(bucket_s):
    """1 MB in a ring of three: each sends 4/3 of it, 13.3 ms; the rest is the ranks' own, of which a part stays."""
    run = recorded(bucket_s=bucket_s)
    wire_s = 4e6 / 3 / 100e6
    after = what_if(run, StepChange(link_rate=2.0)).left[1].bucket
    left_s = max(bucket_s - wire_s, 0.0)
    expected = left_s + min(wire_s, bucket_s) / 2.0
    assert after.value == pytest.approx(expected, rel=0.03)
    assert after.low < expected < after.high < 1.5 * expected


def test_a_dtype_on_the_wire_is_links_that_carry_as_many_more_elements():
    run = recorded()
    half = what_if(run, StepChange(wire_dtype="bfloat16"))
    assert half.delta.value == pytest.approx(what_if(run, StepChange(link_rate=2.0)).delta.value)
    assert half.delta.value < 0
    assert WIRE_BYTES["int8"] == WIRE_BYTES["fp8_e4m3"] == BlockScaling("int8").wire_bytes(3200) / 3200
    assert any("rounding to bfloat16" in line for line in half.unseen)
    with pytest.raises(UsageError, match="as 'fp8'; there are float32, float16, bfloat16, int8"):
        what_if(run, StepChange(wire_dtype="fp8"))


def test_faster_links_and_fewer_bytes_shorten_what_links_take_and_nothing_twice():
    """The ranks' share of a message stays once, not once for either."""
    run = replace(recorded(bucket_s=0.05), link_share=0.4)
    both = what_if(run, StepChange(link_rate=2.0, wire_dtype="bfloat16"))
    assert both.delta.value == pytest.approx(what_if(run, StepChange(link_rate=4.0)).delta.value)


@pytest.mark.parametrize(("bucket_s", "part"), [(0.2, 1 - 2 / 3 * 3 / 4), (1e-3, 1.0)])
def test_backward_that_takes_longer_hides_more_of_a_synchronisation_that_is_longer(bucket_s, part):
    """Where links decide, a slow rank delays the first bucket only; where nothing is left but the last, all of it."""
    found = what_if(recorded(bucket_s=bucket_s), StepChange(slower={1: 0.12}))
    assert found.delta.value == pytest.approx(0.012 * part)
    assert found.work_delta.value == pytest.approx(0.012)
    assert found.steps[1].value - found.steps[0].value == pytest.approx(found.delta.value)
    assert found.extrapolated == found.unseen == ()


def test_what_was_recorded_of_backward_decides_what_it_hides():
    own = np.full((30, 3), 0.1)
    whole = recorded(own, bucket_s=0.2, backward_s=np.full((30, 3), 0.1))
    none = recorded(own, bucket_s=0.2, backward_s=np.zeros((30, 3)))
    change = StepChange(slower={0: 0.2})
    assert [what_if(run, change).delta.value for run in (whole, none)] == pytest.approx([0.02 / 4, 0.02])


def test_ranks_of_hosts_that_are_added_do_what_the_recorded_ones_did_in_other_steps():
    own = 0.1 + 1e-3 * np.arange(12).reshape(6, 2)
    run = recorded(np.array(own), hosts=2)
    found = what_if(run, StepChange(hosts=6))
    more = found.after.own_s
    assert more.shape == (6, 6)
    assert (more[:, :2] == own).all()
    for first in (2, 4):  # the same steps, each rank's among its own host's, in another order
        assert (more[:, first : first + 2] == np.roll(own, -first, axis=0)).all()
    assert found.work_delta.value > 0
    assert any("own times of the hosts added" in line for line in found.unseen)
    assert what_if(run, StepChange(hosts=1)).after.own_s.shape == (6, 1)


def test_buckets_that_nobody_timed_take_what_leaves_what_was_left():
    for bucket_s in (0.2, 0.015, 1e-3):
        run = recorded(bucket_s=bucket_s)
        assert bucket_seconds(replace(run, measured=())) == pytest.approx(bucket_s, rel=1e-6)


def test_a_latency_that_was_measured_is_paid_by_every_bucket():
    network = Topology("run", (1,) * 3, between=LinkClass("ethernet", 20e-6, 100e6))
    found, share = as_measured(network, "ring", ((8.0, 4e-3), (1e6, 0.02)))
    assert share == pytest.approx(4e6 / 3 / 100e6 / 0.016, rel=0.01)
    assert price(ring(3), found, 8.0) == pytest.approx(4e-3, rel=0.01)
    assert price(ring(3), found, 1e6) == pytest.approx(0.02, rel=0.01)


def test_faster_links_are_those_between_hosts_alone():
    inside, between = LinkClass("shared_memory", 1e-6, 4e9), LinkClass("ethernet", 1e-5, 1e9)
    links = (LinkOverride(0, 1, None, 5e8), LinkOverride(1, 2, None, 5e8), LinkOverride(0, 1, 1e-5, 4e8, "hosts"))
    two = Topology("two", (2, 2), inside, between, overrides=links, host_rates=((1e9, 2e9), (1e9, 1e9)))
    fast = two.with_link_rate(2.0)
    assert (fast.inside, fast.between.bytes_per_s) == (inside, 2e9)
    assert [link.bytes_per_s for link in fast.overrides] == [5e8, 1e9, 8e8]
    assert fast.host_rates == ((2e9, 4e9), (2e9, 2e9))
    for times in (0.0, -1.0, 1e300, 1e-300, math.inf, math.nan):
        with pytest.raises(UsageError, match="give a number above 0, such as 2"):
            two.with_link_rate(times)
    with pytest.raises(UsageError, match="loopback is one host: nothing travels between hosts"):
        preset("loopback").with_link_rate(2.0)
