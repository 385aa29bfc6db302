"""Pages, traces and what the page's server and a notebook are told, of recorded input.

Their own styles and scripts are left out; what depends on the moment or the place is named where it is replaced.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.golden.calls import Call
from tests.support.golden import Golden, broken_up, rounded, without_own_files

from ringside.doctor.findings import EvidenceHop, Findings, Lane, Note, Question, Rings, Sheet, TimeSpan, Unjudged
from ringside.monitor.verdict import KINDS, Verdict
from ringside.view.html.doctor import doctor_page
from ringside.view.run.recorded import Run
from ringside.view.server.feed import key_of
from ringside.view.tui.source import Local, take_snapshot

H100 = "--preset dgx-h100 --hosts 2 --ranks-per-host 4"
FOUR_HOSTS = "--preset ethernet-10g --hosts 4"
RATES = "--price 2 --watts 700"
PAGES = {
    "doctor-runs": "doctor demo hosts",
    "doctor-dumps": "doctor data/flight_recorder/gpu_error_1st",
    "doctor-one-trace": "doctor data/kineto/rank_not_found.json.gz",
    "plan": f"predict {H100} --model 7B --memory 80GB --compute-seconds 0.2",
    "plan-of-run": "predict --run hosts --preset ethernet-10g --hosts 2 --ranks-per-host 4",
    "score": "predict score data/bandwidth/aws_p5_h100_2n16g.csv data/bandwidth/mi300x_2n16g.csv",
    "simulation": f"predict simulate ring {FOUR_HOSTS} --bytes 4MB --slow-link 1:2=4 --late 3=5ms",
    "simulation-hosts": f"predict simulate hierarchical {H100} --bytes 64MB --slow-link 3:4=3",
    "what-if": f"what-if {H100} --bytes 1GB --compute-seconds 0.2 --slow-rank 3=10% --slow-link 0:4=2 {RATES}",
    "what-if-run": "what-if hosts --preset ethernet-10g --hosts 2 --ranks-per-host 4 --bucket 2MB --slow-link 0:4=3",
}


@pytest.mark.parametrize("run", ["demo", "hosts"])
def test_a_report_is_as_it_was(run: str, command: Call, golden: Golden) -> None:
    assert command(f"report {run} --json")[0] == 0
    golden.check(f"pages/report-{run}.html", without_own_files(Path(run, "report.html").read_text()))


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_as_it_was(name: str, command: Call, golden: Golden) -> None:
    status, _, error = command(f"{PAGES[name]} --html page.html")
    assert status in (0, 1, 4), error
    golden.check(f"pages/{name}.html", without_own_files(Path("page.html").read_text()))


def rings(ranks: int) -> Rings:
    """Two channels among so many ranks, three to a host, by every transport there is; one hop is broken."""
    vias = ("NVLink P2P", "PCIe P2P", "SHM", "NET/Socket", "NET/IB", "NET/IB GDRDMA", "")
    hops = [
        EvidenceHop(src=rank, dst=(rank + 1) % ranks, via=vias[rank % len(vias)], between_hosts=rank % 3 == 2)
        for rank in range(ranks if ranks > 1 else 0)
    ]
    back = [
        EvidenceHop(src=hop.dst, dst=hop.src, via=hop.via, wrong="never connected" if hop.src == 1 else "")
        for hop in hops
    ]
    trees = {0: [EvidenceHop(src=rank, dst=(rank - 1) // 2, via="NET/IB") for rank in range(1, ranks)]}
    hosts = [f"a-host-with-a-long-name-{rank // 3}" for rank in range(ranks)]
    return Rings(title=f"group of {ranks}", nranks=ranks, hosts=hosts, rings={0: hops, 1: back}, trees=trees, note="so")


def spans(rank: int) -> list[TimeSpan]:
    """One of every kind, later on later ranks."""
    kinds = ("compute", "communication", "hidden", "wait", "idle", "missing")
    begins = [k / 4 + rank / 64 for k in range(len(kinds))]
    return [
        TimeSpan(start_s=at, end_s=at + 0.2, kind=kind, name=f"a {kind}")
        for at, kind in zip(begins, kinds, strict=True)
    ]


def test_a_page_of_everything_a_doctor_can_find_is_as_it_was(golden: Golden) -> None:
    lanes = [
        Lane(title=title, rank=rank, spans=spans(rank), note="culprit" if rank == 5 else "")
        for title, count in (("forward", 3), ("backward", 40))
        for rank in range(count)
    ]
    verdicts = [
        Verdict(
            kind=kind, ranks=[1, 4][: 2 if kind in ("slow_link", "broken_ring") else 1], since_step=-1, detected_step=3,
            excess_ratio=0.25, cause="it is so", evidence={"step_seconds": 0.0147, "size_bytes": 4096, "group": "74"},
            cost_rank_seconds=42.0, advice="look at it",
        )
        for kind in KINDS
    ]  # fmt: skip
    rows: list[list[float | int | str | None]] = [[rank, f"host-{rank}", rank / 64, None] for rank in range(40)]
    found = Findings(
        verdicts=verdicts,
        questions={"overlap": Question(answer=True, words="it does", numbers={"exposed_ratio": 0.25})},
        unjudged=[Unjudged(what="who is slow", why="one rank of eight is here")],
        lanes=lanes,
        sheets=[
            Sheet(title="ranks", columns=["rank", "host", "wait_seconds", "x"], rows=rows, culprits=[33], note="so")
        ],
        rings=[rings(ranks) for ranks in (1, 2, 5, 17)],
        notes=[Note(file="a.json", kind="trace", text="8 steps"), Note(file="b", text="it is none", used=False)],
    )
    golden.check("pages/doctor-everything.html", without_own_files(doctor_page(found)))


def test_a_trace_of_a_run_is_as_it_was(command: Call, golden: Golden) -> None:
    assert command("report hosts --perfetto trace.json --steps 29:33")[0] == 0
    golden.check("pages/trace-of-hosts.json", in_lines(json.loads(Path("trace.json").read_text())))


def test_a_trace_of_a_simulation_is_as_it_was(command: Call, golden: Golden) -> None:
    words = "predict simulate ring --preset ethernet-10g --hosts 4 --bytes 4MB --slow-link 1:2=4"
    assert command(f"{words} --perfetto trace.json")[0] == 0
    golden.check("pages/trace-of-simulation.json", in_lines(json.loads(Path("trace.json").read_text())))


def in_lines(trace: dict[str, Any]) -> str:
    """Return a trace with an event a line; times to nine digits, for Unix microseconds have no more."""
    head = {key: value for key, value in trace.items() if key != "traceEvents"}
    return "".join(json.dumps(rounded(one, 9), sort_keys=True) + "\n" for one in (head, *trace["traceEvents"]))


@pytest.mark.parametrize("run", ["demo", "hosts"])
def test_a_run_in_a_notebook_is_as_it_was(run: str, place: Path, golden: Golden) -> None:
    recorded = Run(run)
    golden.check(f"pages/notebook-{run}.html", f"{recorded!r}\n" + broken_up(recorded._repr_html_()))
    pytest.importorskip("anywidget")
    from ringside.notebook import state_of

    state = json.dumps(state_of(take_snapshot(Local(Path(run)))), indent=1, ensure_ascii=False)
    golden.check(f"pages/live-{run}.json", state + "\n")


@pytest.mark.parametrize("run", ["demo", "hosts"])
def test_what_the_server_tells_is_as_it_was(run: str, place: Path, golden: Golden) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    from tests.support.waiting import until
    from tests.view.served import ask, serving, told

    with serving(place / run, place) as url:
        state = until(lambda: (state := told(url))["state"] == "ended" and state["questions"] and state)
        state |= {"epoch": "of this process", "last_record_unix": "when the file was copied"}
        golden.check(f"pages/now-{run}.json", json.dumps(unpacked(state), indent=1, ensure_ascii=False) + "\n")
        steps = {**told(url, "/api/steps"), "epoch": "of this process"}
        golden.check(f"pages/steps-{run}.json", json.dumps(unpacked(steps), ensure_ascii=False) + "\n")
        rank = {**told(url, "/api/rank?rank=1"), "epoch": "of this process"}
        golden.check(f"pages/rank-{run}.json", json.dumps(unpacked(rank), ensure_ascii=False) + "\n")
        index = ask(url, "/runs")[2].decode()
        for other in ("demo", "hosts"):
            index = index.replace(key_of(place / other), f"(key of {other})")
        golden.check(f"pages/index-{run}.html", broken_up(index.replace(str(place), "(here)")))
        pytest.importorskip("prometheus_client")
        golden.check(f"pages/metrics-{run}.txt", scraped(ask(url, "/metrics")[2].decode()))


def scraped(page: str) -> str:
    """Return a page of metrics with its values to six digits, and without the moment at which steps were read."""
    page = re.sub(r"(?m)^(ringside_last_step_timestamp_seconds|ringside_collector_lag_seconds) .*", r"\1 (now)", page)
    return re.sub(r"(?m)^(ringside\S*) (\S+)$", lambda found: f"{found[1]} {_digits(found[2])}", page)


def _digits(value: str) -> str:
    return value if value == "(now)" else f"{float(value):.6g}"


PACKED = {"steps": "<f8", "step": "<f8", "late": "u1", "worst": "<i4", "host_of": "<i4"}
"""What packed arrays hold that are no float32."""


def unpacked(content: Any, name: str = "", *, lines: bool = False) -> Any:
    """Return what a server told with its packed arrays as lists, and figures to four digits."""
    if isinstance(content, dict):
        lines = name in ("figures", "lines") or {"rank", "own"} <= content.keys()
        return {key: unpacked(value, key, lines=lines) for key, value in content.items()}
    if isinstance(content, list):
        return [unpacked(value) for value in content]
    if isinstance(content, str) and name != "epoch" and (lines or name in PACKED):
        values = np.frombuffer(base64.b64decode(content), dtype=PACKED.get(name, "<f4"))
        return rounded([None if value != value else value for value in values.tolist()])
    return rounded(content)
