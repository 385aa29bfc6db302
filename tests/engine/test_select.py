from __future__ import annotations

import json
import logging
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.support import zygote
from tests.support.networks import uniform

from ringside._core.enums import DType, ReduceOp
from ringside.engine.algorithm import NATIVE, AlgorithmSpec
from ringside.engine.cost.model import Cluster
from ringside.engine.cost.network import CostNetwork
from ringside.engine.dtypes import DTYPES, ITEM_BYTES, OP_CODES
from ringside.engine.net.exchange.compression import WireCompression
from ringside.engine.net.hierarchical import HierarchicalEngine
from ringside.engine.net.reduction import Reduction
from ringside.engine.probe.prober import QUICK, Probe, Prober, measure_cluster
from ringside.engine.tuner.cache import Mode, are_alike, cache_path, load_table, store_table
from ringside.engine.tuner.drift import DRIFT, EVERY_NOTED, Drift
from ringside.engine.tuner.explain import Explanation
from ringside.engine.tuner.selector import PROBE_S, Tuner
from ringside.engine.tuner.table import (
    LADDER,
    Rank,
    TimingRow,
    TimingTable,
    candidates,
    make_table,
    predicted_at,
    priced,
)
from ringside.engine.tuner.timing import Race, Rank0Broadcast, StartupTiming, best_at
from ringside.errors import UsageError
from ringside.lab import Lab
from ringside.text import percent

from .threaded import on_threads

MB, KB = 1 << 20, 1 << 10
ALPHA = 1e-4
KEY = {"hosts": "a:1,b:1,c:1,d:1"}


def cluster(hosts: int = 4, ranks: int = 1, slow: tuple[int, int] | None = None) -> Cluster:
    per_byte = np.full((hosts, hosts), 1 / 118e6)
    if slow:
        per_byte[slow] = per_byte[slow[::-1]] = 4 / 118e6
    network = CostNetwork(np.full((hosts, hosts), 1e-4), per_byte)
    return Cluster(network, tuple(tuple(range(h * ranks, (h + 1) * ranks)) for h in range(hosts)))


def table(
    timings: dict[tuple[str, int], float], before: TimingTable | None = None, of: Cluster | None = None
) -> TimingTable:
    of = of or cluster()
    prices = priced(candidates(of), of)
    return make_table(prices, timings, KEY, of.between.to_topology(), before=before)


# ------------------------------------------------------------------------------------------------ candidates, table


def test_candidates_are_what_makes_sense():
    alone = {str(choice) for choice in candidates(cluster())}
    assert {"native", "ring", "chain*16", "two_tree*4"} <= alone
    assert not [name for name in alone if "/" in name or "in_network" in name or "hierarchical" in name]
    paired = {str(choice) for choice in candidates(cluster(4, 2), (0, 2, 1, 3))}
    assert {"native", "hosts/native", "hosts/ring", "leaders/ring", "ring", "hosts/ring@0,2,1,3"} <= paired
    assert len(paired) == len(candidates(cluster(4, 2), (0, 2, 1, 3)))


def test_what_makes_sense_among_few_ranks_or_hosts_is_left_out_among_many():
    for hosts, ranks, flat, one_shot, between in (
        (8, 2, True, True, True), (9, 2, True, False, True), (16, 1, False, True, False), (17, 1, False, False, False),
        (32, 2, True, False, False), (33, 2, False, False, False),
    ):  # fmt: skip
        found = {str(choice) for choice in candidates(cluster(hosts, ranks))}
        assert ("ring" in found) == (flat or ranks == 1), (hosts, ranks)
        assert ("one_shot" in found) == one_shot, (hosts, ranks)
        assert ("hosts/one_shot" in found) == ("leaders/one_shot" in found) == between, (hosts, ranks)


def test_only_what_was_timed_and_was_as_fast_as_native_wins():
    found = table({(NATIVE, MB): 0.020, ("ring", MB): 0.015, ("direct", MB): 0.021})
    for rank in found.ranks:
        assert rank.winner in ("ring", NATIVE)
        assert {row.choice for row in rank.rows if row.eligible} <= {"ring", NATIVE}
    assert found.at(MB).winner == "ring"
    assert [row.measured_s for row in found.at(MB).rows if row.choice == "direct"] == [0.021]


@pytest.mark.parametrize(("ring", "winner"), [(0.98, NATIVE), (0.96, "ring")])
def test_at_sizes_that_were_not_timed_a_choice_wins_over_native_by_three_percent_or_not_at_all(ring, winner):
    found = table({(NATIVE, MB): 0.020, ("ring", MB): ring * 0.020})  # both are priced alike at all sizes
    assert found.at(MB).winner == "ring"
    assert found.at(4 * MB).winner == found.at(MB // 4).winner == winner


def test_without_timings_it_is_native():
    assert {rank.winner for rank in table({}).ranks} == {NATIVE}


def test_expected_times_follow_what_was_measured():
    found = table({(NATIVE, MB): 0.030, ("ring", MB): 0.028, ("ring", 64 << 10): 0.002, (NATIVE, 64 << 10): 0.004})
    for rank in found.ranks:
        ring = next(row for row in rank.rows if row.choice == "ring")
        if ring.measured_s is not None:
            assert ring.expected_s == pytest.approx(ring.measured_s)
    large = found.at(64 * MB)
    ring = next(row for row in large.rows if row.choice == "ring")
    mega = next(row for row in found.at(MB).rows if row.choice == "ring")
    assert ring.expected_s / ring.predicted_s == pytest.approx(mega.expected_s / mega.predicted_s)
    assert found.expected_s(MB, "ring") == pytest.approx(0.028)
    assert 0.002 < found.expected_s(MB // 2, "ring") < 0.028
    assert found.expected_s(128 * MB, "ring") == pytest.approx(2 * ring.expected_s)
    assert found.expected_s(MB, "ring@3,2,1,0") is None
    smallest = next(row for row in found.ranks[0].rows if row.choice == "ring")
    assert found.expected_s(1, "ring") == smallest.expected_s  # below what was looked at: it takes no less
    # The reason names the first of the others, and by how much it is expected to take longer.
    rank = found.at(MB)
    own = next(row for row in rank.rows if row.choice == rank.winner)
    other = next(row for row in rank.rows if row.choice != rank.winner)
    more = other.expected_s / own.expected_s - 1
    assert more != 0
    assert f"; {other.choice} would take {percent(abs(more))} {'more' if more > 0 else 'less'}" in rank.why


def test_a_table_in_use_changes_only_for_a_tenth_or_to_keep_the_promise():
    before = table({(NATIVE, MB): 0.020, ("ring", MB): 0.015, ("direct", MB): 0.016})
    assert before.at(MB).winner == "ring"
    noise = table({(NATIVE, MB): 0.020, ("ring", MB): 0.015, ("direct", MB): 0.0140}, before)
    assert noise.at(MB).winner == "ring"
    gain = table({(NATIVE, MB): 0.020, ("ring", MB): 0.015, ("direct", MB): 0.0130}, before)
    assert gain.at(MB).winner == "direct"
    promise = table({(NATIVE, MB): 0.0140, ("ring", MB): 0.0150, ("direct", MB): 0.0150}, before)
    assert promise.at(MB).winner == NATIVE
    near = table({(NATIVE, MB): 0.0146, ("ring", MB): 0.0150, ("direct", MB): 0.0150}, before)
    assert near.at(MB).winner == "ring"


def test_sizes_that_were_not_timed_anew_change_only_for_their_price():
    timed = {(NATIVE, 4 * MB): 0.08, ("ring", 4 * MB): 0.06, ("direct", 4 * MB): 0.07}
    small = {(NATIVE, 4096): 0.004, ("ring", 4096): 0.0030, ("direct", 4096): 0.0031}
    before = table({**timed, **small})
    assert {before.at(4096).winner, before.at(4 * MB).winner} == {"ring"}
    now = {**timed, ("direct", 4 * MB): 0.03, **small, ("direct", 4096): 0.0020, (NATIVE, 4096): 0.0025}
    of = cluster()
    prices = priced(candidates(of), of)
    prices["direct"] = [
        replace(price, seconds=0.95 * ring.seconds)
        for price, ring in zip(prices["direct"], prices["ring"], strict=True)
    ]

    def revised() -> TimingTable:
        return make_table(prices, now, KEY, of.between.to_topology(), before=before, fresh=[4 * MB])

    assert revised().at(4 * MB).winner == revised().at(64 * MB).winner == revised().at(MB).winner == "direct"
    assert revised().at(4096).winner == "ring"
    prices["direct"] = [replace(price, seconds=0.5 * price.seconds) for price in prices["direct"]]
    assert revised().at(4096).winner == "direct"


def test_a_table_gives_back_the_figures_it_was_made_from():
    timings = {(NATIVE, MB): 0.02, ("ring", MB): 0.015, (NATIVE, 4096): 0.002}
    made = TimingTable.decode(table(timings).encode())
    assert made.timings() == timings
    prices = priced(candidates(cluster()), cluster())
    assert {name: [price.seconds for price in row] for name, row in made.prices().items()} == {
        name: [price.seconds for price in row] for name, row in prices.items()
    }


def test_few_are_timed_of_every_way_and_the_hopeless_only_once():
    of = cluster(4, 2)
    names = best_at(priced(candidates(of), of), 4096)
    assert names[0] == NATIVE
    assert {AlgorithmSpec.parse(name).over for name in names} == {"ranks", "hosts", "leaders"}
    assert len(names) == len(set(names)) <= 10
    race = Race(4096, [NATIVE, "ring", "direct"], frozenset({NATIVE}))
    race.took(np.array([0.9, 0.1, 0.3]))
    assert race.going == [0, 1]
    assert race.cost_s() == pytest.approx(1.0)
    race.took(np.array([0.7, 0.3, -1.0]))
    assert race.medians() == {(NATIVE, 4096): 0.8, ("ring", 4096): 0.2, ("direct", 4096): 0.3}
    assert best_at(priced(candidates(of), of), 4 * MB)[1].startswith("hosts/")


def timed(size: int, of: Cluster) -> tuple[list[str], dict[str, int]]:
    """Return which ways the choices that are timed at a size go, in their order, and how many go each way."""
    prices = priced(candidates(of), of)
    names = best_at(prices, size)
    assert len(names) == len(set(names))
    assert names[0] == NATIVE
    assert (names[-1] == "hosts/native") == ("hosts/native" in prices)
    ways = [AlgorithmSpec.parse(name).over for name in names[1:] if not name.endswith(NATIVE)]
    for way in dict.fromkeys(ways):
        ours = [name for name in names if AlgorithmSpec.parse(name).over == way and not name.endswith(NATIVE)]
        cost = [predicted_at(size, prices[name]) for name in ours if name != "leaders/parameter_server"]
        assert cost == sorted(cost), "the most promising first"
    assert size >= 1 << 16 or all(AlgorithmSpec.parse(name).segments == 1 for name in names)
    return list(dict.fromkeys(ways)), dict(Counter(ways))


@pytest.mark.parametrize(
    ("size", "ways"),
    [
        (4, {"leaders": 3, "ranks": 1}),
        (5, {"leaders": 3, "hosts": 2, "ranks": 1}),
        ((64 << 10) - 1, {"leaders": 4, "hosts": 2, "ranks": 1}),
        (64 << 10, {"leaders": 3, "hosts": 2, "ranks": 1}),
        (MB - 1, {"leaders": 3, "hosts": 2, "ranks": 1}),
        (MB, {"hosts": 2, "leaders": 1}),
        (4 * MB - 1, {"hosts": 2, "leaders": 1}),
        (4 * MB, {"hosts": 1}),
    ],
)
def test_of_every_way_through_hosts_so_many_are_timed(size: int, ways: dict[str, int]) -> None:
    assert timed(size, cluster(4, 2)) == (list(ways), ways)


@pytest.mark.parametrize(("size", "count"), [(4, 4), (MB - 1, 4), (MB, 3), (4 * MB - 1, 3), (4 * MB, 2)])
def test_of_ranks_that_are_alone_on_their_hosts_so_many_are_timed(size: int, count: int) -> None:
    assert timed(size, cluster())[1] == {"ranks": count}


def test_what_is_timed_depends_on_what_time_is_left():
    def job(across):
        measuring = StartupTiming(across.rank_map, Rank0Broadcast(across), Prober(across), lambda: 10.0)
        measuring.prices = priced(candidates(cluster()), cluster())
        names = ["native", "ring", "direct", "chain", "tree"]
        new = Race(MB, names, frozenset())
        first = measuring.affordable(new, 0, 0.0)
        measuring.pace = 1.0
        timed = Race(MB, names, frozenset())
        timed.took(np.full(5, 0.1))
        counts = [measuring.affordable(new, 0, left) for left in (20.0, 10.07, 9.0)]
        large = measuring.affordable(Race(4 * MB, names, frozenset()), 0, 10.01)
        return (
            first,
            counts,
            large,
            measuring.affordable(timed, 1, 10.6),
            measuring.affordable(timed, 1, 10.4),
        )

    ours, theirs = on_threads(2, job)
    assert ours == (3, [5, 3, 3], 0, 5, 0)
    assert theirs == (0, [0, 0, 0], 0, 0, 0)


def test_a_table_is_json_and_comes_back():
    made = table({(NATIVE, MB): 0.020, ("ring", MB): 0.015})
    data = made.encode()
    assert json.loads(data)["ranks"][5]["winner"] == made.ranks[5].winner
    assert b"\n" in data
    assert TimingTable.decode(data) == made
    assert TimingTable.decode(data).encode() == data


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b'{"schema":1}'])
def test_what_is_no_table_is_refused(data: bytes):
    with pytest.raises(UsageError):
        TimingTable.decode(data)


def test_tables_of_another_schema_or_with_unknown_algorithms_are_refused():
    data = json.loads(table({(NATIVE, MB): 0.020}).encode())
    with pytest.raises(UsageError, match="schema 7"):
        TimingTable.decode(json.dumps({**data, "schema": 7}).encode())
    data["ranks"][0]["winner"] = "butterfly"
    with pytest.raises(UsageError, match="butterfly"):
        TimingTable.decode(json.dumps(data).encode())


def test_the_explanation_fits_and_marks_the_winner():
    made = table({(NATIVE, MB): 0.020, ("ring", MB): 0.015, ("two_tree*16", MB): 0.03})
    text = str(Explanation.of(MB, made.at(MB), ("links are slow; ring -> direct " * 5,)))
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("1 MiB: ring. ring: link ")
    (marked,) = [line for line in text.splitlines() if line.startswith(">")]
    assert marked.split()[1:5:3] == ["ring", "15.0"]
    assert "native" in text
    assert "changed: links are slow" in text


# ------------------------------------------------------------------------------------------------ drift


def feed(drift: Drift, ratios: list[float], size: int = 4 * MB) -> list[float]:
    """Return the level at every vote that is due."""
    levels = []
    for ratio in ratios:
        drift.observe(size, ratio)
        if drift.due(size):
            levels.append(drift.level)
    return levels


def test_votes_are_due_by_counting_alone():
    """After every fourth of three megabytes or more, every eighth large one, and one in eight small ones noted."""
    drift = Drift([])
    for size, every in ((4 * MB, 4), (3 * MB, 4), (3 * MB - 1, 8), (MB, 8), (MB - 1, 8), (1000, 8)):
        assert [drift.due(size) for _ in range(16)] == ([False] * (every - 1) + [True]) * (16 // every)
    assert [drift.due(size * MB) for size in (1, 64, 2, 4, 64, 2)] == [False] * 4 + [True, False]


def test_of_small_all_reduces_one_in_eight_is_noted_and_of_large_ones_each():
    def job(across):
        made = table({}, of=cluster(2))
        tuner, noted = Tuner(across, environ={}), []
        settled = tuple(msgspec.structs.replace(rank, turns=1) for rank in made.ranks)
        tuner.use(msgspec.structs.replace(made, ranks=settled).encode())
        tuner.note = lambda size, *_: noted.append(size)
        for size, times in ((4096, 24), (MB - 1, 7), (MB, 3)):
            for _ in range(times):
                tuner.after(size, tuner.choose(size), 1e-3)
        return noted, tuner.calls[tuner.size_class(4096)]

    assert on_threads(2, job) == [([4096] * 3 + [MB] * 3, 24)] * 2


def test_a_slow_link_is_felt_within_eight_collectives():
    for calm in range(8, 12):
        drift = Drift([])
        feed(drift, [1.0] * calm)
        assert max(feed(drift, [2.5] * 8)) > DRIFT


def test_noise_and_single_stalls_are_no_drift():
    rng = np.random.default_rng(1)
    ratios = rng.lognormal(0, 0.08, 4000)
    ratios[::5] *= 6.0  # every fifth stalls
    assert max(feed(Drift([]), ratios.tolist())) < DRIFT


def wandering(rng: np.random.Generator, count: int) -> list[float]:
    """Ratios on a machine that others use for a while, again and again: then all take a third longer."""
    ratios = rng.lognormal(0, 0.08, count)
    for start in range(20, count, 60):
        ratios[start : start + int(rng.integers(4, 12))] *= 1.35
    return ratios.tolist()


def test_a_level_that_wanders_by_itself_is_heard_once_or_twice_and_a_cut_at_once():
    rng = np.random.default_rng(5)
    for _ in range(20):
        drift, heard = Drift([]), []
        for at, ratio in enumerate(wandering(rng, 1500)):
            drift.observe(4 * MB, ratio)
            if drift.due(4 * MB) and drift.level > drift.bar:
                heard.append(at)
                drift.revised(changed=False)
        assert len(heard) <= 4, heard
        assert max(feed(drift, [2.5 * ratio for ratio in wandering(rng, 20)])) > DRIFT


def test_what_training_always_adds_is_usual():
    assert max(feed(Drift([]), [1.4] * 100)) < DRIFT
    assert max(feed(Drift([]), [0.7] * 100)) < DRIFT
    assert max(feed(Drift([]), [3.0] * 100)) > DRIFT  # too much to be usual without looking
    tried = Drift([])
    tried.tried(4 * MB)  # the job's own all-reduces said what to expect, so 1.6 times that is no usual pace of it
    assert max(feed(tried, [1.6] * 10)) > DRIFT
    tried = Drift([])
    tried.tried(4 * MB)
    assert max(feed(tried, [1.4] * 100)) < DRIFT


def test_what_was_learned_in_a_busy_moment_gives_way_to_a_faster_pace():
    drift = Drift([])
    assert max(feed(drift, [1.5] * 4 + [0.5] * 8)) < DRIFT
    assert max(feed(drift, [1.2] * 8)) > DRIFT


def test_a_revision_that_changes_nothing_makes_the_pace_usual_and_waits():
    drift = Drift([])
    feed(drift, [1.0] * 8 + [3.0] * 8)
    assert drift.level > DRIFT
    drift.revised(changed=False)
    assert drift.level == 0.0
    assert max(feed(drift, [3.0] * 100)) < DRIFT
    felt = feed(drift, [9.0] * 8)
    assert felt[-1] > DRIFT
    drift.revised(changed=False)
    assert max(feed(drift, [13.5] * 60)) == 0.0  # half as long again: the wait has doubled
    assert max(feed(drift, [13.5] * 8)) > DRIFT


def test_what_is_pressing_is_heard_even_in_a_pause():
    drift = Drift([])
    feed(drift, [1.0] * 8 + [1.4] * 8)
    drift.revised(changed=False)
    assert max(feed(drift, [1.4] * 8 + [2.1] * 8)) == 0.0
    assert max(feed(drift, [4.0] * 8)) > DRIFT


def test_what_is_not_pressing_has_to_be_said_by_six_of_eight():
    for ratio, level in ((1.8, 1.0), (1.9, 1.9)):
        drift = Drift([])
        feed(drift, [1.0] * 3 + [ratio] * 5)
        assert drift.level == level
        feed(drift, [ratio])
        assert drift.level == ratio


def test_a_revision_that_changes_something_starts_over():
    drift = Drift([])
    feed(drift, [1.0] * 8 + [3.0] * 8)
    drift.revised(changed=True)
    assert drift.level == 0.0
    assert max(feed(drift, [1.0] * 40)) < DRIFT


def revisions(drift: Drift, ratios: list[float], size: int, cost: float, *, changed: bool) -> list[int]:
    """Return after which of the noted all-reduces the ranks would decide anew."""
    found = []
    for at, ratio in enumerate(ratios):
        drift.observe(size, ratio)
        if drift.due(size) and drift.level > drift.bar:
            found.append(at)
            drift.revised(changed=changed, cost=cost)
    return found


@pytest.mark.parametrize("changed", [True, False])
def test_small_all_reduces_on_busy_cores_do_not_time_everything_again_and_again(changed: bool) -> None:
    """As was seen on two cores: 4 KB take 0.1 ms for a while and then 0.6, and to decide takes 0.12 s."""
    busy = ([1.0] * 40 + [6.0] * 24) * 250
    asked = revisions(Drift([4096.0, 4.0 * MB]), busy, 4096, 1000.0, changed=changed)
    assert 1 <= len(asked) <= 3
    assert asked[0] < 64  # what it is, is looked into at once
    assert len(asked) * 1000.0 <= 0.05 * EVERY_NOTED * len(busy)


def test_a_revision_that_changes_nothing_pauses_for_as_long_as_it_is_worth() -> None:
    quiet, drift = [1.0] * 8, Drift([])
    assert len(revisions(drift, quiet + [1.5] * 8, 4 * MB, 10.0, changed=False)) == 1
    assert not revisions(drift, [2.3] * 480, 4 * MB, 10.0, changed=False)
    assert len(revisions(drift, [2.3] * 40, 4 * MB, 10.0, changed=False)) == 1


def test_classes_are_apart_and_unknown_choices_say_nothing():
    drift = Drift([2 * MB])
    feed(drift, [1.0] * 8, 4 * MB)
    assert max(feed(drift, [9.0] * 3 + [1.0], MB), default=0) <= 9.0
    assert feed(drift, [1.0] * 4, 4 * MB)[-1] < DRIFT
    drift.observe(4 * MB, None)
    assert drift.level < DRIFT


# ------------------------------------------------------------------------------------------------ the cache


def test_where_tables_are_kept(tmp_path):
    assert cache_path(KEY, {"RINGSIDE_CACHE_DIR": str(tmp_path)}).parent == tmp_path
    assert cache_path(KEY, {"XDG_CACHE_HOME": str(tmp_path)}).parent == tmp_path / "ringside"
    assert cache_path(KEY, {"HOME": "x"}) != cache_path({"hosts": "other"}, {"HOME": "x"})
    assert Mode.of_environment({}) == Mode()
    assert Mode.of_environment({"RINGSIDE_SELECTION": ""}) == Mode.of_environment({"RINGSIDE_SELECTION": "measured"})
    assert Mode.of_environment({"RINGSIDE_SELECTION": "measured"}) == Mode()
    assert not Mode.of_environment({"RINGSIDE_SELECTION": "off"}).measure
    assert not Mode.of_environment({"RINGSIDE_SELECTION": "fresh"}).read
    assert Mode.of_environment({"RINGSIDE_SELECTION": "/a/b.json"}).path.name == "b.json"


def test_a_kept_table_holds_for_the_same_job_and_links(tmp_path, caplog: pytest.LogCaptureFixture):
    path, of = tmp_path / "deep" / "t.json", cluster()
    made = table({(NATIVE, MB): 0.02, ("ring", MB): 0.01})
    assert load_table(path, KEY, of.between) is None
    store_table(path, made)
    assert [file.name for file in path.parent.iterdir()] == ["t.json"]
    assert load_table(path, KEY, of.between) == made
    caplog.set_level(logging.INFO, "ringside")
    assert load_table(path, {"hosts": "other"}, of.between) is None
    assert load_table(path, KEY, cluster(slow=(0, 1)).between) is None
    path.write_text("{ not json")
    assert load_table(path, KEY, of.between) is None
    assert [record.message.count("is not used") for record in caplog.records] == [1, 1, 1]
    store_table(path, made)
    assert load_table(path, KEY, of.between) == made


def test_a_disk_that_refuses_is_only_logged(tmp_path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("")
    store_table(tmp_path / "file" / "t.json", table({}))
    assert "not kept" in caplog.text


def test_links_are_alike_within_what_probing_can_tell():
    one = uniform(4, 1e-4, 1 / 118e6)
    assert are_alike(one, uniform(4, 3e-4, 1 / 100e6))
    noisy = 1 / (118e6 * np.random.default_rng(1).uniform(0.7, 1.4, (4, 4)))
    assert are_alike(one, CostNetwork(one.latency_s, noisy))
    cut = cluster(slow=(0, 1)).between
    assert are_alike(cut, cluster(slow=(0, 1)).between)
    assert not are_alike(cut, one)
    assert not are_alike(cut, cluster(slow=(2, 3)).between)
    assert not are_alike(one, uniform(4, 1e-4, 1 / 50e6))
    assert not are_alike(one, uniform(4, 1e-3, 1 / 118e6))
    assert not are_alike(one, uniform(3, 1e-4, 1 / 118e6))


# ------------------------------------------------------------------------------------------------ all of it


def started(across, environ) -> Tuner:
    selector = Tuner(across, {"version": "test"}, environ=environ)
    selector.start()
    return selector


def test_all_ranks_hold_the_same_table_and_keep_it(tmp_path):
    environ = {"RINGSIDE_CACHE_DIR": str(tmp_path)}
    first = on_threads(4, lambda across: started(across, environ), native_pause_s=0.02)
    tables = {selector.table.encode() for selector in first}
    assert len(tables) == 1
    (kept,) = tmp_path.iterdir()
    assert kept.read_bytes() in tables
    assert [rank.size_bytes for rank in first[0].table.ranks] == list(LADDER)
    small = first[0].choose(64 << 10)
    assert small.algorithm != NATIVE  # which pauses for 20 ms here
    assert str(small) == first[0].explain(64 << 10).choice
    assert "native" in str(first[3].explain(64 << 10))


class Knowing(Prober):
    """Finds links that are given."""

    def __init__(self, across: HierarchicalEngine, network: CostNetwork) -> None:
        super().__init__(across, effort=replace(QUICK, budget_s=PROBE_S))
        self.network = network

    def probe(self) -> Probe:
        figures = np.zeros((self.network.size,) * 2)
        return Probe(self.network, self.network.rates, figures)


class NativeIsFast(Knowing):
    """Finds that the group's own takes 20 ms, and all others 30."""

    def time_once(self, choice: AlgorithmSpec, data: np.ndarray) -> float:
        return 0.02 if choice.algorithm == NATIVE else 0.03


def steady(across, environ, network: CostNetwork, clock=time.perf_counter) -> Tuner:
    """Start a selector that finds these links, whatever threads on a busy machine are like."""
    selector = Tuner(across, {"version": "test"}, environ=environ, prober=Knowing(across, network), clock=clock)
    selector.start()
    return selector


def test_a_kept_table_is_used_where_the_links_are_as_they_were_and_fresh_ignores_it(tmp_path, caplog):
    path, links = tmp_path / "mine.json", uniform(2, 1e-4, 1 / 118e6)
    environ = {"RINGSIDE_SELECTION": str(path)}
    on_threads(2, lambda across: steady(across, environ, links))
    data = json.loads(path.read_text())
    for rank in data["ranks"]:
        rank |= {"winner": "direct", "turns": 9}
    path.write_text(json.dumps(data))
    again = on_threads(2, lambda across: steady(across, environ, links))
    assert [selector.choose(MB) for selector in again] == [AlgorithmSpec("direct")] * 2
    slower = on_threads(2, lambda across: steady(across, environ, uniform(2, 1e-4, 1 / 30e6)))
    assert slower[0].table == slower[1].table != again[0].table
    assert TimingTable.decode(path.read_bytes()) == again[0].table  # somebody's own file is not overwritten
    assert "the links are other ones now" in caplog.text
    assert "stays as it is" in caplog.text
    directory = {"RINGSIDE_CACHE_DIR": str(tmp_path / "cache"), "RINGSIDE_SELECTION": "fresh"}
    for _ in range(2):
        fresh = on_threads(2, lambda across: steady(across, directory, links))
        (file,) = (tmp_path / "cache").iterdir()
        assert TimingTable.decode(file.read_bytes()) == fresh[0].table
        file.write_text("spoilt")


def with_table(tmp_path, timings, job):
    """Run a job on two ranks, given each one's selector and engine: it has kept the table that follows from timings."""
    path, links = tmp_path / "mine.json", uniform(2, 1e-4, 1 / 118e6)
    environ = {"RINGSIDE_SELECTION": str(path)}
    on_threads(2, lambda across: steady(across, environ, links))
    key, made = TimingTable.decode(path.read_bytes()).key, table(timings, of=cluster(2))
    path.write_bytes(TimingTable(key, made.topology, made.ranks).encode())
    return on_threads(2, lambda across: job(steady(across, environ, links, lambda: 1e3), across))


def called(selector, size, seconds, dtype=DType.float32):
    """Have the ranks call an all-reduce as the engine does, and say what it took."""
    reduction = Reduction(int(dtype), ReduceOp.sum)
    choice = selector.choose(size, int(dtype))
    selector.begin_trial(size // ITEM_BYTES[reduction.dtype], reduction, choice)
    selector.after(size, choice, seconds, int(dtype))


LARGE_TIMES = {(NATIVE, 4 * MB): 0.08, ("ring", 4 * MB): 0.06, ("direct", 4 * MB): 0.064}


def test_choices_that_take_turns_at_other_sizes_are_compared_by_what_they_would_take_at_one(tmp_path):
    """Whoever has its turns with the smaller tensors is not the faster one because of that."""
    sizes = {"ring": 5 * MB // 2, "direct": 7 * MB}

    def job(selector, _):
        before = selector.table
        while not selector.settled(4 * MB):
            name = str(selector.choose(4 * MB))
            size = sizes.get(name, 4 * MB)
            called(selector, size, (1.0 if name == "direct" else 1.3) * before.expected_s(size, name))
        return str(selector.choose(4 * MB)), before, selector.table

    for winner, before, after in with_table(tmp_path, LARGE_TIMES, job):
        assert winner == "direct"
        assert before.at(4 * MB).winner == "ring"
        for name, slower in (("direct", 1.0), ("ring", 1.3)):
            usual = before.expected_s(4 * MB, name)
            assert after.expected_s(4 * MB, name) == pytest.approx(slower * usual, rel=0.05)


def test_what_is_tried_out_with_float32_does_not_concern_other_element_types(tmp_path):
    def job(selector, _):
        others = [code for code, name in enumerate(DTYPES) if name in ("float64", "bfloat16", "int32")]
        tried, meanwhile = set(), set()
        ring_s = selector.table.expected_s(4 * MB, "ring")
        while not selector.settled(4 * MB):
            choice = selector.choose(4 * MB)
            tried.add(str(choice))
            meanwhile |= {str(selector.choose(4 * MB, dtype)) for dtype in others}
            for dtype in others:  # it took half of the time, which is not heard
                called(selector, 4 * MB, ring_s / 2, dtype)
            called(selector, 4 * MB, ring_s if choice.algorithm == "ring" else 2 * ring_s)
        return tried, meanwhile, selector.table.at(4 * MB).winner

    for tried, meanwhile, winner in with_table(tmp_path, LARGE_TIMES, job):
        assert {"ring", "direct", NATIVE} <= tried
        assert meanwhile == {"ring"}
        assert winner == "ring"


def test_trials_are_paid_for_by_the_all_reduces_of_their_size_and_what_is_in_use_is_what_is_explained(tmp_path):
    def job(selector, _):
        ring_s, in_use = selector.table.expected_s(4 * MB, "ring"), []
        for _ in range(60):
            in_use.append(str(selector.choose(4 * MB)))
            if not selector.is_trial_due(4 * MB):
                assert f": {in_use[-1]}." in str(selector.explain(4 * MB))
            called(selector, 4 * MB, ring_s if in_use[-1] == "ring" else 2 * ring_s)
        return in_use, str(selector.explain(16 * MB)), selector.table.at(4 * MB), selector.version

    for in_use, other, rank, version in with_table(tmp_path, LARGE_TIMES, job):
        assert in_use[:5] == [NATIVE] * 5
        assert in_use[5] == "ring", "it is expected to be faster"
        assert "ring" in in_use[:30]
        assert set(in_use[30:]) <= {"ring", "direct"}
        assert (rank.winner, rank.turns, version) == ("ring", 0, 2), "in use, and others are still to be tried"
        assert "native: until another one is plainly faster" in other


def test_a_large_trial_is_rehearsed_and_has_the_links_for_itself(tmp_path):
    class Pending:
        def __init__(self, across):
            self.across = across

        def wait(self):
            self.across.pending.popleft()

    def job(selector, across):
        rehearsed = []
        across.rehearse = lambda elements, _, choice: rehearsed.append((elements, str(choice)))
        left = []
        for _ in range(6):
            across.pending.append(Pending(across))
            choice = selector.choose(4 * MB)
            is_trial = selector.begin_trial(MB, Reduction(int(DType.float32), ReduceOp.sum), choice)
            left.append((is_trial, len(across.pending)))
            across.pending.clear()
            selector.after(4 * MB, choice, 0.1)
        assert left == [(False, 1)] * 4 + [(True, 0)] * 2
        called(selector, KB, 1e-3)  # of small ones that would take longer than the trial
        return rehearsed

    choices = [NATIVE, "ring"]
    assert with_table(tmp_path, LARGE_TIMES, job) == [[(MB, choice) for choice in choices]] * 2


def test_a_small_all_reduce_that_is_kept_ready_makes_way_for_a_trial(tmp_path):
    def job(selector, _):
        at = selector.trial_at[selector.size_class(KB)]
        selector.calls[selector.size_class(KB)] = int(at) - 2
        before = selector.is_trial_due(KB)
        called(selector, KB, 1e-3)
        return before, selector.is_trial_due(KB), selector.is_trial_due(4 * MB)

    assert with_table(tmp_path, LARGE_TIMES, job) == [(False, True, False)] * 2


def test_how_large_messages_are_hangs_on_the_links_as_all_ranks_know_them(tmp_path):
    def job(across):
        selector = steady(across, {"RINGSIDE_CACHE_DIR": str(tmp_path)}, uniform(2, 1e-4, 1 / 30e6))
        return across.exchange.bytes_per_s, selector.probe.usual_rate

    assert on_threads(2, job) == [(pytest.approx(30e6), pytest.approx(30e6))] * 2


def test_switched_off_nothing_is_measured():
    def job(across):
        selector = started(across, {"RINGSIDE_SELECTION": "off"})
        selector.after(4 * MB, selector.choose(4 * MB), 1.0)
        assert across.exchange.bytes_per_s is None
        return selector

    for selector in on_threads(2, job):
        assert (selector.table, selector.probe) == (None, None)
        assert selector.choose(MB) == AlgorithmSpec("ring", "hosts")
        assert "RINGSIDE_SELECTION=off" in str(selector.explain(MB))


def test_dtypes_that_native_lacks_get_another_choice():
    def job(across):
        selector = Tuner(across, environ={})
        selector.use(table({}).encode())
        return selector

    selector = on_threads(2, job)[0]
    assert selector.choose(MB, DTYPES.index("float32")).algorithm == NATIVE
    for dtype in ("int16", "bool"):
        assert selector.choose(MB, DTYPES.index(dtype)).algorithm != NATIVE
    for op in ("min", "max"):
        assert selector.choose(MB, 0, OP_CODES[op]).algorithm != NATIVE
    assert selector.choose(MB, 0, OP_CODES["prod"]).algorithm == NATIVE


def test_on_long_links_large_tensors_of_all_types_begin_alike_and_a_revision_does_not_change_that():
    """Flows that meet at a receiver lose segments, from which all that shares their connections recovers late."""
    rows = tuple(TimingRow(name, 1.0, None, took_s, True) for name, took_s in (("direct", 1), ("ring", 2), (NATIVE, 3)))
    made = TimingTable({}, {}, (Rank(4, "direct", "", rows), Rank(MB, "direct", "", rows)))

    def job(across):
        across.exchange.window = 5
        selector = Tuner(across, environ={})
        chosen = []
        for revised in (False, True):
            selector.use(made.encode(), revised=revised)
            assert selector.explain(MB).choice == "ring"
            chosen += [str(selector.choose(MB, DTYPES.index(dtype))) for dtype in ("float32", "bfloat16", "bool")]
            chosen.append(str(selector.choose(MB, 0, OP_CODES["max"])))
        return chosen, str(selector.choose(4, DTYPES.index("bfloat16")))

    assert on_threads(2, job) == [(["ring"] * 8, "direct")] * 2


def test_without_native_the_fastest_of_ours_takes_its_place_hosts_or_not():
    def job(across):
        selector = Tuner(across, environ={})
        timings = {
            (NATIVE, MB): 0.03,
            ("hosts/native", MB): 0.01,
            ("hosts/ring", MB): 0.012,
            ("leaders/ring", MB): 0.02,
        }
        selector.use(table(timings, of=cluster(4, 2)).encode())
        return selector

    selector = on_threads(2, job)[0]
    assert selector.table.at(MB).winner == "hosts/native"
    assert selector.choose(MB) == AlgorithmSpec("ring", "hosts"), "which sends fewer bytes than the group's own"
    table_rows = [row.choice for row in selector.table.at(MB).rows if not row.choice.endswith(NATIVE)]
    assert str(selector.choose(MB, 0, OP_CODES["max"])) == table_rows[0]


def test_the_key_has_all_that_a_ranking_hangs_on():
    key = on_threads(2, lambda across: Tuner(across, {"torch": "2.13", "ringside": "0.1"}, environ={}).key)[0]
    assert {"torch", "ringside", "hosts", "message_bytes", "block_bytes", "window", "machine"} <= key.keys()
    assert all(type(value) is str for value in key.values())


def test_with_a_wire_dtype_all_reduces_are_timed_and_expected_that_way():
    wires = set()

    def job(across):
        prober = Prober(across, wire=WireCompression("bfloat16"))
        selector = Tuner(
            across, environ={"RINGSIDE_SELECTION": "fresh"}, wire=WireCompression("bfloat16"), prober=prober
        )
        inner = across.all_reduce

        def all_reduce(address, elements, what, choice):
            wires.add((DTYPES[what.dtype], what.wire))
            inner(address, elements, what, choice)

        across.all_reduce = all_reduce
        prober.time_once(AlgorithmSpec("ring"), np.zeros(1000, dtype=np.float32))
        shared = measure_cluster(prober, uniform(2, ALPHA, 1 / 118e6))
        selector.use(table({(NATIVE, MB): 0.02, ("ring", MB): 0.01}).encode())
        drifts = []
        for seconds, dtype in ((0.01, "float32"), (0.05, "float64"), (0.05, "float32")):
            for _ in range(12):
                selector.observe(MB, AlgorithmSpec("ring"), seconds, DTYPES.index(dtype))
            selector.due(MB)
            drifts.append(selector.vote())
        return shared.wire_share, drifts

    for share, drifts in on_threads(2, job):
        assert share == 0.5
        assert drifts == [False, False, True]  # of float64, which travels whole, what was timed says nothing
    assert ("float32", WireCompression("bfloat16")) in wires
    assert {wire for dtype, wire in wires if dtype != "float32"} == {None}


def test_drift_on_all_ranks_revises_and_on_one_does_not(tmp_path):
    environ = {"RINGSIDE_CACHE_DIR": str(tmp_path)}

    def job(across):
        selector = started(across, environ)
        size, rank = 4 * MB, across.rank_map.rank
        choice = selector.choose(size)
        usual = selector.table.expected_s(size, str(choice))
        for _ in range(12):
            selector.after(size, choice, usual)
        for _ in range(12):
            selector.after(size, choice, usual * (8 if rank == 0 else 1))  # one rank only: it waits for another
        alone = len(selector.history)
        for _ in range(8):
            selector.after(size, choice, usual * 8)
            if selector.history:
                break
        return alone, list(selector.history), selector.table.encode()

    results = on_threads(3, job)
    assert [alone for alone, _, _ in results] == [0, 0, 0]
    assert all(len(history) == 1 for _, history, _ in results)
    assert "times what they took" in results[0][1][0]
    assert len({data for _, _, data in results}) == 1


def test_the_first_revision_that_changes_nothing_pauses_and_what_was_kept_stays(tmp_path):
    path, links = tmp_path / "mine.json", uniform(2, 1e-4, 1 / 118e6)
    made = table({(NATIVE, size): 0.02 for size in (4096, 65536)} | {("ring", 4096): 0.01}, of=cluster(2))
    assert made.at(4096).winner == "ring"
    environ = {"RINGSIDE_SELECTION": str(path)}

    def job(across):
        if across.rank_map.rank == 0:  # who reads it
            key = Tuner(across, {"version": "test"}, environ={}).key
            path.write_bytes(TimingTable(key, made.topology, made.ranks).encode())
        selector = Tuner(across, {"version": "test"}, environ=environ, prober=NativeIsFast(across, links))
        selector.start()
        kept = selector.table

        def drifts(slower):
            choice = selector.choose(4 * MB)
            for _ in range(12):
                selector.observe(4 * MB, choice, slower * selector.table.expected_s(4 * MB, str(choice)))
            selector.due(4 * MB)
            return selector.vote()

        before = drifts(1.0), drifts(4.0)
        selector.revise("a test")
        return kept, selector.table, before, drifts(1.6 * 4.0)

    for kept, now, before, after in on_threads(2, job):
        assert kept.ranks == made.ranks
        assert [now.at(size).winner for size in (4, 1024, 4096, 16384)] == ["ring"] * 4
        assert now.at(4 * MB).winner == NATIVE
        assert before == (False, True)
        assert not after  # what it takes now is usual, and it is not asked again so soon
        assert now.timings()["ring", 4096] == pytest.approx(0.01)
        assert now.timings()[NATIVE, 4 * MB] == 0.02


@pytest.mark.thorough
@pytest.mark.noisy
@pytest.mark.skipif(bool(Lab.unavailable()), reason=Lab.unavailable() or "a lab can be had")
def test_a_mesh_link_cut_to_a_quarter_is_answered_within_twenty_collectives(tmp_path):
    script, go = Path(__file__).parent / "scripts" / "revising.py", tmp_path / "go"
    with Lab(hosts=4, rate="1gbit", wiring="mesh") as lab:

        def sink(place, stream, line):
            if line == "READY":
                lab.set_rate("250mbit", link=(0, 1))
                go.touch()

        result = lab.run(
            [zygote.python(), str(script), str(go)],
            {"RINGSIDE_CACHE_DIR": str(tmp_path), "RINGSIDE_SELECTION": "", "PYTHONUNBUFFERED": "1"},
            timeout_s=100,
            after_failure_s=5,
            sink=sink,
        ).check()
    (line,) = [line for line in result.ranks[0].stdout.splitlines() if line.startswith("REACTED")]
    words = line.split()
    assert int(words[1]) <= 20, line
    after, over_the_link, around_it = map(float, (words[3], *words[4:6]))
    assert around_it < over_the_link, line
    assert after - around_it < (over_the_link - around_it) / 2, line  # nearer to a ring that goes around the link
    assert "MB/s, others" in line
