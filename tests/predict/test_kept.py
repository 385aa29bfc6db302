"""What is predicted for topologies of every kind, held against what was kept: each number, band, word and order."""

import dataclasses
import json

import numpy as np
import pytest
from tests.support.mangle import mangled

from ringside.engine.cost.network import CostNetwork
from ringside.errors import UsageError
from ringside.predict import (
    LinkClass,
    LinkOverride,
    Switch,
    Topology,
    closed_form,
    finish_seconds,
    from_probe,
    from_toml,
    preset,
    presets,
    prices,
    simulate,
)
from ringside.predict.laws.knowledge import Knowledge
from ringside.predict.laws.mpi import pairs_of
from ringside.predict.plan.memory import batch, fit, state
from ringside.predict.plan.options import TREES, collective, names, option, schedule_for
from ringside.predict.plan.plan import PlanQuestion, bounds, plan
from ringside.predict.score import _hockney, _nccl_constants, hold_out, larger_sizes, other_scale, preset_only, summary
from ringside.predict.tables import read_tables
from ringside.predict.tables.checks import check_rows
from ringside.predict.what_if import PredictedStep, StepChange, played, what_if
from ringside.schedule import COLLECTIVES, by_name, hierarchical, ring

from .event_simulation import finish_by_events
from .shared_tables import published
from .with_forms import WITH_FORMS
from .written_tables import LOG, ROWS, result
from .written_topologies import BOXES

pytestmark = pytest.mark.core
SIZES = (8.0, 65_536.0, 1e6, 3e8, 3e10)
TOPOLOGIES = {
    "h100_1": preset("dgx-h100", 1),
    "h100_2": preset("dgx-h100", 2),
    "h100_16": preset("dgx-h100", 16),
    "a100_3": preset("dgx-a100", 3),
    "b200_2": preset("dgx-b200", 2),
    "racks_4": preset("gb200-nvl72", 4, 16),
    "loopback": preset("loopback", 1, 6),
    "ethernet": preset("ethernet-10g", 8),
    "leaves": dataclasses.replace(preset("dgx-h100", 8), oversubscription=2.0, hosts_per_leaf=2),
    "a_rail_less": preset("dgx-h100", 4).without_rail(2),
    "slow_link": preset("dgx-a100", 2).with_slow_link(3, 9, 4.0),
    "mixed": Topology(
        "mixed", (4, 8, 4, 6), LinkClass("pcie", 2e-6, 2e10, 5e10), LinkClass("roce", 5e-6, 1e10), nics=4, rails="own",
        oversubscription=2.0, hosts_per_leaf=2, sharp=Switch(1e-5, 1e10), reduce_bytes_per_s=1e10, overhead_s=1e-6,
        overrides=(LinkOverride(3, 4, 1e-4, 1e8), LinkOverride(0, 3, None, 1e9, "hosts")),
    ),
}  # fmt: skip


def _refused(call, *args, **kwargs):
    """Return what a call returns, or why it is refused."""
    try:
        return call(*args, **kwargs)
    except UsageError as error:
        return f"refused: {error}"


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_way_and_what_bounds_it(kept, name):
    topology = TOPOLOGIES[name]
    ways = {}
    for way in ("auto", *names(topology)):
        one = _refused(option, topology, way)
        if isinstance(one, str):
            ways[way] = one
            continue
        told = one.predict(SIZES)
        ways[way] = {
            "times_s": told.times_s, "low_s": told.low_s, "high_s": told.high_s, "extrapolated": told.extrapolated,
            "why": [one.why_extrapolated(size) for size in SIZES], "basis": one.basis, "words": one.law.words,
            "sent": one.sent, "host_sent": one.host_sent, "rounds": one.rounds,
            "bounds": None if way in TREES else _refused(bounds, topology, way, 1e6),  # of a tree it takes seconds
        }  # fmt: skip
    for way in ("all_gather", "reduce_scatter"):
        one = collective(topology, way)
        ways[way] = {"high_s": one.predict(SIZES).high_s, "sent": one.sent, "beyond": one.beyond}
    constants = _nccl_constants(topology, SIZES)
    kept(f"ways_{name}", {"describe": topology.describe(), "ways": ways, "nccl_constants": constants})


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_schedule_priced_and_played(kept, name):
    topology, found = TOPOLOGIES[name], {}
    for way in (*names(topology), *COLLECTIVES):
        schedule = schedule_for(topology, way) if way not in COLLECTIVES else by_name(way, topology.ranks)
        timeline = simulate(schedule, topology, 1e6, late={1: 2e-5}, segments=2 if way == "tree" else 1)
        path = timeline.critical_path
        found[way] = {
            "prices_s": prices(schedule, topology, SIZES), "seconds": timeline.seconds, "busbw": timeline.busbw,
            "blamed": timeline.blamed, "shares": timeline.shares, "hops": len(path), "path": [*path[:2], *path[-2:]],
            "finish_s": np.sort(timeline.finish_seconds)[[0, -1]],
            "sent": [(len(sent.src), sent.size_bytes.sum(), sent.arrive_s.max()) for sent in timeline.sent(0, 3)],
            "describe": timeline.describe(),
        }  # fmt: skip
    kept(f"played_{name}", found)


QUESTIONS = {
    "h100": PlanQuestion(preset("dgx-h100", 4), 14e9, parameters=7e9, memory_bytes=80e9, compute_s=0.4, accumulated=2),
    "too_large": PlanQuestion(preset("dgx-h100", 4), 140e9, parameters=70e9, memory_bytes=80e9, compute_s=2.0),
    "ethernet": PlanQuestion(preset("ethernet-10g", 6), 1e8, compute_s=0.2, batch_per_rank=32, base_batch=64),
    "measured": PlanQuestion(preset("dgx-a100", 2), 2e9, measured=((25e6, 4e-4), (1e8, 1e-3)), compute_s=0.1, ran=20),
    "ring": PlanQuestion(preset("dgx-h100", 3), 1e9, algorithm="ring"),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_plans(kept, name):
    found = plan(QUESTIONS[name])
    told = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    del told["question"]
    told["ranking"] = {
        size: [(one.algorithm, *one.seconds.ends) for one in ways] for size, ways in found.ranking.items()
    }
    kept(f"plan_{name}", told)


OWN = 0.1 * np.exp(np.random.default_rng(3).normal(0, 0.02, (20, 32)))
H100 = preset("dgx-h100", 4)
STEPS = {
    "described": PredictedStep(H100, 1e9, np.full((1, 32), 0.2), buckets=10),
    "recorded": PredictedStep(
        H100, 1e9, OWN, buckets=40, exposed_s=np.linspace(0.01, 0.03, 20), measured=((25e6, 6e-4),)
    ),
    "unknown": PredictedStep(preset("ethernet-10g", 6), 1e8, np.zeros((1, 6)), algorithm="ring"),
}
CHANGES = {
    "slower": StepChange(slower={3: 0.12}),
    "repaired": StepChange(repaired=(0, 5)),
    "slow_link": StepChange(slow_links=((1, 2, 4.0),)),
    "rail": StepChange(lost_rails=(1, 2)),
    "leaves": StepChange(oversubscription=2.0),
    "sharp": StepChange(sharp=True),
    "buckets": StepChange(bucket_bytes=5e7),
    "hosts": StepChange(hosts=8),
    "fewer": StepChange(hosts=1),
    "tree": StepChange(algorithm="tree"),
}


@pytest.mark.parametrize("name", STEPS)
def test_changes(kept, name):
    found = {}
    for what, change in CHANGES.items():
        answer = _refused(what_if, STEPS[name], change)
        if isinstance(answer, str):
            found[what] = answer
            continue
        timeline = played(answer.after)
        found[what] = {
            "delta": answer.delta, "work_delta": answer.work_delta, "left": answer.left, "why": answer.extrapolated,
            "steps": answer.steps, "day": answer.rank_hours_per_day, "buckets": answer.after.buckets,
            "topology": answer.after.topology.describe(), "blamed": timeline and timeline.blamed,
        }  # fmt: skip
    kept(f"what_if_{name}", found)


def test_presets(kept):
    kept("presets", {name: dataclasses.replace(preset(name), sources={}) for name in presets()})


# ------------------------------------------------------------------------------------------------ published tables


def _tables():
    return [table for path in sorted(published().glob("*.csv")) for table in _read(path)]


def _described(topology):
    return topology and [topology.describe(), topology.inside, topology.between, topology.ranks_per_host]


def _read(path):
    found = _refused(read_tables, path)
    return [] if isinstance(found, str) else found


def test_what_tables_say_and_which_of_their_rows_are_doubted(kept):
    found = []
    for table in _tables():
        done, known = check_rows(table), Knowledge()
        law = known.law(done)
        found.append(
            (table.name, table.cluster, table.algorithm, table.collective, done.ranks, done.hosts, len(done.rows),
             sum(row.time_s for row in done.rows), len(done.flags),
             [(flag.line, flag.reason) for flag in done.flags[:2]], law and [law.words, law.mean],
             _described(known.topology(done)))
        )  # fmt: skip
    kept("tables", found)


OSU = """\
mpirun -np 144 -N 4 osu_allreduce -f
# OSU MPI Allreduce Latency Test v7.0
# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations
4                      11.69             10.10             13.20        1000
8                      15.34             14.00             17.50        1000
16                     16.10             15.50             18.00        1000
# OSU MPI Bandwidth Test v7.0
# Size      Bandwidth (MB/s)
1024        2000.00
4096        4000.00
"""
CSV = """\
cluster,nodes,gpus,algo,size_bytes,time_us,algbw_GBps,busbw_GBps
a100 8x200G,2,16,auto,1024,10,0.10,0.18
a100 8x200G,2,16,auto,2048,11,0.19,0.33
"h100, ndr",4,32,ring,1048576,60,17.48,33.86
"h100, ndr",4,32,ring,4M,150,27.96,54.18
"""
POINTS = (
    "system;hosts;Size (B);latency (us);min (us);max (us)\nx;2;1K;5.0;4.5;7.0\nx;2;4K;6.0;5.5;8.0\ny;4;4K;6.0;5.5;8.0\n"
)
JSON = json.dumps(
    {
        "config": {"devices": [{"hostname": host, "device_info": "NVIDIA H100"} for host in "aabb"]},
        "results": [result(1 << 20, 50.0), result(4 << 20, 100.0, in_place={"time": 99.0, "alg_bw": 42.4})],
    },
    indent=1,
)  # fmt: skip
FORMS = {
    "nccl": LOG + ROWS,
    "old": "# all_gather_perf\n"
    + LOG
    + "  1048576  65536  float  50.00  20.97  15.73  0e+00  49.00  21.40  16.05  0e+00\n" * 2,
    "osu": OSU,
    "csv": CSV,
    "points": POINTS,
    "json": JSON,
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_read_of_tables_that_were_cut_wrapped_and_edited(kept, tmp_path, form):
    random, found = np.random.default_rng(6), []
    for number in range(60):
        text = FORMS[form] if number == 0 else mangled(FORMS[form], random)
        path = tmp_path / f"{form}.{'csv' if form in ('csv', 'points') else 'json' if form == 'json' else 'log'}"
        path.write_text(text)
        tables = _refused(read_tables, path)
        if isinstance(tables, str):
            found.append(tables.replace(str(tmp_path), ""))
            continue
        found.append([
            [table.collective, table.cluster, table.algorithm, table.ranks, table.hosts,
             [[row.line, row.size_bytes, row.time_s, row.low_s, row.high_s,
               *(one and (one.value, one.half_digit) for one in (row.algbw, row.busbw))] for row in table.rows],
             [(flag.line, flag.reason[:40]) for flag in table.flags], [flag.line for flag in check_rows(table).flags]]
            for table in tables
        ])  # fmt: skip
    kept(f"forms_{form}", found)


def test_what_is_read_of_topologies_that_were_edited(kept):
    random, found = np.random.default_rng(9), []
    network = CostNetwork(
        np.array([[0, 2e-5, 3e-5], [2e-5, 0, 4e-5], [3e-5, 4e-5, 0]]),
        np.array([[0, 1e-8, 1e-8], [1e-8, 0, 4e-8], [1e-8, 2e-8, 0]]),
        np.array([1e-8, 1e-8, 2e-8]), np.array([1e-8, 1e-8, 2e-8]), reduce=1e-10, overhead_s=1e-6,
    )  # fmt: skip
    probed = json.dumps(network.to_topology(["a", "b", "c"], [2, 1, 1], "measured"), indent=1)
    for number in range(150):
        boxes, text = mangled(BOXES, random), mangled(probed, random)
        told = [_refused(from_toml, boxes, "boxes"), _refused(_probe, text)]
        found.append([one if isinstance(one, str) or number % 10 == 0 else one.describe() for one in told])
    kept("edited", found)


def _probe(text):
    try:
        return from_probe(json.loads(text), "probe")
    except ValueError:
        return "no JSON"


ODD = (-1, 0, 1, 2, 3, 4, 0.999, 1e-300, 1e18, 1.1e18, float("inf"), float("nan"))


def test_what_cannot_be_is_refused_and_what_can_is_not(kept):
    """Every number that is asked for, at its bounds and beside them."""
    found = {}
    h100, flat = preset("dgx-h100", 2, 2), TOPOLOGIES["ethernet"]
    calls = {
        "nics": lambda odd: dataclasses.replace(h100, nics=odd),
        "hosts_per_leaf": lambda odd: dataclasses.replace(h100, hosts_per_leaf=odd),
        "oversubscription": lambda odd: dataclasses.replace(h100, oversubscription=odd),
        "overhead_s": lambda odd: dataclasses.replace(h100, overhead_s=odd),
        "reduce": lambda odd: dataclasses.replace(h100, reduce_bytes_per_s=odd),
        "host_rates": lambda odd: dataclasses.replace(h100, host_rates=((1e9, 1e9), (1e9, odd))),
        "alpha": lambda odd: LinkClass("roce", odd, 1e9),
        "rate": lambda odd: LinkClass("roce", 0.0, odd),
        "host_rate": lambda odd: LinkClass("roce", 0.0, 1e9, odd),
        "switch": lambda odd: (Switch(odd, 1e9), Switch(0.0, odd)),
        "override": lambda odd: dataclasses.replace(h100, overrides=(LinkOverride(0, odd, None, 1e9),)),
        "override_rate": lambda odd: dataclasses.replace(h100, overrides=(LinkOverride(0, 1, odd, odd),)),
        "sized": lambda odd: h100.sized(odd),
        "slow_link": lambda odd: h100.with_slow_link(0, 1, odd),
        "slow_link_to": lambda odd: h100.with_slow_link(0, odd, 2.0),
        "without_rail": lambda odd: h100.without_rail(odd),
        "parameters": lambda odd: fit(odd, 8, 80e9),
        "memory": lambda odd: fit(1e9, 8, odd),
        "stage": lambda odd: state(1e9, 8, odd),
        "sharers": lambda odd: state(1e9, odd, 3),
        "batch": lambda odd: batch(odd),
        "per_rank": lambda odd: batch(4, odd),
        "accumulated": lambda odd: batch(4, 1, odd),
        "base": lambda odd: batch(4, 1, 1, odd),
        "size": lambda odd: simulate(by_name("ring", 8), flat, odd).seconds,
        "late": lambda odd: simulate(by_name("ring", 8), flat, 8, late={1: odd}).seconds,
        "late_rank": lambda odd: simulate(by_name("ring", 8), flat, 8, late={odd: 1.0}).seconds,
        "gradients": lambda odd: plan(PlanQuestion(preset("ethernet-10g", 2), odd, algorithm="ring")).rounds,
        "buckets": lambda odd: what_if(STEPS["unknown"], StepChange(bucket_bytes=odd)).after.buckets,
        "slower": lambda odd: what_if(STEPS["described"], StepChange(slower={0: odd})).delta.value,
        "slower_rank": lambda odd: what_if(STEPS["described"], StepChange(slower={odd: 0.5})).delta.value,
        "repaired": lambda odd: what_if(STEPS["recorded"], StepChange(repaired=(odd,))).delta.value,
    }
    for name, call in calls.items():
        found[name] = []
        for odd in ODD:
            if isinstance(odd, int) or name not in WHOLE:
                told = _refused(call, odd)
                found[name].append([odd, told if isinstance(told, str | int | float) else "taken"])
    kept("bounds", found)


WHOLE = {
    "nics", "hosts_per_leaf", "override", "sized", "slow_link_to", "without_rail", "stage", "sharers", "batch",
    "per_rank", "accumulated", "base", "late_rank", "slower_rank", "repaired",
}  # fmt: skip


def test_what_would_take_minutes_is_refused():
    ranks = (1 << 17) + 1
    with pytest.raises(UsageError, match="take minutes to simulate"):
        simulate(ring(ranks), preset("ethernet-10g", ranks), 1e6)


# ------------------------------------------------------------------------------------------------ closed forms

SHAPES = ((1, 2), (1, 5), (1, 8), (2, 1), (4, 1), (5, 1), (8, 1), (2, 2), (2, 4), (3, 3), (4, 2), (2, 8), (3, 5))


def test_closed_forms_are_the_simulation_on_even_topologies_of_every_shape(kept):
    random, forms = np.random.default_rng(8), []
    for hosts, local in SHAPES:
        for rails, nics in (("pooled", 1), ("pooled", 3), ("own", 1), ("own", 2), ("own", 4)):
            rates = 10.0 ** random.uniform(8, 11, 6)
            topology = Topology(
                "even", (local,) * hosts, LinkClass("nvlink", 2e-6, rates[0], rates[1] if nics == 1 else None),
                LinkClass("roce", 7e-6, rates[2]), nics=nics, rails=rails, hosts_per_leaf=int(random.integers(1, 3)),
                oversubscription=float(random.choice([1.0, 2.5])), nvls=Switch(3e-6, rates[3]),
                sharp=Switch(9e-6, rates[4]),
                reduce_bytes_per_s=rates[5] if nics != 3 else None, overhead_s=1e-6 if nics < 3 else 0.0,
            )  # fmt: skip
            every = [by_name(name, topology.ranks) for name in random.choice(WITH_FORMS, 4, replace=False)]
            if local > 1 and hosts > 1:
                outer = str(random.choice(["ring", "direct", "tree", "recursive_doubling"]))
                every.append(hierarchical(local, hosts, outer=lambda n, outer=outer: by_name(outer, n)))
            for schedule in every:
                found = closed_form(schedule, topology, [10.0, 1e6])
                forms.append(found is not None)
                if schedule.ranks <= 8:
                    events = finish_by_events(schedule, topology, 1e6, {1: 1e-5})
                    timeline = simulate(schedule, topology, 1e6, late={1: 1e-5})
                    assert timeline.finish_seconds == pytest.approx(events, rel=1e-9), (schedule.name, topology)
                if found is not None:
                    simulated = finish_seconds(schedule, topology, [10.0, 1e6]).max(axis=1)
                    assert found == pytest.approx(simulated, rel=1e-9), (schedule.name, topology)
    kept("forms", "".join("-+"[one] for one in forms))


SCORED = ("h100_2n4g", "mleng_a100_1n8g", "mi300x_2n16g", "issue309_aion_h100_4n32g", "dgxh100_2n16g_pathology")


def test_scores(kept):
    known, scores = Knowledge(), []
    for name in SCORED:
        for table in map(check_rows, read_tables(published(f"{name}.csv"))):
            scores += [hold_out(table, known), larger_sizes(table, known, 1 << 22), preset_only(table, known)]
    (fitted,), (tested,) = (read_tables(published(f"issue309_aion_h100_{n}.csv")) for n in ("2n16g", "4n32g"))
    scores.append(other_scale([check_rows(fitted)], check_rows(tested), known))
    told = [
        (one.table.name, one.mode, one.words, one.fitted, len(one.scored), one.errors, one.baselines, one.refused,
         one.band_coverage, one.full_sweep, one.prediction and one.prediction.high_s[::6])
        for one in scores
    ]  # fmt: skip
    kept("scores", {"scores": told, "summary": summary(scores)})


def test_clusters_of_processes(kept):
    names = ("cpu_32nodes", "cpu_64nodes", "p2p_latency_32nodes", "p2p_latency_64nodes", "p2p_bw_32nodes")
    tables = [check_rows(table) for name in names for table in read_tables(published(f"osu_{name}.csv"))]
    pairs = pairs_of(tables)
    scores = [preset_only(one, Knowledge(pairs=tuple(pairs))) for one in tables if one.collective == "all_reduce"]
    told = [(one.table.name, one.words, one.errors, one.refused, one.prediction and one.prediction.high_s[::5])
            for one in scores]  # fmt: skip
    kept("processes", {"pairs": pairs, "scores": told})


def test_a_line_through_rows(kept):
    sizes = 2.0 ** np.arange(3, 30, 3)
    times = 1e-5 + sizes / 7e9 * (1 + 0.3 * np.sin(np.arange(9)))
    kept("hockney", [_hockney(sizes, times, sizes), _hockney(sizes, times[::-1], sizes)])
