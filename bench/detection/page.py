"""docs/detection.md from the results of `bench/detection/`."""

from __future__ import annotations

from collections.abc import Mapping

from bench.common import page_table

Results = Mapping[str, Mapping[str, float | None]]
DAY = 86_400  # steps: a day at one step per second
SIZES = (0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5)
RANKS = (2, 4, 8, 128)

HEAD = """# The slow-rank detector: its operating point

Written by `python -m bench.detection --write`; do not edit. What the detector does and why is in
[design/0002-detector.md](design/0002-detector.md). A cell of an injection has three figures: **found within 200
steps · median delay in steps · verdicts on a wrong rank per job**. There are {jobs} jobs per cell (a
quarter with 1,024 ranks), each with its own noise. A job is healthy for 120 steps before the fault, unless the column
says otherwise. False alarms are per 86,400 job steps, a day at one step per second, over {steps:,} healthy steps per
line. One alarm among those is {one:.2g}.
"""

WEAK = """
## Limitations

- Correlated noise hides what is no wider than it. With 10% jitter of autocorrelation 0.9, 12% is not found at any
  number of ranks. 30% is found within 200 steps in {found}% of the jobs of 2, 4, 8 and 128 ranks. The mean of
  24 steps wanders by 7% by chance, and an alarm requires nearly six times that. Otherwise healthy ranks would be named.
- If healthy ranks really are 8 to 16% slower by turns for a dozen steps (the last noise above), they are named for
  it. In a live job that is reported if it cost 50 ms and has not ended. Of the other noises the worst line above has
  {worst} false alarms in 86,400 steps.
- Two ranks give one series of differences. Until its autocorrelation is known (some forty steps), only large slowdowns
  are reported. A rank that becomes slow in the first twenty steps is found after about a hundred.
- The limit is 5%: below it nothing is reported, and at it later or not at all. A rank that was slow from the start is
  compared with what healthy ranks may differ by (6% for few ranks), so a smaller excess is never reported.
- Single pauses, however long, count for little. Repeated pauses are detected separately. That requires 5% of the job's
  time, and some twenty pauses of one of two ranks, thirteen of one of four, or five of one of many.
- If more than half of the ranks are slow, the others look fast, and no rank is named.
"""


def page(results: Results, kinds: Mapping[str, str], faults: Mapping[str, str]) -> str:
    """Return the page; what was not measured is left as a dash."""
    tables = [
        _noise_table(results, kinds),
        _rules_table(results),
        _sizes_table(results),
        _jitters_table(results),
        _faults_table(results, faults),
    ]
    about = results.get("about") or {"jobs": 100, "steps": 260_000}
    head = HEAD.format(jobs=about["jobs"], steps=about["steps"], one=DAY / (about["steps"] or 1))
    return "\n".join([head, *tables, _first_steps_table(results), _weak_points(results), _cost_table(results)])


def cell(figures: Mapping[str, float | None] | None) -> str:
    """Return `recall · delay · wrong`."""
    if figures is None:
        return "–"
    delay = "–" if figures["delay"] is None else f"{figures['delay']:.0f}"
    wrong = figures["wrong"] or 0.0
    return f"{figures['recall']:.0%} · {delay} · {wrong:{'.0f' if wrong >= 10 else '.2g'}}"


def per_day(figures: Mapping[str, float | None] | None) -> str:
    """Return alarms per 86,400 job steps."""
    if figures is None:
        return "–"
    rate = (figures["alarms"] or 0) * DAY / (figures["steps"] or 1)
    return f"{rate:.2f}" if rate < 10 else f"{rate:,.0f}"


def _noise_table(results: Results, kinds: Mapping[str, str]) -> str:
    rows = []
    for kind, words in kinds.items():
        for jitter in (0.02, 0.10):
            for ranks in (*RANKS, 1024):
                at = f"{kind}/{jitter}/{ranks}"
                if f"healthy/{at}" in results or f"inject/{at}/slow" in results:
                    found = [cell(results.get(f"inject/{at}/{name}")) for name in ("slow", "start", "much")]
                    rows.append([words, f"{jitter:.0%}", f"{ranks}", per_day(results.get(f"healthy/{at}")), *found])
    head = ["noise", "jitter", "ranks", "false alarms", "12% mid-run", "12% from step 0", "30% mid-run"]
    return "## By noise and ranks\n\n" + page_table(head, rows)


def _rules_table(results: Results) -> str:
    settings = (("white", 2), ("white", 8), ("white", 128), ("spikes", 128), ("ar", 128))
    rows = []
    names = list(dict.fromkeys(name.split("/")[1] for name in results if name.startswith("rule/")))
    for kind, ranks in settings:
        at = f"{kind}/0.02/{ranks}"
        ours = [cell(results.get(f"inject/{at}/{name}")) for name in ("slow", "much")]
        rows.append([f"{kind}, {ranks} ranks", "**Ringside**", per_day(results.get(f"healthy/{at}")), *ours])
        for rule in names:
            figures = [results.get(f"rule/{rule}/{kind}/{ranks}/{name}") for name in ("slow", "much")]
            rows.append(["", rule, per_day(figures[0]), *map(cell, figures)])
    head = ["2% jitter", "rule", "false alarms", "12% mid-run", "30% mid-run"]
    note = (
        "Re-implemented in `bench/detection/baselines.py`; a rule that names the same rank again within 50 steps\n"
        "counts once, and its false alarms are measured over 26,000 healthy steps. The job rule names no rank.\n\n"
    )
    return "## Compared with the rules of today's tools\n\n" + note + page_table(head, rows)


def _sizes_table(results: Results) -> str:
    many = (*RANKS, 1024)
    rows = [[f"{size:.0%}", *(cell(results.get(f"size/{size}/{ranks}")) for ranks in many)] for size in SIZES]
    return "## By size of the slowdown (2% jitter)\n\n" + page_table(["slowdown", *(f"{n} ranks" for n in many)], rows)


def _jitters_table(results: Results) -> str:
    rows = [
        [f"{jitter:.0%}", *(cell(results.get(f"jitter/{jitter}/{ranks}")) for ranks in RANKS)]
        for jitter in (0.01, 0.02, 0.05, 0.10)
    ]
    return "## By jitter (12% mid-run)\n\n" + page_table(["jitter", *(f"{ranks} ranks" for ranks in RANKS)], rows)


def _faults_table(results: Results, faults: Mapping[str, str]) -> str:
    titles = {**faults, "uneven": "a quarter more samples on one rank: `uneven_work` and nothing else"}
    rows = [
        [title, *(cell(results.get(f"fault/{kind}/{ranks}")) for ranks in RANKS)]
        for kind, title in titles.items()
        if f"fault/{kind}/4" in results
    ]
    note = (
        "Slowdowns of 20% in all; drift and pauses are given 500 steps. A slow link must name no rank: there only the\n"
        "last figure counts.\n\n"
    )
    head = ["fault", *(f"{ranks} ranks" for ranks in RANKS)]
    return "## By kind of fault (2% jitter)\n\n" + note + page_table(head, rows)


def _first_steps_table(results: Results) -> str:
    rows = [
        [*name.split("/")[1:], f"{figures['alarms']:.0f} of {figures['jobs']:.0f} jobs"]
        for name, figures in sorted(results.items())
        if name.startswith("fresh/")
    ]
    head = ["noise", "jitter", "ranks", "false alarms"]
    return (
        "## In the first 300 steps of a healthy job\n\nLeast is known there (`ar`: autocorrelation 0.9).\n\n"
        + page_table(head, rows)
    )


def _cost_table(results: Results) -> str:
    rows = [
        [name.split("/")[1], *(f"{figures[key]:.1f}" for key in ("detector_us", "collector_us", "record_us"))]
        for name, figures in results.items()
        if name.startswith("cost/")
    ]
    rows.sort(key=lambda row: int(row[0]))
    head = ["ranks", "detector, µs per step", "collector with it, µs per step", "µs per record"]
    return "## What it costs\n\nOn a shared machine of two cores.\n\n" + page_table(head, rows)


def _weak_points(results: Results) -> str:
    """Return where it is weak, with the figures that say so."""
    recalls = [(results.get(f"inject/ar/0.1/{ranks}/much") or {}).get("recall") for ranks in RANKS]
    shares = ["–" if recall is None else f"{100 * recall:.0f}" for recall in recalls]
    healthy = [
        figures
        for name, figures in results.items()
        if name.startswith("healthy/") and not name.startswith("healthy/states/")
    ]
    worst = max(healthy, key=lambda figures: (figures["alarms"] or 0) / (figures["steps"] or 1), default=None)
    return WEAK.format(found=f"{', '.join(shares[:-1])} and {shares[-1]}", worst=per_day(worst))
