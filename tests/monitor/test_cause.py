"""Which cause is told from what: one slow rank among healthy ones, with the vitals that real machines would show."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ringside.monitor import RunInfo, StepRecord, Verdict
from ringside.monitor.causes import (
    AS_MUCH_CPU,
    DESCHEDULED,
    LEAST,
    NOISE,
    RUNNING,
    SIGN_EVIDENCE,
    UNEXPLAINED,
    Measurement,
    explain_verdict,
)
from ringside.monitor.run.directory import RunWriter
from ringside.monitor.run.records import Vitals
from ringside.monitor.run.table import StepTable, tabulate
from ringside.monitor.slow_rank.detector import detect
from ringside.monitor.slow_rank.watcher import SlowRankWatcher
from ringside.monitor.summary import finish_run
from ringside.view.html.run_report import render_report

STEPS, ONSET, RANKS, CULPRIT = 120, 60, 4, 2
HEALTHY_S, SLOW_S = 0.1, 0.14

OWN = ("ran_seconds", "waited_seconds", "throttled_seconds")

Known = dict[str, Any]
Of = Callable[[int, bool], Known]
"""From a rank, and whether the culprit is slow already, to its vitals as shares of the time."""


def vitals(seconds: float, own: float, known: Known) -> Vitals:
    """Vitals from shares.

    Args:
        seconds: What they cover.
        own: The share of it that is own time: only then a rank runs, or is kept from running.
        known: By field: seconds and counts per second of the time they happen in; the rest as it is.
    """
    scaled = dict(known)
    for name, value in known.items():
        if name.endswith("_seconds") or name in ("major_faults", "swapped_in_pages"):
            scaled[name] = value * seconds * (own if name in OWN else 1.0)
    counts = {name: round(scaled[name]) for name in ("major_faults", "swapped_in_pages") if name in scaled}
    return Vitals(seconds=seconds, **{**scaled, **counts})


@cache
def job_times(onset: int) -> np.ndarray:
    """Own times of a job whose culprit becomes slow, [steps, ranks]."""
    own: np.ndarray = HEALTHY_S * np.random.default_rng(7).normal(1.0, 0.01, (STEPS, RANKS))
    own[onset:, CULPRIT] *= SLOW_S / HEALTHY_S
    return own


@cache
def found(onset: int) -> Verdict:
    (verdict,) = detect(job_times(onset))
    assert verdict.ranks == [CULPRIT]
    return verdict


def records(of: Of | None, *, onset: int = ONSET, ran: float | None = None, data: float = 0.0) -> list[StepRecord]:
    """A job whose culprit becomes slow; every third record of a rank carries vitals.

    Args:
        of: The vitals.
        onset: First slow step.
        ran: The share of its slow steps in which the culprit ran; by default all of its own time.
        data: The share of its extra time that it spends fetching its input.
    """
    made = []
    for step, own in enumerate(job_times(onset)):
        slow = step >= onset
        whole = float(own.max()) + 0.001
        for rank in range(RANKS):
            mine = slow and rank == CULPRIT
            extra = (SLOW_S - HEALTHY_S) * data if mine else 0.0
            made.append(
                StepRecord(
                    step=step,
                    rank=rank,
                    ended_unix=float(step),
                    step_seconds=whole,
                    own_seconds=float(own[rank]),
                    exposed_seconds=whole - float(own[rank]),
                    data_seconds=0.002 + extra,
                    forward_seconds=(float(own[rank]) - extra) / 3,
                    backward_seconds=(float(own[rank]) - extra) / 1.6,
                    cpu_seconds=ran * whole if mine and ran is not None else float(own[rank]),
                    vitals=vitals(3 * whole, float(own[rank]) / whole, of(rank, slow))
                    if of is not None and (step + rank) % 3 == 0
                    else None,
                )
            )
    return made


def verdict_on(made: list[StepRecord], onset: int = ONSET) -> Verdict:
    table, verdict = tabulate(made, RANKS), found(onset)
    return explain_verdict(verdict, table.between(verdict.since_step), table.before(verdict.since_step))


def only_culprit(now: Known, usual: Known) -> Of:
    """Everybody shows `usual`, the culprit `now` once it is slow."""
    return lambda rank, slow: {**usual, **now} if slow and rank == CULPRIT else usual


QUIET: Known = {"cpus": 8, "cpu_seconds": 0.7, "ran_seconds": 0.98, "waited_seconds": 0.002, "steal_ratio": 0.0,
                "major_faults": 0, "memory_stalled_seconds": 0.0}  # fmt: skip
BUSY_GPU: Known = {"gpu_clock_mhz": 1755.0, "gpu_max_clock_mhz": 1980.0, "gpu_celsius": 66.0, "gpu_reasons": 0x4,
                   "gpu_watts": 690.0, "gpu_cap_watts": 700.0}  # fmt: skip

CAUSES = {
    "quota": (
        {"throttled_seconds": 0.38, "waited_seconds": 0.38, "ran_seconds": 0.6, "quota_cpus": 1.5},
        QUIET,
        "its container was throttled 38% of its own time (cpu.stat), quota 1.5 CPUs",
        "cpu.max",
        {"throttled_ratio": 0.38, "quota_cpus": 1.5, "others_throttled_ratio": 0.0},
    ),
    "quota of one": (
        {"throttled_seconds": 0.38, "waited_seconds": 0.002, "ran_seconds": 0.6, "quota_cpus": 1.0},
        QUIET,
        "quota 1 CPU;",
        "cpu.max",
        {"throttled_ratio": 0.38},
    ),
    "a quota and a neighbour, neither of which explains it alone": (
        {"throttled_seconds": 0.08, "waited_seconds": 0.15, "ran_seconds": 0.85, "quota_cpus": 1.5},
        QUIET,
        "its container was throttled 8.0% of its own time (cpu.stat), quota 1.5 CPUs; another process took its core: "
        "ready to run but waiting 7.0% of its own time",
        "cpu.max",
        {"throttled_ratio": 0.08, "waited_for_cpu_ratio": 0.07},
    ),
    "neighbour": (
        {"waited_seconds": 0.31, "ran_seconds": 0.69},
        QUIET,
        "another process took its core: ready to run but waiting 31% of its own time",
        "pin the rank",
        {"waited_for_cpu_ratio": 0.31, "usual_waited_for_cpu_ratio": 0.002, "others_waited_for_cpu_ratio": 0.002},
    ),
    "crowd": (
        {"waited_seconds": 0.31, "ran_seconds": 0.69, "cpu_seconds": 0.98, "cpus": 1},
        QUIET,
        "its own threads crowd on 1 CPU (elsewhere 8): ready to run but waiting 31% of its own time",
        "OMP_NUM_THREADS",
        {"waited_for_cpu_ratio": 0.31, "cpus": 1.0, "others_cpus": 8.0},
    ),
    "steal": (
        {"steal_ratio": 0.22},
        QUIET,
        "steal 22%",
        "virtual machine",
        {"steal_ratio": 0.22, "others_steal_ratio": 0.0},
    ),
    "swapping": (
        {"major_faults": 2900.0, "swapped_in_pages": 5000.0},
        QUIET,
        "major page faults per step: swapping",
        "more memory",
        {"major_faults_per_step": 410.0},
    ),
    "pages of a file, from a slow disk": (
        {"major_faults": 100.0, "swapped_in_pages": 0.0, "ran_seconds": 0.4},
        {**QUIET, "major_faults": 1.0},
        "major page faults per step: pages are read from a disk",
        "memory-mapped files",
        {"major_faults_per_step": 14.1},
    ),
    "memory": (
        {"memory_stalled_seconds": 0.25},
        QUIET,
        "memory is short: work stalled for 25% of the time",
        "memory.events",
        {"memory_stalled_ratio": 0.25},
    ),
    "asleep": (
        {"ran_seconds": 0.6},
        QUIET,
        "it slept",
        "py-spy",
        {"asleep_ratio": 0.39},
    ),
    "hot GPU": (
        {"gpu_clock_mhz": 1110.0, "gpu_celsius": 88.0, "gpu_reasons": 0x24},
        {**QUIET, **BUSY_GPU},
        "GPU clock 1,110 of 1,980 MHz (the others' 1,755), thermal slowdown at 88 °C",
        "cooling",
        {"gpu_clock_mhz": 1110.0, "gpu_celsius": 88.0, "others_gpu_clock_mhz": 1755.0, "gpu_cap_watts": 700.0},
    ),
    "capped GPU": (
        {"gpu_clock_mhz": 1110.0, "gpu_reasons": 0x4, "gpu_cap_watts": 350.0},
        {**QUIET, **BUSY_GPU, "gpu_reasons": 0},
        "MHz (the others' 1,755), power cap",
        "power limit",
        {"gpu_cap_watts": 350.0},
    ),
    "GPU at set clocks": (
        {"gpu_clock_mhz": 1110.0, "gpu_reasons": 0x6},
        {**QUIET, **BUSY_GPU},
        "its clocks were set by hand",
        "nvidia-smi -rgc",
        {"gpu_clock_mhz": 1110.0},
    ),
    "slow GPU, no reason": (
        {"gpu_clock_mhz": 1110.0},
        {**QUIET, **BUSY_GPU},
        "GPU clock 1,110 of 1,980 MHz (the others' 1,755)",
        "nvidia-smi -q -d CLOCK",
        {"gpu_clock_mhz": 1110.0},
    ),
}


@pytest.mark.parametrize("name", CAUSES)
@pytest.mark.parametrize("onset", [ONSET, 0])
def test_the_strongest_evidence_is_told(name: str, onset: int) -> None:
    now, usual, words, advice, evidence = CAUSES[name]
    verdict = verdict_on(records(only_culprit(now, usual), onset=onset), onset)
    assert words in verdict.cause
    assert advice in verdict.advice
    assert verdict.kind == "slow_rank"
    for key, value in evidence.items():
        if onset or not key.startswith("usual_"):
            assert verdict.evidence[key] == pytest.approx(value, rel=0.05, abs=0.002), key
    assert set(evidence) <= SIGN_EVIDENCE


@pytest.mark.parametrize("name", CAUSES)
def test_nothing_is_told_that_a_healthy_rank_shows_as_well(name: str) -> None:
    now, usual, words, _, _ = CAUSES[name]
    trouble = {**usual, **now}
    verdict = verdict_on(records(lambda rank, slow: trouble if rank in (CULPRIT, 3) and slow else usual))
    assert words not in verdict.cause
    assert not set(verdict.evidence) & SIGN_EVIDENCE


@pytest.mark.parametrize("name", CAUSES)
def test_nothing_is_told_that_was_so_before(name: str) -> None:
    now, usual, words, _, _ = CAUSES[name]
    trouble = {**usual, **now}
    verdict = verdict_on(records(lambda rank, slow: trouble if rank == CULPRIT else usual))
    assert words not in verdict.cause
    assert not set(verdict.evidence) & SIGN_EVIDENCE


@pytest.mark.parametrize(
    "now",
    [
        {"throttled_seconds": 0.05, "quota_cpus": 1.5},  # far less than was lost
        {"waited_seconds": 0.06},
        {"steal_ratio": 0.05},
        {"major_faults": 300.0, "swapped_in_pages": 0.0},  # 3% of the time at most
        {"gpu_clock_mhz": 1660.0},
    ],
)
def test_too_little_to_explain_the_excess_is_no_cause(now: Known) -> None:
    verdict = verdict_on(records(only_culprit(now, {**QUIET, **BUSY_GPU})))
    assert RUNNING in verdict.cause
    assert not set(verdict.evidence) & SIGN_EVIDENCE


def test_what_varies_as_much_anyway_is_no_cause() -> None:
    """On a machine full of others' processes every rank waits for a CPU now and then, by chance one a bit more."""
    chance = np.random.default_rng(3)
    bias = {(CULPRIT, True): 0.14}

    def noisy(rank: int, slow: bool) -> Known:
        share = float(np.clip(chance.normal(0.35 + bias.get((rank, slow), 0.0), 0.35), 0.0, 1.0))
        return {**QUIET, "waited_seconds": share, "ran_seconds": 0.7 * (1 - share)}

    verdict = verdict_on(records(noisy))
    assert "another process" not in verdict.cause


def test_a_neighbour_is_told_on_a_machine_that_is_full_anyway() -> None:
    """Everybody waits for two thirds of the time; the culprit, for 94%, needs five times as long: as was recorded."""
    full = {**QUIET, "waited_seconds": 0.667, "ran_seconds": 0.3}
    made = records(only_culprit({"waited_seconds": 0.938, "ran_seconds": 0.05}, full))
    table = tabulate(made, RANKS)
    verdict = msgspec.structs.replace(found(ONSET), excess_ratio=6.89)
    verdict = explain_verdict(verdict, table.between(ONSET), table.before(ONSET))
    assert "another process took its core: ready to run but waiting 94%" in verdict.cause


def test_the_largest_of_several_is_told_and_all_are_evidence() -> None:
    now = {"throttled_seconds": 0.3, "waited_seconds": 0.3, "quota_cpus": 2.0, "steal_ratio": 0.2}
    verdict = verdict_on(records(only_culprit(now, QUIET)))
    assert verdict.cause.startswith("its container was throttled 30%")
    assert "steal" not in verdict.cause
    assert verdict.evidence["steal_ratio"] == pytest.approx(0.2)
    assert "waited_for_cpu_ratio" not in verdict.evidence  # it is the quota that made it wait


def test_an_idle_gpu_lowers_its_clock_by_itself() -> None:
    now = {"gpu_clock_mhz": 210.0, "gpu_reasons": 0x1, "waited_seconds": 0.3}
    verdict = verdict_on(records(only_culprit(now, {**QUIET, **BUSY_GPU})))
    assert "another process" in verdict.cause
    assert "gpu_clock_mhz" not in verdict.evidence


def test_a_rank_that_waits_for_its_gpu_is_not_said_to_sleep() -> None:
    verdict = verdict_on(records(only_culprit({"ran_seconds": 0.2}, {**QUIET, **BUSY_GPU})))
    assert "slept" not in verdict.cause


def test_gpus_of_two_kinds_are_compared_with_their_own_highest() -> None:
    small = {"gpu_clock_mhz": 1300.0, "gpu_max_clock_mhz": 1410.0, "gpu_reasons": 0}

    def of(rank: int, slow: bool) -> Known:
        return {**QUIET, **BUSY_GPU, **(small if rank == CULPRIT else {})}

    assert "GPU clock" not in verdict_on(records(of, onset=0), 0).cause


# ------------------------------------------------------------------------------------------------ nothing can be told


def test_without_vitals_only_the_share_of_the_cpu_is_told() -> None:
    assert DESCHEDULED in verdict_on(records(None, ran=0.6)).cause
    assert RUNNING in verdict_on(records(None)).cause


def test_a_rank_that_ran_less_for_no_known_reason() -> None:
    verdict = verdict_on(records(only_culprit({"gpu_clock_mhz": 1755.0}, {**QUIET, **BUSY_GPU}), ran=0.6))
    assert UNEXPLAINED in verdict.cause
    assert not set(verdict.evidence) & SIGN_EVIDENCE


def test_a_rank_throttled_like_all_others_was_not_running_all_the_time() -> None:
    trouble = {**QUIET, "throttled_seconds": 0.3, "quota_cpus": 4.0, "waited_seconds": 0.3, "ran_seconds": 0.6}
    verdict = verdict_on(records(lambda rank, slow: trouble))
    assert "as much as the others" in verdict.cause
    assert RUNNING not in verdict.cause


def test_nobody_to_compare_with_is_no_cause() -> None:
    def of(rank: int, slow: bool) -> Known:
        return {**QUIET, "waited_seconds": 0.5} if rank == CULPRIT and slow else {}

    assert "another process" not in verdict_on(records(of)).cause


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 1e300])
def test_forged_vitals_count_for_nothing(seconds: float) -> None:
    made = records(only_culprit({"waited_seconds": 0.3}, QUIET))
    forged = [
        msgspec.structs.replace(one, vitals=Vitals(seconds=seconds, waited_seconds=1e308, major_faults=10**400))
        for one in made
    ]
    verdict = verdict_on(forged)
    assert not set(verdict.evidence) & SIGN_EVIDENCE


def test_forged_figures_count_for_nothing() -> None:
    made = records(only_culprit({"waited_seconds": 0.3}, QUIET))
    strange = Vitals(seconds=0.3, waited_seconds=-1e308, ran_seconds=float("inf"), steal_ratio=float("nan"),
                     major_faults=-(10**400), gpu_clock_mhz=-5.0, gpu_reasons=2**70, gpu_max_clock_mhz=0.0)  # fmt: skip
    verdict_on([msgspec.structs.replace(one, vitals=strange) if one.rank == CULPRIT else one for one in made])


# ------------------------------------------------------------------------------------------------ other verdicts


def test_a_slow_data_loader_that_is_throttled() -> None:
    now = {"throttled_seconds": 0.38, "waited_seconds": 0.38, "quota_cpus": 1.5}
    verdict = verdict_on(records(only_culprit(now, QUIET), data=1.0))
    assert verdict.kind == "input_bound"
    assert verdict.cause.startswith("its container was throttled 38%")
    assert "fetching its input" in verdict.cause
    assert "cpu.max" in verdict.advice


def test_a_slow_data_loader_sleeps_and_that_is_no_news() -> None:
    verdict = verdict_on(records(only_culprit({"ran_seconds": 0.4}, QUIET), data=1.0))
    assert verdict.kind == "input_bound"
    assert "slept" not in verdict.cause
    assert "data loader" in verdict.advice


def test_more_samples_stay_more_samples() -> None:
    verdict = Verdict(kind="uneven_work", ranks=[CULPRIT], since_step=0, detected_step=9, excess_ratio=0.4)
    table = tabulate(records(only_culprit({"waited_seconds": 0.3}, QUIET)), RANKS)
    assert explain_verdict(verdict, table, table.before(0)) is verdict


# ------------------------------------------------------------------------------------------------ told to the user


def test_the_live_watcher_tells_it_and_the_report_shows_it(tmp_path: Path, make_info: Callable[..., RunInfo]) -> None:
    now, usual, words, _, _ = CAUSES["quota"]
    made = records(only_culprit(now, usual))
    watcher, told = SlowRankWatcher(RANKS), []
    for step in range(STEPS):
        row = {one.rank: one for one in made if one.step == step}
        told += [finding.verdict for finding in watcher.update(step, row)]
    assert [verdict.ranks for verdict in told] == [[CULPRIT]]
    assert words in told[0].cause
    writer = RunWriter(tmp_path, make_info(RANKS))
    writer.append(made)
    writer.event({"unix": 1.0, "kind": "verdict", "verdict": msgspec.to_builtins(told[0])})
    (shown,) = finish_run(tmp_path, render_report)["verdicts"]
    assert words in shown["cause"]
    assert shown["evidence"]["quota_cpus"] == 1.5
    assert "throttled 38% of its own time" in (tmp_path / "report.html").read_text().replace("\xa0", " ")


def test_a_claim_that_all_records_do_not_bear_out_is_taken_back() -> None:
    now, usual, words, _, _ = CAUSES["quota"]
    early = verdict_on(records(only_culprit(now, usual)))
    assert words in early.cause
    table: StepTable = tabulate(records(only_culprit({}, usual)), RANKS)
    late = explain_verdict(early, table.between(ONSET), table.before(ONSET))
    assert words not in late.cause
    assert not set(late.evidence) & SIGN_EVIDENCE


def test_vitals_survive_the_run_directory(tmp_path: Path, make_info: Callable[..., RunInfo]) -> None:
    from ringside.monitor.run.directory import RunReader

    made = records(only_culprit({"gpu_reasons": 0x24, "quota_cpus": 1.5}, QUIET))
    RunWriter(tmp_path, make_info(RANKS)).append(made)
    assert RunReader(tmp_path).poll() == made
    old = msgspec.json.decode(msgspec.json.encode({"step": 1, "rank": 0, "ended_unix": 1, "step_seconds": 1,
                                                   "own_seconds": 1}), type=StepRecord)  # fmt: skip
    assert old.vitals is None


def test_a_long_run_keeps_vitals_of_every_rank() -> None:
    from ringside.monitor.run.table import VitalsGatherer

    gatherer = VitalsGatherer(3, limit=60)
    for step in range(1000):
        for rank in range(3):
            gatherer.add(
                StepRecord(step=step, rank=rank, ended_unix=0, step_seconds=1, own_seconds=1,
                           vitals=Vitals(seconds=1.0, waited_seconds=0.1 * rank))
            )  # fmt: skip
    table = gatherer.table()
    assert 20 <= len(table) <= 60
    np.testing.assert_allclose(table.mean(table["waited_seconds"]), [0.0, 0.1, 0.2])
    assert set(np.bincount(table.owners)) == {len(table) // 3}


@pytest.mark.parametrize(("rows", "kept"), [(59, 59), (60, 60), (61, 31)])
def test_vitals_are_thinned_where_there_are_more_than_may_be_kept(rows: int, kept: int) -> None:
    from ringside.monitor.run.table import VitalsGatherer

    gatherer = VitalsGatherer(1, limit=60)
    for step in range(rows):
        vitals = Vitals(seconds=1.0)
        gatherer.add(StepRecord(step=step, rank=0, ended_unix=0, step_seconds=1, own_seconds=1, vitals=vitals))
    assert len(gatherer.table()) == kept


# ------------------------------------------------------------------------------------------------ the page


def test_the_page_names_evidence_that_exists_and_leaves_none_out() -> None:
    text = (Path(__file__).parents[2] / "docs" / "causes.md").read_text()
    rows = [line for line in text.split("Behind these")[0].splitlines() if line.startswith("|")][2:]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[4])}
    shares = {name for name in SIGN_EVIDENCE if name.startswith(("usual_", "others_")) and name.endswith("_ratio")}
    known = SIGN_EVIDENCE - shares - {"others_major_faults_per_step"}
    assert known <= named
    assert named - known == {"extra_data_seconds", "more_samples_ratio", "cpu_share_ratio", "usual_cpu_share_ratio"}
    for words in (RUNNING, UNEXPLAINED, AS_MUCH_CPU.split(":")[0], DESCHEDULED.split(":")[0]):
        assert words in text


def test_a_sign_is_a_cause_from_the_least_share_on_that_stands_out_of_its_noise() -> None:
    def explains(now: float, noise: float = 0.0) -> bool:
        return Measurement(now, usual=0.0, others=math.nan, noise=noise).explains(lost=0.0)

    assert explains(LEAST)
    assert not explains(math.nextafter(LEAST, 0.0))
    assert explains(NOISE * 0.25, noise=0.25)
    assert not explains(math.nextafter(NOISE * 0.25, 0.0), noise=0.25)
