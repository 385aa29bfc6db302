from __future__ import annotations

import re

import pytest

from ringside.doctor.findings import EvidenceHop, Findings, Lane, Note, Question, Rings, Sheet, TimeSpan, Unjudged
from ringside.monitor.verdict import KINDS, Verdict
from ringside.text import figure, title
from ringside.view.html.doctor import doctor_page, lanes_figure
from ringside.view.html.rings import rings_figure, transport_class
from ringside.view.verdict_text import answer_text, finding_text, what_if_line

NOTE = Note(file="a", kind="NCCL log", text="read")


def verdict(kind: str = "hang", ranks: tuple[int, ...] = (1,), **evidence: str | int | float) -> Verdict:
    return Verdict(
        kind=kind, ranks=list(ranks), since_step=-1, detected_step=-1, excess_ratio=0.1, evidence=evidence, cause="so"
    )


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("step_seconds", 0.0147, "14.7 ms"),
        ("mean_s", 2e-6, "2.00 µs"),
        ("small_seconds_ratio", 0.854, "85.4%"),
        ("size_bytes", 4096, "4.10 kB"),
        ("busbw_bytes_per_second", 2.76e10, "27.6 GB/s"),
        ("cost_rank_hours", 0.0234, "84.2 rank-seconds"),
        ("collective_seq_id", 20537, "20537"),
        ("group", "74", "74"),
        ("wait_seconds", None, "–"),
    ],
)
def test_figures_have_the_unit_of_their_name(name: str, value: float | int | str | None, said: str) -> None:
    assert figure(name, value) == said


def test_units_stand_with_the_value_not_with_the_name() -> None:
    assert [title(name) for name in ("step_seconds", "worst_excess_ratio", "collective_seq_id")] == [
        "step",
        "worst excess",
        "collective seq id",
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [(), (3,), (3, 4), tuple(range(20))])
def test_every_kind_has_a_headline_that_is_a_sentence(kind: str, ranks: tuple[int, ...]) -> None:
    said = finding_text(verdict(kind, ranks)).headline
    assert said[0].isupper()
    assert said.endswith(".")
    assert len(said) < 120
    if len(ranks) > 1:
        assert not re.search(r"Ranks .* (?:is|gets|needs|waits|differs) ", said)


def test_answers_say_yes_no_or_that_nobody_can_tell() -> None:
    assert answer_text(Question(answer=True, words="it does")) == "Yes. It does."
    assert answer_text(Question(answer=None)) == "Not enough data."
    assert (
        what_if_line({"slowdown": 1.1791, "worst_worker_share": 0.031})
        == "the job would run 1.18 × faster, worst worker share 3.1%"
    )


def test_the_page_says_first_what_is_known() -> None:
    assert "Nothing wrong was found." in doctor_page(Findings(notes=[NOTE]))
    unjudged = [Unjudged(what="who", why="one rank of eight")]
    page = doctor_page(Findings(notes=[NOTE], unjudged=unjudged))
    assert "in what could be judged" in page
    assert "one rank of eight" in page
    assert "Nothing here could be read" in doctor_page(Findings(notes=[Note(file="a", used=False)]))


def test_lanes_mark_waits_and_culprits() -> None:
    lanes = [
        Lane(
            title="t",
            rank=0,
            spans=[TimeSpan(start_s=0, end_s=1, kind="compute"), TimeSpan(start_s=1, end_s=3, kind="wait")],
        ),
        Lane(title="t", rank=1, spans=[TimeSpan(start_s=0, end_s=3, kind="compute")], note="culprit"),
    ]
    page = doctor_page(Findings(verdicts=[verdict()], lanes=lanes, notes=[NOTE]))
    assert 'aria-label="rank 0: waited 2.00 s"' in page
    assert 'aria-label="rank 1: waited 0 s, culprit"' in page
    assert re.search(r'<rect class="wait" x="3333" y="0" width="6667"', page)
    assert page.count('<figure class="lanes">') == 1


def test_rings_show_hosts_transports_and_breaks() -> None:
    hops = [
        EvidenceHop(src=0, dst=1, via="NVLink P2P"),
        EvidenceHop(src=1, dst=2, via="NET/IB GDRDMA", between_hosts=True),
        EvidenceHop(src=2, dst=0, wrong="never connected", between_hosts=True),
    ]
    rings = Rings(
        title="comm", nranks=3, hosts=["left", "left", "right"], rings={0: hops, 1: hops}, trees={0: hops[:1]}
    )
    page = doctor_page(Findings(rings=[rings], notes=[NOTE]))
    assert page.count("ring of channels 0 and 1, 2 hops between hosts") == 1
    assert page.count('class="hostarc') == 2
    assert 'class="hop broken between"' in page
    assert "1 → 2 via NET/IB GDRDMA" in page
    assert "tree of channel 0, 2 levels" in page


@pytest.mark.parametrize("levels", [2, 3, 5])
def test_a_tree_reaches_from_the_top_of_its_drawing_to_the_bottom(levels: int) -> None:
    hops = [EvidenceHop(src=rank, dst=rank - 1, via="P2P") for rank in range(1, levels)]
    page = doctor_page(Findings(rings=[Rings(title="c", nranks=levels, trees={0: hops})], notes=[NOTE]))
    heights = [float(y) for y in re.findall(r'<circle class="node[^"]*" cx="[\d.]+" cy="([\d.]+)"', page)]
    assert heights == sorted(heights)
    assert (heights[0], heights[-1], len(heights)) == (40, 380, levels)


def test_a_ring_that_crosses_between_hosts_too_often_shows_where() -> None:
    def ring_over(hosts: list[str]) -> str:
        hops = [
            EvidenceHop(src=rank, dst=(rank + 1) % 4, via="NET/IB", between_hosts=hosts[rank] != hosts[(rank + 1) % 4])
            for rank in range(4)
        ]
        return doctor_page(Findings(rings=[Rings(title="c", nranks=4, hosts=hosts, rings={0: hops})], notes=[NOTE]))

    crossing = ring_over(["a", "b", "a", "b"])
    assert "ring of channel 0, 4 hops between hosts where 2 would do" in crossing
    assert crossing.count('class="crossing mark"') == crossing.count('class="hop crossing between"') == 4
    assert "crosses between hosts (and a stroke)" in crossing
    best = ring_over(["a", "a", "b", "b"])
    assert "ring of channel 0, 2 hops between hosts<" in best
    assert 'class="hop crossing' not in best
    assert "crosses between hosts" not in best


def test_two_hops_are_bent_to_their_left_and_end_before_the_next_node() -> None:
    """Nodes have a radius of 17 on a circle of 132 around (210, 210); an arrow ends 5 before the node."""

    def paths(*pairs: tuple[int, int]) -> list[str]:
        hops = [EvidenceHop(src=src, dst=dst, via="SHM") for src, dst in pairs]
        figure = rings_figure(Rings(title="c", nranks=3, rings={0: hops}), set())
        return re.findall(r'<path class="hop shm" d="(.*?)"', figure)

    assert paths((0, 1), (1, 0)) == ["M210.0 95.0Q184.0 207.5 210.0 320.0", "M210.0 325.0Q236.0 212.5 210.0 100.0"]
    assert paths((0, 1), (1, 2))[1] == "M307.3 276.0Q212.5 250.0 117.7 276.0", "broken open, with three places"
    assert paths((0, 1), (1, 2), (2, 0))[1] == "M307.3 276.0Q212.5 276.0 117.7 276.0", "three stand apart: straight"


def test_transports_have_styles() -> None:
    vias = ("NVLink P2P", "PCIe P2P", "SHM", "NET/Socket", "NET/IB", "NET/IB GDRDMA", "")
    assert [transport_class(via) for via in vias] == ["nvlink", "pcie", "shm", "socket", "net", "rdma", "other"]


def test_tables_put_culprits_first_where_they_are_long() -> None:
    rows: list[list[float | int | str | None]] = [[rank, f"host-{rank}"] for rank in range(40)]
    page = doctor_page(
        Findings(sheets=[Sheet(title="t", columns=["rank", "host"], rows=rows, culprits=[33])], notes=[NOTE])
    )
    assert page.index("host-33") < page.index("host-0<")
    assert page.count("<tr class=culprit>") == 1


@pytest.mark.parametrize(
    ("count", "first", "left_out"), [(16, 0, 0), (17, 9, 0), (256, 9, 0), (257, 9, 1), (300, 9, 44)]
)
def test_a_table_has_256_rows_and_culprits_first_from_17_on(count: int, first: int, left_out: int) -> None:
    rows: list[list[float | int | str | None]] = [[n, f"at {n}"] for n in range(count)]
    sheet = Sheet(title="t", columns=["step_seconds", "host"], rows=rows, culprits=[9], note="as it was.")
    page = doctor_page(Findings(sheets=[sheet], notes=[NOTE]))
    shown = [int(n) for n in re.findall(r"<td class=.text.>at (\d+)</td>", page)]
    assert (shown[0], len(shown)) == (first, count - left_out)
    note = f"as it was. {left_out} more rows are in --json." if left_out else "as it was."
    assert f'<p class="note">{note}</p>' in page
    assert '<th scope="col">step</th><th scope="col" class="text">host</th>' in page


def test_lanes_share_their_axis_and_no_span_is_too_narrow_to_be_seen() -> None:
    spans = [
        TimeSpan(start_s=-1, end_s=0.0, kind="compute"), TimeSpan(start_s=0.001, end_s=0.002, kind="strange"),
        TimeSpan(start_s=1, end_s=4, kind="wait", name="all_reduce"), TimeSpan(start_s=4, end_s=8, kind="missing"),
    ]  # fmt: skip
    figure = lanes_figure([Lane(title="what ranks did", rank=0, spans=spans), Lane(title="x", rank=1, spans=[])])
    bars = re.findall(r'<rect class="(\w+)" x="(\d+)" y="0" width="(\d+)" height="10"><title>(.*?)</title>', figure)
    assert bars == [
        ("compute", "0", "1250", "compute, 1.00 s"),
        ("idle", "1", "8", "strange, 1.00 ms"),
        ("wait", "1250", "3750", "all_reduce, 3.00 s"),
        ("missing", "5000", "5000", "culprit: not there, or stopped, 4.00 s"),
    ]
    assert "<figcaption>What ranks did</figcaption>" in figure
    assert re.findall(r'<i class="(\w+)">', figure) == ["compute", "wait", "missing"]
    assert re.findall(r"<span>(.*?)</span>", figure) == ["0 s", "2.00 s", "4.00 s", "6.00 s", "8.00 s"]
    assert lanes_figure([Lane(title="x", rank=0, spans=spans[:1])]) == "", "all of it is before the first moment"


def test_the_first_evidence_is_open_and_files_while_they_are_few() -> None:
    pages = [
        doctor_page(Findings(verdicts=[verdict(size_bytes=4096, nothing=""), verdict(ranks=(2,), size_bytes=1)],
                             notes=[NOTE] * count))
        for count in (1, 12, 13)
    ]  # fmt: skip
    assert re.findall(r'<details class="evidence"( open)?>', pages[0]) == [" open", ""]
    assert [re.findall(r"<details( open)?><summary><h2>(.*?)</h2>", page.replace("\n", " ")) for page in pages] == [
        [(" open", "1 file")], [(" open", "12 files")], [("", "13 files")],
    ]  # fmt: skip
    assert [re.search(r"(\d+ of \d+ files? read)", page)[1] for page in pages] == [  # type: ignore[index]
        "1 of 1 file read", "12 of 12 files read", "13 of 13 files read",
    ]  # fmt: skip
    assert "nothing" not in pages[0].partition('class="evidence"')[2].partition("</details>")[0]
    assert re.findall(r"<h(\d)>Rank \d did not arrive", pages[0]) == ["1", "2"]
