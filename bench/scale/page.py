"""docs/scale.md from the figures of `bench/scale/`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bench.common import page_table

Figures = Mapping[str, Any]

HEAD = """# The monitor at scale

Written by `python -m bench.scale --write`; do not edit. What was decided and why is in
[design/0017-scale.md](design/0017-scale.md).

Every rank is a separate process with the session that `attach()` makes: its step clock, its thread, its batches over
a real `TCPStore` to rank 0. Collector, watchers and run directory there are those of any run. Compute is replaced by
sleep, and there are no gradients. All processes share **one machine of two cores**. Where each rank
has its own, only rank 0's figures matter. At 2% jitter one rank, drawn by the seed, becomes 12% slower at a drawn step.
"""

NOTES = """
- *Delay*: slow steps the job had finished when rank 0 had the verdict. In brackets: how many of them the detector
  required; the rest is transport. The limit is 10.
- *Lag*: steps finished by the fastest rank that the collector had not yet completed, sampled four times a second. A
  record is sent within a quarter of a second after its step (with 1,024 ranks within a second), and read within a
  quarter.
- *CPU*: share of one core, while steps were made.
- *Memory*: resident in rank 0's process, with Python and torch. In brackets: what was added after the first steps.
"""


def page(results: Mapping[str, Figures]) -> str:
    """Return the page; what was not measured is left out."""
    parts = [
        HEAD,
        _jobs_table(results),
        NOTES,
        _costs_table(results),
        _collector_table(results),
        _replays_table(results),
    ]
    return "\n".join(part for part in parts if part)


def _of(results: Mapping[str, Figures], prefix: str) -> dict[tuple[str, ...], list[Figures]]:
    """The figures whose key begins so, by what lies between that and the seed, in the order of the keys."""
    groups: dict[tuple[str, ...], list[Figures]] = {}
    for key in results:
        if key.startswith(f"{prefix}/"):
            groups.setdefault(tuple(key.split("/")[1:-1]), []).append(results[key])
    return groups


def _job_groups(results: Mapping[str, Figures]) -> list[tuple[int, float, str, list[Figures]]]:
    groups = [(int(ranks), float(rate), clock, jobs) for (ranks, rate, clock), jobs in _of(results, "job").items()]
    return sorted(groups, key=lambda group: (group[2] != "own", group[0], group[1]))


def _jobs_table(results: Mapping[str, Figures]) -> str:
    rows = []
    for ranks, rate, clock, jobs in _job_groups(results):
        told = [job["told_steps"] for job in jobs if job["told_steps"] is not None]
        needed = [job["detector_steps"] for job in jobs if job["detector_steps"] is not None]
        lags = [lag for job in jobs for lag in job["lag_steps"]]
        rows.append(
            [
                f"{ranks:,}",
                f"{rate:g}" + (", machine's clock" if clock == "machine" else ""),
                f"{len(jobs)}",
                f"{sum(job['named'] and not job['wrong'] for job in jobs)}",
                f"median {median(told):g}, most {max(told)} ({median(needed):g}, {max(needed)})" if told else "–",
                f"{min(job['steps_per_s'] for job in jobs):.2f}",
                f"median {median(lags):g}, most {max(lags)}",
                f"{sum(job['missing'] for job in jobs)} and {sum(job['late'] for job in jobs)}",
            ]
        )
    head = ["ranks", "steps/s asked", "jobs", "right rank, no other", "delay, steps", "steps/s completed", "lag, steps"]
    return "## Named in time\n\n" + page_table([*head, "records lost and late"], rows) if rows else ""


def _costs_table(results: Mapping[str, Figures]) -> str:
    rows = []
    for ranks, rate, clock, jobs in _job_groups(results):
        steps = jobs[0]["steps"]
        rows.append(
            [
                f"{ranks:,}",
                f"{rate:g}" + (", machine's clock" if clock == "machine" else ""),
                f"{_mean(jobs, 'chief_cpu'):.1%}",
                f"{_mean(jobs, 'chief_rss_bytes') / 1e6:.0f} MB ({_mean(jobs, 'chief_grown_bytes') / 1e6:+.0f})",
                f"{_mean(jobs, 'store_cpu'):.1%}",
                f"{_mean(jobs, 'messages') / steps:,.0f}",
                f"{_mean(jobs, 'bytes') / steps / 1e3:,.0f} kB",
                f"{_mean(jobs, 'written_bytes') / steps / 1e3:,.0f} kB",
                f"{_mean(jobs, 'rank_cpu'):.2%}, {_mean(jobs, 'rank_pss_bytes') / 1e6:.1f} MB",
                f"{_mean(jobs, 'finish_s'):.1f} s",
            ]
        )
    head = ["ranks", "steps/s", "rank 0's CPU", "its memory", "store's CPU", "messages/step", "sent/step"]
    title = "## What it costs\n\n"
    return title + page_table([*head, "written/step", "another rank", "leaving, CPU"], rows) if rows else ""


def _mean(jobs: Sequence[Figures], name: str) -> float:
    return float(sum(job[name] for job in jobs) / len(jobs))


def _collector_table(results: Mapping[str, Figures]) -> str:
    rows = [
        [
            f"{one['ranks']:,}",
            f"{one['decode_s'] * 1e6:.1f} µs",
            f"{one['collect_s'] * 1e6:.1f} µs",
            f"{one['records_per_s']:,.0f}",
            f"{one['records_per_s'] / one['ranks']:,.0f}",
        ]
        for one in sorted((results[key] for key in results if key.startswith("alone/")), key=lambda one: one["ranks"])
    ]
    head = ["ranks", "decode a record", "complete, judge and write it", "records/s", "steps/s"]
    title = "## Without a store\n\nRecords from memory, one message per rank and step: what one core takes.\n\n"
    return title + page_table(head, rows) if rows else ""


def _replays_table(results: Mapping[str, Figures]) -> str:
    groups = _of(results, "replay")
    if not groups:
        return ""
    rows = []
    for (way, state), jobs in sorted(groups.items(), key=lambda item: (item[0][0] == "dealt", item[0][1] == "slow")):
        job, injected = jobs[0], state == "slow"
        # Who was named: healthy ranks, and whether the injected one was.
        wrong = sorted({rank for job in jobs for rank in job["wrong"]})
        right = [job["detector_steps"] for job in jobs if job["named"]]
        named = f"rank{'s' * (len(wrong) > 1)} {', '.join(map(str, wrong))}" if wrong else "nobody"
        if injected and right:
            others = f"; also {named}" if wrong else ""
            delay = f"after {median(right):g} steps (most {max(right)})"
            named = f"the injected one in {len(right)} of {len(jobs)}, {delay}{others}"
        elif injected:
            named = f"{named}; the injected one not"
        rows.append(
            [
                way,
                f"rank {job['culprit']} 12% slower from step {job['onset']}" if injected else "no",
                f"{len(jobs)}",
                named,
                f"{min(job['steps_per_s'] for job in jobs):.0f}",
                f"{sum(job['missing'] for job in jobs)} and {sum(job['late'] for job in jobs)} of "
                f"{sum(job['records'] for job in jobs):,}",
                f"{_mean(jobs, 'chief_cpu'):.0%}",
            ]
        )
    first = next(iter(groups.values()))[0]
    times = ", ".join(f"{1e3 * value:.1f}" for value in first["own_s"])
    text = f"""## Recorded traces, replayed

Kineto traces of {first["ranks"]} {first["backend"].upper()} ranks of a public DLRM job, read by the doctor's reader and
run again at their own pace for {first["steps"]} steps. In one recorded step the ranks worked for {times} ms.

- *Repeated*: each rank has its own time in every step. Ranks that were slow in that step are always slow, and should be
  named.
- *Dealt*: in every step each rank has the time of some recorded rank, drawn anew. So the job is healthy, with noise as
  wide as recorded.

(Repeated, the rank that is made slower was one of the faster half. With 12% more it is still below the others' median,
delays no rank, and is rightly not named.)

"""
    head = ["steps", "injected", "runs", "named", "steps/s", "records lost and late", "rank 0's CPU"]
    return text + page_table(head, rows)
