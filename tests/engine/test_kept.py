"""What the engine decides before it moves a byte, held against what was kept: prices, tables, orders of messages."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from ringside.engine.algorithm import NATIVE, canonical_algorithms
from ringside.engine.cost.model import Cluster, price_choice, price_sizes
from ringside.engine.cost.network import CostNetwork
from ringside.engine.net.exchange.message_size import MessageSize, rounds_apart, size_of
from ringside.engine.net.exchange.ordering import find_order
from ringside.engine.net.exchange.pipeline import SegmentPlan, lay_out
from ringside.engine.net.exchange.plan import plan_messages
from ringside.engine.net.exchange.route import route_of
from ringside.engine.tuner.drift import Drift
from ringside.engine.tuner.explain import Explanation
from ringside.engine.tuner.table import LADDER, TimingTable, candidates, make_table, predicted_at, priced
from ringside.engine.tuner.timing import Race, best_at
from ringside.engine.tuner.trials import settled_rank, trials_for
from ringside.schedule import ALGORITHMS, Schedule, by_name, pipelined

pytestmark = pytest.mark.core
MB = 1 << 20


def uneven(hosts: int, seed: int, **more: float) -> CostNetwork:
    """Links that differ, one of them slow, and interfaces that carry little more than a link."""
    rng = np.random.default_rng(seed)
    per_byte = rng.uniform(0.8, 1.3, (hosts, hosts)) / 118e6
    per_byte[0, hosts - 1] *= 4
    latency = rng.uniform(0.8, 1.6, (hosts, hosts)) * 1e-4
    nics = rng.uniform(0.5, 1.1, (2, hosts)) / 118e6
    return CostNetwork(latency, per_byte, nics[0], nics[1], **more)


CLUSTERS = {
    "alone": Cluster(uneven(5, 1), tuple((host,) for host in range(5))),
    "pairs": Cluster(
        uneven(3, 2, reduce=2e-10, overhead_s=2e-5), ((0, 1), (2, 3), (4, 5)), 3e-5, 4e-10, machines=(0, 1, 1),
        cores=(2, 3, 3), wire_share=0.5,
    ),
    "mixed": Cluster(
        uneven(4, 3, overhead_s=8e-5), ((0, 3), (1,), (2, 4, 6), (5, 7)), 2e-5, 1e-9, (2e-5, 3e-10), 1 << 16, MB,
        cores=(1, 2, 2, 4),
    ),
}  # fmt: skip
OFF = 1 - np.eye(4)
NETWORKS = {
    "even": CostNetwork(1e-4 * OFF, 8e-9 * OFF, np.full(4, 6e-9), None, 1e-9, 1e-5),
    "uneven": uneven(4, 7, reduce=1e-9),
    "two": uneven(2, 8, reduce=1e-9, overhead_s=1e-5),
}
SIZES = (0, 4, 5000, 3 * MB // 2, 40 * MB)


def shown(price) -> list[object]:
    return [price.seconds, price.latency_s, None if price.link is None else list(price.link), price.link_s, price.why()]


def test_what_every_choice_costs(kept) -> None:
    kept(
        "choices",
        {
            name: {str(choice): [shown(price) for price in price_choice(choice, SIZES[1:], of)[::2]]
            for choice in candidates(of, tuple(range(of.between.size))[::-1])}
            for name, of in CLUSTERS.items()
        },
    )  # fmt: skip


def test_what_every_schedule_costs(kept) -> None:
    found = {}
    for name in ALGORITHMS:
        for cut in (1, 3):
            for on, network in NETWORKS.items():
                plain = by_name(name, network.size)
                schedule = pipelined(plain, cut) if cut > 1 else plain
                if not schedule.switches:
                    prices = price_sizes(schedule, SIZES, network, segment_bytes=100_000)
                    found[f"{name}*{cut} {on}"] = [shown(price) for price in prices]
    kept("schedules", found)


def timings(of: Cluster, seed: int, sizes: tuple[int, ...]) -> dict[tuple[str, int], float]:
    """What some choices took that are timed at a size: near their price, or up to twice as long."""
    rng, prices = np.random.default_rng(seed), priced(candidates(of), of)
    return {
        (name, size): predicted_at(size, prices[name]) * float(rng.uniform(0.9, 2.0))
        for size in sizes
        for name in best_at(prices, size)
    }


def decided(made: TimingTable) -> list[object]:
    """What a table says, without the rows of choices that are far behind."""
    return [
        [rank.size_bytes, rank.winner, rank.turns, rank.why]
        + [[row.choice, row.measured_s, row.expected_s, row.eligible] for row in rank.rows[:6]]
        for rank in made.ranks
    ]


def tables(name: str) -> tuple[TimingTable, TimingTable]:
    """Return a table, and what it becomes by new timings of one size on links that have changed."""
    of = CLUSTERS[name]
    took = timings(of, 11, (4096, 64 << 10, MB))
    first = make_table(priced(candidates(of), of), took, {}, of.between.to_topology())
    first = replace_turns(first, 5)
    slower = replace(of, between=uneven(of.between.size, 21, overhead_s=3e-5))
    took |= timings(slower, 12, (64 << 10,))
    return first, make_table(priced(candidates(slower), slower), took, {}, {}, before=first, fresh=[64 << 10])


def replace_turns(table: TimingTable, turns: int) -> TimingTable:
    return msgspec.structs.replace(
        table, ranks=tuple(msgspec.structs.replace(rank, turns=turns) for rank in table.ranks)
    )


def test_which_choice_is_taken_at_every_size_and_why(kept) -> None:
    found = {}
    for name in CLUSTERS:
        first, second = tables(name)
        asked = [1, 4, 3000, 100_000, 7 * MB, 200 * MB]
        found[name] = {
            "first": decided(first),
            "second": decided(second),
            "expected": [[first.expected_s(size, row.choice) for size in asked] for row in first.ranks[3].rows[:3]],
            "bounds": first.bounds(),
            "timed": [best_at(first.prices(), size) for size in LADDER],
            "words": str(Explanation.of(3000, first.at(3000), ("links were slow",))),
        }
    kept("tables", found)


def test_how_choices_take_turns(kept) -> None:
    found = {}
    for name in CLUSTERS:
        first = replace_turns(tables(name)[0], 0)
        for rank in (first.ranks[1], first.ranks[4], first.ranks[7]):
            for seed, gain in ((1, 1.0), (2, 0.9), (3, 0.5)):
                trials = trials_for(rank, pieces_from_bytes=2 * MB)
                if trials is None:
                    found[f"{name} {rank.size_bytes}"] = None
                    continue
                rng, called = np.random.default_rng(seed), []
                usual = {one: float(rng.uniform(1.0, 1.4)) for one in trials.names}
                usual[NATIVE] *= gain
                while not trials.over:
                    called.append(trials.names.index(trials.current))
                    trials.took(1e-3 * usual[trials.current] * float(rng.lognormal(0.0, 0.05)))
                    if trials.complete:
                        trials.judge(trials.times)
                settled = settled_rank(rank, trials)
                found[f"{name} {rank.size_bytes} {seed}"] = {
                    "names": trials.names,
                    "called": "".join(map(str, called)),
                    "result": trials.result(),
                    "turns": trials.turns,
                    "why": settled.why,
                    "best": [[row.choice, row.expected_s, row.eligible] for row in settled.rows[:4]],
                }
    kept("turns", found)


def test_when_all_reduces_are_heard_to_drift(kept) -> None:
    found = {}
    for seed in range(4):
        rng, drift = np.random.default_rng(seed), Drift([2048.0, 2.0 * MB])
        if seed == 3:
            drift.tried(4 * MB)
        levels = []
        for at in range(700):
            size = (1024, 4 * MB, 4 * MB, MB)[int(rng.integers(4))]
            slow = 2.2 if at % 180 > 150 else 1.4 if at % 45 > 36 else 0.7 if at > 600 else 1.0
            drift.observe(size, None if at % 37 == 0 else slow * float(rng.lognormal(0.0, 0.15)))
            if drift.due(size):
                levels.append([at, round(drift.level, 6), drift.bar])
                if drift.level > drift.bar:
                    drift.revised(changed=at % 3 == 0, cost=float(at % 5))
        found[f"{seed}"] = levels
    kept("drift", found)


def test_what_is_timed_again_in_a_race(kept) -> None:
    found = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        race = Race(4096, ["native", "ring", "direct", "tree"], frozenset({"native"}))
        for _ in range(3):
            took = np.full(4, -1.0)
            took[race.going] = rng.uniform(0.5, 1.6, len(race.going))
            race.took(took)
            found.append([race.going, race.cost_s(), list(race.medians().values())])
    kept("race", found)


def carried() -> dict[str, Schedule]:
    """Schedules of several kinds: on one flow, on shared links, in rounds that fill them, and cut."""
    names = ("ring", "two_tree", "halving_doubling", "direct")
    return {
        **{f"{name}({n})": by_name(name, n) for name in names for n in (4, 5)},
        "recursive_doubling(8)": by_name("recursive_doubling", 8),
        "tree*3(5)": pipelined(by_name("tree", 5), 3),
    }


def test_in_which_messages_a_tensor_travels(kept) -> None:
    large = MessageSize(512 << 10, 4)
    found = {}
    for name, schedule in carried().items():
        sizes = [size_of(schedule, size * MB, large, rate) for size in (1, 16, 64) for rate in (None, 30e6, 118e6, 1e9)]
        apart = [rounds_apart(schedule, (count,) * schedule.chunks) for count in (1, 2, 3, 4, 8)]
        order = find_order(schedule, tuple(3 + chunk % 2 for chunk in range(schedule.chunks)), 2)
        assert order is not None
        found[name] = {
            "sizes": [[size.segment_bytes, size.window, size.ahead, size.parts] for size in sizes],
            "apart": apart,
            "slots": order[1],
            "order": None if order[0] is None else [
                [[*receive.part, *receive.places] for receive in one.receives] for one in order[0][:2]
            ],
        }  # fmt: skip
    for name in ("two_tree", "halving_doubling", "direct", "tree", "parameter_server"):
        for n, segments, window in ((5, 2, 4), (6, 5, 2), (7, 3, 3)):
            schedule = by_name(name, n)
            order = find_order(schedule, tuple(segments + chunk % 2 for chunk in range(schedule.chunks)), window)
            assert order is not None
            first = [] if order[0] is None else [list(receive.part) for receive in order[0][n - 1].receives[:8]]
            found[f"{name}({n}) {segments} {window}"] = [order[1], first]
    every = [large, large.smaller(), large.smaller(8), MessageSize(60, 3, 2).smaller()]
    found["cut"] = [
        [size.places(ordered=True), size.places(ordered=False), size.place_bytes, size.small_place_bytes]
        + [size.messages_of(length, 100) for length in (0, 1, 99, 100, 149, 150, 151, 249, 250, 400)]
        for size in every
    ]
    kept("messages", found)


def test_what_each_vertex_does(kept) -> None:
    found = {}
    for name, schedule in carried().items():
        lengths = tuple(70_000 + 4_000 * chunk for chunk in range(schedule.chunks))
        plan = plan_messages(schedule, 1)
        routes = [route_of(plan, 1, lengths, 20_000, 3, ordered) for ordered in (True, False)]
        small = route_of(plan, 1, (40,) * schedule.chunks, 20_000, 3, True)
        layout = lay_out(plan, 64_001, 900, 9000, 2, 3)
        segments = SegmentPlan(layout, [1 + number % 3 for number in range(len(layout.pieces))], kept=(0,))
        found[name] = {
            "hash": plan.hash,
            "finals": sorted(plan.finals),
            "counts": routes[0].counts,
            "apart": [route.apart for route in routes],
            "sends": [[peer, [k for k, _ in messages]] for route in routes for peer, messages in route.sends],
            "carried": [[peer, messages] for peer, messages in small.sends],
            "bundled": [[one.number, dict(one.bundled)] for one in small.rounds],
            "receives": [list(segment) for one in routes[1].rounds[:3] for row in one.segments[:1] for segment in row],
            "pieces": [[piece.chunk, piece.begin, *piece.bounds] for piece in layout.pieces[:6]],
            "plan": [segments.fills, segments.ends, segments.left, segments.turn],
        }
    kept("routes", found)


def test_which_algorithms_add_in_rank_order(kept) -> None:
    kept("canonical", {n: canonical_algorithms(n) for n in (1, 2, 3, 4, 8, 16)})
