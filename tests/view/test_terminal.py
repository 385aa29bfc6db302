import io
import math
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ringside.monitor.run.records import SCHEMA, RunInfo, StepRecord
from ringside.monitor.summary import summarise
from ringside.monitor.verdict import Verdict
from ringside.text import sparkline
from ringside.view.run.follower import RunFollower
from ringside.view.terminal import closing_summary, live_picture, rank_table, status_line, verdict_line

FLOATS = st.lists(st.floats(-1e6, 1e6), max_size=300)


def info(ranks):
    return RunInfo(
        schema=SCHEMA,
        name="x",
        started_unix=0.0,
        command=["x"],
        world_size=ranks,
        hosts=["h"] * ranks,
        pids=list(range(ranks)),
        engine="ringside",
    )


def records(ranks, steps, first=0, slow=None):
    for step in range(first, first + steps):
        for rank in range(ranks):
            own = 0.13 if rank == slow else 0.10
            wait = 0.0 if rank == slow or slow is None else 0.03
            yield StepRecord(
                step=step,
                rank=rank,
                ended_unix=float(step),
                step_seconds=own + wait + 0.001,
                own_seconds=own,
                wait_seconds=wait,
                exposed_seconds=wait + 0.001,
                payload_bytes=13_000_000,
                loss=5.5 / (1 + step),
            )


def verdict(**changes):
    fields = {
        "kind": "slow_rank",
        "ranks": [1],
        "since_step": 20,
        "detected_step": 29,
        "excess_ratio": 0.3,
        "cause": "most of the extra time is in its backward pass (+26.3 ms per step); " + "a long story " * 20,
        "cost_rank_seconds": 0.6,
        "advice": "move it",
    }
    return {**fields, **changes}


def following(ranks=2, slow=1):
    run = RunFollower()
    run.start(info(ranks))
    run.feed(records(ranks, 20), [{"kind": "stage", "stage": "training", "of": 100}])
    run.feed(records(ranks, 10, first=20, slow=slow), [{"kind": "verdict", "verdict": verdict(ranks=[slow])}])
    run.feed(records(ranks, 10, first=30, slow=slow), [])
    return run


def lines(renderable, width=80):
    written = io.StringIO()
    console = Console(width=width, file=written, no_color=True, legacy_windows=False)
    console.print(renderable)
    return written.getvalue().splitlines()


def test_a_rank_with_a_verdict_stands_out_among_the_others():
    written = io.StringIO()
    Console(width=80, file=written, force_terminal=True, color_system="standard", legacy_windows=False).print(
        live_picture(following(4), "demo", 75.0)
    )
    assert re.findall(r"\x1b\[1;31m *(\d+) *\x1b", written.getvalue()) == ["1"]


@pytest.mark.parametrize("ranks", [2, 8, 64, 1000])
def test_the_picture_fits_a_small_terminal_and_shows_the_verdict(ranks):
    run = following(ranks)
    shown = lines(live_picture(run, "demo: a byte-level GPT with a title that is much too long for it", 75.0))
    assert len(shown) <= 24
    assert max(map(len, shown)) <= 80
    text = "\n".join(shown)
    assert "01:15" in shown[0]
    assert "40 steps of at most 100" in text
    assert "rank 1 is 30% slower than the others since step 20" in text
    assert "130 ms" in text
    assert "13 MB" in text


def test_the_price_grows_with_every_step_after_the_verdict():
    run = following()
    # 0.6 rank-seconds until the verdict, then 10 steps of 30 ms lost on 2 ranks
    assert run.findings[0].cost_rank_seconds == pytest.approx(0.6 + 10 * 0.03 * 2)
    run.feed(records(2, 10, first=40, slow=1), [{"kind": "repaired", "verdict": verdict()}])
    over = run.findings[0].cost_rank_seconds
    run.feed(records(2, 10, first=50), [])
    assert run.findings[0].cost_rank_seconds == over
    assert "(resolved)" in "\n".join(lines(live_picture(run, "x", 1.0)))


def test_a_run_that_has_not_begun_and_one_that_compares():
    run = RunFollower()
    assert lines(live_picture(run, "demo", 0.0))
    assert "starting" in status_line(run, 3.0)
    run = following()
    run.feed([], [{"kind": "stage", "stage": "comparison", "done": 3, "of": 12}])
    assert "Gloo for comparison: 25%" in status_line(run, 61.0)
    run.feed([], [{"kind": "comparison", "unix": 1.0, "peer": "gloo", "step_ratio": 1.4}])
    assert run.comparison == {"peer": "gloo", "step_ratio": 1.4}


def test_torn_steps_unknown_events_and_damaged_verdicts_are_passed_over():
    run = RunFollower()
    run.start(info(3))
    some = [record for record in records(3, 6) if record.rank != 2 or record.step % 2]
    assert run.feed(some, [{"kind": "verdict", "verdict": {"kind": "?"}}, {"kind": "verdict"}, {"kind": "new"}]) == []
    assert run.step == 5
    assert [round(own, 3) for own in run.rank_medians("own_seconds")] == [0.1] * 3
    assert len(run.losses) == 6


def test_ranks_are_seen_to_part():
    run = RunFollower()
    run.start(info(2))
    run.feed(records(2, 24), [])
    late = [msgspec.structs.replace(record, step=record.step + 24) for record in records(2, 24, slow=1)]
    run.feed(late, [])
    shown = [line.rstrip() for line in lines(live_picture(run, "demo", 75.0))]
    assert [line.rpartition(" ")[2] for line in shown[4:6]] == ["▁" * 12, "▁" * 6 + "█" * 6]
    run.feed([msgspec.structs.replace(late[0], step=99)], [])  # a rank is missing
    assert [line.rstrip() for line in lines(live_picture(run, "demo", 75.0))][4:6] == shown[4:6]


def test_the_picture_line_by_line():
    """Ten ranks fit; of eleven the slowest ten are shown. Bars: 36 cells for the longest own time and wait."""
    run = RunFollower()
    run.start(info(2))
    run.feed(records(2, 20, slow=1), [{"kind": "stage", "stage": "training", "of": 40}])
    shown = [line.rstrip() for line in lines(live_picture(run, "demo", 75.0))]
    assert shown == [
        "ringside demo · 2 ranks · gradients over ringside" + " " * 25 + "01:15",
        "20 steps of at most 40 ━━━━━━━━━━━━━━━━━━━━━━━━  loss 0.28 █▄▃▂▂▂▁▁▁▁▁▁▁▁▁▁",
        "",
        "rank     own     wait  █ own ░ waits for others              last 48 steps",
        "   0  100 ms  30.0 ms  " + "█" * 28 + "░" * 8 + "  ▁▁▁▁▁",
        "   1  130 ms      0 s  " + "█" * 36 + "  █████",
        "",
        "a step takes 131 ms (median, last 16 steps); 13 MB of gradients, exposed 1.00 ms",
        "",
        "● no verdict so far",
    ]
    bar = live_picture(run, "demo", 75.0).renderables[1]
    assert [(span.end - span.start, span.style) for span in bar.spans][:2] == [(12, "cyan"), (12, "bright_black")]
    narrow = lines(live_picture(run, "demo", 75.0, width=60), width=60)
    assert max(map(len, narrow)) <= 60

    for ranks, heading in ((10, "█ own ░ waits for others              last 48 steps"), (11, "· the slowest of 11")):
        run = RunFollower()
        run.start(info(ranks))
        run.feed(records(ranks, 20, slow=ranks - 1), [])
        text = [line.split()[:1] for line in lines(live_picture(run, "demo", 0.0))]
        assert [int(word[0]) for word in text if word and word[0].isdecimal() and int(word[0]) < ranks][-10:] == [
            *range(9), ranks - 1,
        ]  # fmt: skip
        assert any(line.rstrip().endswith(heading) for line in lines(live_picture(run, "demo", 0.0)))


def test_the_two_newest_verdicts_are_shown_and_a_death_has_no_price():
    run = following(4, slow=1)
    run.feed([], [{"kind": "verdict", "verdict": verdict(ranks=[2], cause="first")}])
    run.feed([], [{"kind": "verdict", "verdict": verdict(kind="dead_rank", ranks=[3], cause="killed")}])
    shown = [line.rstrip() for line in lines(live_picture(run, "demo", 0.0))]
    told = shown[next(n for n, line in enumerate(shown) if line.startswith("●")) :]
    assert told == [
        "● rank 2 is 30% slower than the others since step 20",
        "  first",
        "  cost so far: 0.600 rank-seconds",
        "● rank 3 died at step 20",
        "  killed",
    ]
    run = following()
    cause = next(line for line in lines(live_picture(run, "x", 1.0)) if "most of the extra" in line)
    assert cause.rstrip()[-1] == "…"


def test_lines_for_logs():
    quick = RunFollower()
    quick.start(info(6))
    quick.feed(records(6, 1, slow=5), [])
    assert status_line(quick, 61.0) == (
        "01:01  1 step  loss 5.500  rank 0: own 100 ms wait 30.0 ms  rank 1: own 100 ms wait 30.0 ms  "
        "rank 2: own 100 ms wait 30.0 ms  rank 5: own 130 ms wait 0 s  (medians, last 16 steps)"
    )
    run = following()
    line = status_line(run, 75.0)
    assert "40 steps of at most 100" in line
    assert "rank 1: own 130 ms wait 0 s" in line
    assert line.endswith("(medians, last 16 steps)")
    assert verdict_line(run.findings[0]).startswith("rank 1 is 30% slower than the others since step 20: most of")


def test_the_closing_words_are_without_blanks_at_the_end_of_lines_and_without_a_minus_for_the_healthy():
    summary = summarise(info(2), list(records(2, 60, slow=1)), [Verdict(**verdict())])
    shown = lines(closing_summary(summary, [Verdict(**verdict())]), width=80)
    assert [line for line in shown if line != line.rstrip()] == []
    assert "   0    100 ms  30.0 ms" in shown
    assert "−23%" not in "".join(shown)
    assert "+30.0%" in "".join(shown)


def test_the_closing_words_tell_who_why_price_and_what_to_do_before_the_table():
    found = [Verdict(**verdict(cost_rank_seconds=7200.0))]
    summary = summarise(info(12), list(records(12, 30, slow=1)), found)
    text = "\n".join(lines(closing_summary(summary, found), width=60))
    order = [
        "rank 1 is 30% slower",
        "most of the extra",
        "2.00 rank-hours",
        "move it",
        "own vs others' median",
        "30 steps",
    ]
    positions = [text.index(words) for words in order]
    assert positions == sorted(positions)
    calm = summarise(info(2), list(records(2, 60)), [])
    assert "No straggler detected. A rank 10% slower would have been found." in "\n".join(
        lines(closing_summary(calm, []), width=100)
    )
    few = summarise(info(2), list(records(2, 12)), [])
    assert "No verdict. A rank 10% slower might not" in "\n".join(lines(closing_summary(few, []), width=100))
    assert "No training step" in "\n".join(lines(closing_summary(summarise(info(2), [], []), [])))


def test_many_ranks_are_ten_slowest_first():
    for ranks, shown in ((10, list(range(10))), (11, [7, 0, 1, 2, 3, 4, 5, 6, 8, 9])):
        summary = summarise(info(ranks), list(records(ranks, 30, slow=7)), [])
        rows = [line.split() for line in lines(rank_table(summary))[1:]]
        assert [int(row[0]) for row in rows] == shown
    assert next(row[1:] for row in rows if row[0] == "7") == ["130", "ms", "0", "s", "+30.0%"]


def test_the_closing_line_of_medians():
    summary = summarise(info(2), list(records(2, 60, slow=1)), [])
    text = " ".join(" ".join(lines(closing_summary(summary, []), width=100)).split())
    assert (
        "Medians, whole run: 60 steps of 131 ms; 13 MB of gradients per step over ringside: exposed 1.00 ms "
        "(0.8% of the step); monitoring overhead" in text
    )
    assert "lost, summed over ranks" not in text
    free = Verdict(**verdict(cost_rank_seconds=0.0, advice=""))
    told = [line.strip() for line in lines(closing_summary(summary, [free]), width=400)][:3]
    assert told[0] == "● rank 1 is 30% slower than the others since step 20."
    assert told[1].startswith("why  most of the extra")
    assert not told[2].startswith(("cost", "do"))


def test_before_a_verdict_the_picture_promises_nothing():
    run = RunFollower()
    run.start(info(2))
    run.feed(records(2, 3), [])
    assert lines(live_picture(run, "demo", 1.0))[-1].strip() == "● no verdict so far"


def test_what_is_not_known_is_left_out():
    """A loss that no rank tells, a step that took no time, own times that nobody knows."""
    run = RunFollower()
    run.start(info(2))
    unknown = [
        StepRecord(step=0, rank=rank, ended_unix=0.0, step_seconds=0.0, own_seconds=math.nan) for rank in range(2)
    ]
    run.feed(unknown, [])
    assert [line.rstrip() for line in lines(live_picture(run, "demo", 1.0))[1:]] == [
        "1 step " + "━" * 24,
        "",
        "rank  own  wait  █ own ░ waits for others",
        "   0    –   0 s",
        "   1    –   0 s",
        *[""] * 3,
        "● no verdict so far",
    ]
    assert status_line(run, 1.0) == (
        "00:01  1 step  rank 0: own – wait 0 s  rank 1: own – wait 0 s  (medians, last 16 steps)"
    )


@given(FLOATS, st.integers(0, 40))
def test_a_sparkline_is_as_long_as_it_may_be(values, cells):
    line = sparkline(values, cells)
    assert len(line) == min(len(values), cells)
    assert set(line) <= set("▁▂▃▄▅▆▇█")
