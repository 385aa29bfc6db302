"""The predictor's answers in words: each sentence by hand, and whole answers as they were kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.support.kept import Kept

from ringside.predict import Timeline, preset, simulate
from ringside.predict.laws.calibrate import Band
from ringside.predict.plan.memory import fit
from ringside.predict.plan.plan import Bound, PlanQuestion, plan
from ringside.predict.plan.step import Job, StepTime
from ringside.predict.what_if import Answer, Exposed, PredictedStep, StepChange, played, what_if
from ringside.schedule import hierarchical, ring
from ringside.view.predict_text import (
    WIDTH,
    Rates,
    absolute,
    answer_lines,
    bound_text,
    change_text,
    costs_per_day,
    difference_text,
    fit_text,
    full_plan,
    hardware,
    parameter_count,
    part_text,
    played_algorithm,
    short_plan,
    simulation_text,
    step_text,
    wrapped,
)

H100 = preset("dgx-h100", 2, 4)


def test_a_line_is_broken_after_eighty_columns() -> None:
    fits = "word " * 15 + "words"
    assert (len(fits), wrapped(fits)) == (WIDTH, [fits])
    assert wrapped(fits + "!") == ["word " * 14 + "word", "    words!"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (StepChange(), "nothing changed"),
        (StepChange(slower={3: 0.12, 4: 0.0, 5: -0.031}),
         "rank 3 were 12.0% slower, rank 4 were 0.0% slower, rank 5 were 3.1% faster"),
        (StepChange(repaired=(1,)), "rank 1 were as fast as the others"),
        (StepChange(slow_links=((0, 4, 2.0),)), "link 0 → 4 were 2.00 × slower"),
        (StepChange(lost_rails=(0, 1)), "host 0 had one rail less, host 1 had one rail less"),
        (StepChange(oversubscription=2.5, sharp=True),
         "the network were oversubscribed 2.50:1, switches reduced (SHARP)"),
        (StepChange(bucket_bytes=5e7), "buckets were 50 MB"),
        (StepChange(hosts=1), "there was one host"),
        (StepChange(hosts=2, algorithm="ring"), "there were 2 hosts, the algorithm were ring"),
    ],
)  # fmt: skip
def test_a_change_in_words(change: StepChange, words: str) -> None:
    assert change_text(change) == words


def test_parameters_parts_and_what_a_time_follows() -> None:
    counts = (70e9, 1e12, 999e9, 1e9, 1e6, 350e6, 1e3, 999.0, 124_439_808.0)
    assert [parameter_count(count) for count in counts] == [
        "70B", "1T", "999B", "1B", "1M", "350M", "1k", "999", "124.4M",
    ]  # fmt: skip
    assert [part_text(name) for name in ("alpha_nvswitch", "wire_infiniband_ndr", "late", "sum")] == [
        "latency of nvswitch", "transfer over infiniband ndr", "late ranks", "sum",
    ]  # fmt: skip
    bounds = (
        Bound("bandwidth", "inside", "nvlink", 0.4),
        Bound("latency", "switch", "sharp", 0.25),
        Bound("work", "", "", 0.1),
    )
    assert [bound_text(bound) for bound in bounds] == [
        "bandwidth of nvlink inside hosts 40%",
        "latency of the switch that reduces (sharp) 25%",
        "work beside links 10%",
    ]


def test_hardware_names_the_links_that_are_used() -> None:
    one, both = preset("dgx-h100", 1), preset("dgx-h100", 2)
    assert one.inside is not None
    assert both.between is not None
    inside, between = one.inside.kind, both.between.kind
    alone = preset("dgx-h100", 2, 1)
    assert hardware(one).endswith(f": 1 × 8 ranks, {inside}")
    assert hardware(both).endswith(f": 2 × 8 ranks, {inside} and {between}")
    assert hardware(alone).endswith(f": 2 × 1 ranks, {between}")
    assert hardware(replace(both, ranks_per_host=(8, 4))).startswith("dgx-h100: 2 × 4-8 ranks, ")


def test_whether_it_fits() -> None:
    plain = fit(7e9, 8, 80e9)
    assert fit_text(plain) == "does not fit with plain data parallelism: 112 GB > 80 GB per rank"
    assert fit_text(fit(7e9, 8, 120e9)) == "fits with plain data parallelism: 112 GB of 120 GB per rank"
    assert fit_text(fit(7e9, 8, None)) == "whether it fits is not known without --memory: 112 GB per rank"


def answer(delta: Band, work_s: float = 0.1) -> Answer:
    step = PredictedStep(H100, 1e9, np.full((1, 8), work_s), 4)
    left = Exposed(Band(0.01, 0.01, 0.01), None, "")
    return Answer(step, step, delta, Band(0, 0, 0), (left, left), ())


@pytest.mark.parametrize(
    ("delta", "words"),
    [
        (Band(0.03, 0.0281, 0.033), "takes 30.0 ms longer (28.1 to 33.0)"),
        (Band(-0.03, -0.033, -0.0281), "takes 30.0 ms less (28.1 to 33.0)"),
        (Band(0.01, -0.02, 0.03), "takes 10.0 ms longer (20.0 ms less to 30.0 ms longer)"),
        (Band(-0.01, -0.02, 0.03), "takes 10.0 ms less (20.0 ms less to 30.0 ms longer)"),
        (Band(0.01, 0.0, 0.03), "takes 10 ms longer (0 s to 30 ms)"),
        (Band(-0.01, -0.03, 0.0), "takes 10 ms less (0 s to 30 ms)"),
        (Band(0.0, 0.0, 0.0), "takes 0 s longer (input)"),
    ],
)
def test_a_difference_is_more_or_less(delta: Band, words: str) -> None:
    assert difference_text(answer(delta)) == f"a step {words}"
    assert difference_text(answer(delta, 0.0)) == f"the synchronisation {words}"


def test_a_difference_costs_what_its_rank_hours_do() -> None:
    assert absolute(Band(-2.0, -3.0, -1.0)) == Band(2.0, 1.0, 3.0)
    assert absolute(Band(2.0, 1.0, 3.0)) == Band(2.0, 1.0, 3.0)
    hours = Band(10.0, 8.0, 12.0)
    assert list(costs_per_day(hours, Rates())) == []
    (money,), (energy,) = costs_per_day(hours, Rates(price=2.0)), costs_per_day(hours, Rates(watts=700.0))
    assert (*money[:2], money[2](1234.0), money[3]) == (
        "cost per day", Band(20.0, 16.0, 24.0), "1230", "2.00 per rank-hour",
    )  # fmt: skip
    assert (*energy[:2], energy[2](7.0), energy[3]) == (
        "energy per day", Band(7.0, pytest.approx(5.6), pytest.approx(8.4)), "7.00 kWh", "700 W per rank",
    )  # fmt: skip
    assert len(list(costs_per_day(hours, Rates(0.0, 0.0)))) == 2, "what is free has a price"


def test_what_was_played_and_how_sure_that_is() -> None:
    timeline = simulate(ring(8), H100, 64e6)
    assert played_algorithm(timeline) == "ring"
    assert simulation_text(timeline).startswith("exact for these figures; on clusters like it about ")
    step = PredictedStep(preset("dgx-h100", 2), 1e9, np.full((1, 16), 0.2), 40)
    reduced = played(what_if(step, StepChange(sharp=True)).after)
    assert isinstance(reduced, Timeline)
    assert played_algorithm(reduced).endswith(" through a switch")
    assert played_algorithm(simulate(hierarchical(4, 2), H100, 64e6)) == "hierarchical"


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (Job(), "data parallel"),
        (Job(stage=2), "ZeRO stage 2"),
        (Job(stage=3, layers=8, prefetch=2), "FSDP, 8 layers, 2 ahead"),
        (
            Job(stage=3, layers=1, reshard=False, tensor=2, activation_bytes=1e6),
            "FSDP, 1 layer, 1 ahead, kept, tensor 2",
        ),
    ],
)
def test_how_a_step_is_trained(job: Job, words: str) -> None:
    known = Band(0.25, 0.25, 0.25)
    assert step_text(StepTime(known, known, known, known, 8, job, "")).endswith(f" communication: {words}")


QUESTIONS = {
    "a model that fits no rank": PlanQuestion(H100, 1.4e10, parameters=7e9, memory_bytes=80e9, compute_s=0.2),
    "a model that fits, and its run": PlanQuestion(
        preset("dgx-h100", 4), 1e9, parameters=5e8, memory_bytes=80e9, compute_s=0.2, batch_per_rank=4, accumulated=2,
        base_batch=32, ran=40,
    ),
    "a model too large for all of them": PlanQuestion(preset("dgx-h100", 2), 2e12, parameters=1e12, memory_bytes=80e9),
    "a size on many hosts": PlanQuestion(preset("dgx-h100", 64, 8), 14e9),
    "a size on one host": PlanQuestion(preset("dgx-a100", 1), 65536.0, algorithm="ring"),
    "a network without hosts": PlanQuestion(preset("ethernet-10g", 8), 4.0, parameters=2.0),
}  # fmt: skip


@pytest.mark.core
def test_whole_plans(kept: Kept) -> None:
    found = {name: plan(question) for name, question in QUESTIONS.items()}
    kept("plans_in_words", {name: {"short": short_plan(one), "full": full_plan(one)} for name, one in found.items()})


@pytest.mark.core
def test_whole_answers(kept: Kept) -> None:
    step = PredictedStep(H100, 1e9, np.full((1, 8), 0.2), 40)
    unknown = replace(step, own_s=np.zeros((1, 8)), buckets=1)
    own = 0.2 + 0.01 * (np.arange(24.0).reshape(3, 8) * 5 % 7)
    recorded = replace(step, own_s=own, exposed_s=np.array([0.01, 0.02, 0.03]))
    asked = {
        "a slow rank": (step, StepChange(slower={3: 0.1}), Rates(2.0, 700.0)),
        "a slow link and more hosts": (step, StepChange(slow_links=((0, 4, 2.0),), hosts=4), Rates()),
        "work unknown": (unknown, StepChange(oversubscription=2.0), Rates(2.0)),
        "a rank repaired": (recorded, StepChange(repaired=(3,)), Rates(watts=700.0)),
        "too many ranks to play": (
            replace(step, topology=preset("dgx-h100", 2048), own_s=np.full((1, 16384), 0.2)),
            StepChange(bucket_bytes=5e7), Rates(),
        ),
    }  # fmt: skip
    found = {}
    for name, (before, change, rates) in asked.items():
        answered = what_if(before, change)
        found[name] = answer_lines(answered, change, played(answered.after), rates)
        assert max(map(len, found[name])) <= WIDTH
    kept("answers_in_words", found)
