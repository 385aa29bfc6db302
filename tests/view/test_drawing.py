from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from ringside.errors import UsageError
from ringside.schedule import (
    ALGORITHMS,
    COLLECTIVES,
    Round,
    Schedule,
    binomial_broadcast,
    by_name,
    contributions,
    direct,
    direct_all_to_all,
    direct_scatter,
    from_rounds,
    hierarchical,
    in_network,
    on_group,
    pipelined,
    ring,
    tree,
    two_tree,
)
from ringside.view.schedule.drawing import rank_colour, schedule_html, schedule_sheet, schedule_svg
from ringside.view.schedule.frames import ScheduleFrames

EVERY = [*ALGORITHMS, *COLLECTIVES]


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def with_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in root.iter() if name in element.get("class", "").split()]


def corners(path: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"M(-?[\d.]+) (-?[\d.]+)h", path.get("d", ""))]


def cells_of(node: ElementTree.Element, name: str, key: str = "") -> list[list[str]]:
    """Per cell of a node, the `key` of every path of a class that has a rectangle in it."""
    (track,) = with_class(node, "track")
    size = float(re.findall(r"h([\d.]+)", track.get("d", ""))[0])
    found: list[list[str]] = []
    for x, y in corners(track):
        inside = [
            path.get(key, name)
            for path in with_class(node, name)
            for u, v in corners(path)
            if x - 1.5 <= u < x + size - 0.01 and y - 1.5 <= v < y + size - 0.01
        ]
        found.append(inside)
    return found


def contents(root: ElementTree.Element) -> list[list[list[int]]]:
    """Read off the picture which ranks' strips are lit, as [node][cell]."""
    return [[[int(rank) for rank in cell] for cell in cells_of(node, "part", "data-rank")]
            for node in with_class(root, "node")]  # fmt: skip


def page_data(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return dict(json.loads(found[1].replace("<\\/", "</")))


def frame(schedule: Schedule, k: int) -> ElementTree.Element:
    return parsed(schedule_svg(schedule, k))


def arrows(root: ElementTree.Element) -> list[tuple[str | None, str | None, str]]:
    return [(a.get("data-src"), a.get("data-dst"), "".join(a.itertext())) for a in with_class(root, "arrow")]


@pytest.mark.parametrize("k", range(7))
def test_the_cells_show_what_every_chunk_contains(k: int):
    held = list(contributions(ring(4)))[k]
    expected = [[[r for r in range(4) if held[rank, chunk, r]] for chunk in range(4)] for rank in range(4)]
    root = frame(ring(4), k)
    assert contents(root) == expected
    done = [bool(cell) for node in with_class(root, "node") for cell in cells_of(node, "done")]
    assert done == [members == [0, 1, 2, 3] for row in expected for members in row]


def test_the_arrows_say_who_sends_what_and_how():
    root = frame(ring(4), 0)
    assert arrows(root) == [("0", "1", "+ c3"), ("1", "2", "+ c0"), ("2", "3", "+ c1"), ("3", "0", "+ c2")]
    assert len(with_class(root, "add")) == 4
    assert not with_class(root, "copy")
    later = with_class(frame(ring(4), 3), "copy")
    assert ["".join(a.itertext()) for a in later] == ["= c0", "= c1", "= c2", "= c3"]
    assert not with_class(frame(ring(4), 6), "arrow")


def test_messages_between_the_same_two_ranks_share_an_arrow():
    schedule = from_rounds("two", 2, 2, [Round.of([(0, 1, 0, 1), (0, 1, 1, 1), (1, 0, 1, 0)])])
    assert arrows(frame(schedule, 0)) == [("0", "1", "+ c0 c1"), ("1", "0", "= c1")]


def test_a_repeated_contribution_is_marked():
    schedule = from_rounds("twice", 2, 1, [Round.of([(0, 1, 0, 1)]), Round.of([(0, 1, 0, 1)])])
    assert len(with_class(frame(schedule, 2), "double")) == 1


def test_in_a_barrier_it_is_not():
    root = frame(by_name("dissemination_barrier", 5), 3)
    assert not with_class(root, "double")
    assert len(with_class(root, "done")) == 5


def test_many_contributions_are_drawn_as_levels():
    root = frame(ring(20), 10)
    assert not with_class(root, "part")
    assert sum(len(corners(path)) for path in with_class(root, "level")) == 400


def test_a_chunk_that_a_rank_does_not_hold_is_empty():
    assert contents(frame(binomial_broadcast(6, 2), 1)) == [[[]], [[]], [[2]], [[2]], [[]], [[]]]


def test_a_scatter_shows_whose_the_chunks_are():
    root = frame(direct_scatter(4, 1), 1)
    assert contents(root)[1] == [[1]] * 4
    assert contents(root)[3] == [[], [], [], [1]]
    assert [bool(cell) for cell in cells_of(with_class(root, "node")[3], "done")] == [False, False, False, True]


def test_an_all_to_all_turns_rows_into_columns():
    nodes = contents(frame(direct_all_to_all(3), 1))
    assert nodes[1] == [[], [0], [], [1], [1], [1], [], [2], []]


def test_a_large_all_to_all_leaves_out_what_a_rank_never_has():
    assert [len(cells) for cells in contents(frame(direct_all_to_all(12), 0))] == [23] * 12


def test_a_rank_that_takes_no_part_is_there():
    assert contents(frame(on_group(ring(2), [0, 2], 3), 2)) == [[[0, 2]] * 2, [[], []], [[0, 2]] * 2]


def test_the_switch_is_a_vertex_of_its_own_and_forgets():
    root = frame(in_network(3), 1)
    assert len(with_class(root, "switch")) == 1
    assert len(with_class(root, "disc")) == 3
    assert contents(root)[3] == [[0, 1, 2]]
    assert arrows(root)[0] == ("3", "0", "= c0")


@pytest.mark.parametrize("n", [7, 8])
def test_both_trees_of_a_two_tree_are_drawn(n: int):
    root = frame(two_tree(n), 0)
    nodes = with_class(root, "node")
    assert [int(node.get("data-vertex", "")) for node in nodes] == [*range(n), *range(n)]
    assert len(with_class(root, "rail")) == 2 * (n - 1)
    assert {"tree0", "tree1"} <= {
        name for arrow in with_class(root, "arrow") for name in arrow.get("class", "").split()
    }
    for part, chosen in enumerate((nodes[:n], nodes[n:])):
        assert {"".join(with_class(node, "chunk")[0].itertext()) for node in chosen} == {f"c{part}"}


def test_chunks_that_travel_alike_are_one_part():
    schedule = hierarchical([3, 2, 4])
    story = ScheduleFrames(schedule)
    assert schedule.chunks == 36
    assert len(story.members) == 18
    assert sorted(itertools.chain(*story.members)) == list(range(36))
    held = list(contributions(schedule))
    for chunks in story.members:
        for counts in held:
            assert all((counts[:, chunk] == counts[:, chunks[0]]).all() for chunk in chunks)
    assert story.to_complete == 9 * 36
    assert [frame.complete for frame in story.frames()][-1] == 9 * 36


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 16])
def test_all_of_every_algorithm_ends_complete(name: str, n: int):
    schedule = by_name(name, n)
    story = ScheduleFrames(schedule)
    last = list(story.frames())[-1]
    assert last.complete == story.to_complete
    assert not last.double.any()


def test_a_sheet_shows_all_rounds_side_by_side():
    root = parsed(schedule_sheet(tree(4)))
    titles = ["".join(text.itertext()) for text in with_class(root, "title")]
    rounds = ["round 1 · reduce", "round 2 · reduce", "round 3 · broadcast", "round 4 · broadcast"]
    assert titles == ["tree, 4 ranks: 1 chunk, 4 rounds", *rounds, "done"]
    assert len(with_class(root, "node")) == 5 * 4
    assert not with_class(root, "more")


@pytest.mark.parametrize("n", [3, 4, 5, 7, 12])
def test_no_figure_is_alone_in_the_last_row_of_a_sheet(n: int):
    places = [(text.get("x"), text.get("y")) for text in with_class(parsed(schedule_sheet(ring(n))), "title")[1:]]
    rows = [y for _, y in places]
    assert rows.count(rows[-1]) > 1 or len(set(rows)) == len(rows)


def test_a_long_sheet_says_what_it_leaves_out():
    root = parsed(schedule_sheet(ring(8)))
    assert len(with_class(root, "title")) == 1 + 12
    assert "".join(with_class(root, "more")[0].itertext()) == "and 2 more rounds"
    assert "".join(with_class(parsed(schedule_sheet(ring(7))), "more")[0].itertext()) == "and the end"


def test_a_sheet_is_as_wide_as_its_heading():
    short, long = (parsed(schedule_sheet(ring(2), "m" * letters)) for letters in (1, 200))
    widths = [float(root.get("width", "")) for root in (short, long)]
    assert widths[1] > 9 * 200
    assert widths[0] == float(parsed(schedule_sheet(ring(2), "m" * 2)).get("width", "")), "the drawing is wider"


def test_colours_differ():
    assert len({rank_colour(rank, 64) for rank in range(64)}) == 64


def test_the_page_needs_nothing_else_and_reads_without_a_script():
    page = schedule_html(ring(4))
    assert not re.search(r'\s(src|href)="|@import|url\(', page)
    assert "{{" not in page
    assert (
        "6 rounds (lower bound: 2) · each rank sends up to 1.5 × the tensor, optimal: (n−1)/n to add + (n−1)/n" in page
    )
    assert "as sums · 4 chunks · one peer at a time · verified all-reduce" in page
    assert '<b id="name">Round 1 of 6 · reduce-scatter</b>' in page
    body = page.split("<script")[0]
    assert body.count("<li value=") == 6
    assert "Rank 0 sends c3 to rank 1, which adds it; rank 1 sends c0 to rank 2" in body
    assert body.count('class="arrow add"') == 4
    assert 'aria-live="polite">Partial sums travel on. Rank 0 sends c3 to rank 1' in body
    assert "prefers-reduced-motion" in body
    assert "prefers-color-scheme:dark" in body


def test_the_page_carries_the_messages_as_numbers():
    data = page_data(schedule_html(direct(3)))
    rounds, links, cards = data["rounds"], data["links"], data["cards"]
    assert isinstance(rounds, list)
    assert isinstance(links, list)
    assert isinstance(cards, list)
    sent = []
    for code in rounds:
        step, i = [], 0
        while i < len(code):
            src, dst = (cards[node][0] for node in links[code[i] >> 1][:2])
            step += [(src, dst, part, bool(code[i] & 1)) for part in code[i + 2 : i + 2 + code[i + 1]]]
            i += 2 + code[i + 1]
        sent.append(step)
    assert sent == [list(direct(3).round(0)), list(direct(3).round(1))]
    captions = data["captions"]
    assert isinstance(captions, list)
    assert captions[2] == "After 2 rounds every rank holds the complete sum of every chunk."
    assert captions[0].endswith("Then 3 of 9 chunks are complete.")


@pytest.mark.parametrize(
    "schedule",
    [ring(64), direct(64), two_tree(64), by_name("hierarchical", 61), pipelined(ring(64), 4), direct_all_to_all(64)],
    ids=lambda s: f"{s.name}-{s.chunks}",
)
def test_the_largest_pages_stay_small(schedule: Schedule):
    assert len(schedule_html(schedule)) < 2e6


@pytest.mark.parametrize(
    ("schedule", "phases"),
    [
        (ring(3), ["reduce-scatter"] * 2 + ["all-gather"] * 2),
        (tree(2), ["reduce", "broadcast"]),
        (by_name("one_shot", 3), ["all-reduce"]),
        (by_name("recursive_doubling", 3), ["all-reduce", "all-reduce", "broadcast"]),
        (pipelined(ring(2), 2), ["reduce-scatter", "reduce-scatter and all-gather", "all-gather"]),
        (pipelined(two_tree(7), 3), ["reduce"] * 3 + ["reduce and broadcast"] * 2 + ["broadcast"] * 3),
        (in_network(3), ["reduce", "broadcast"]),
        (binomial_broadcast(4), ["broadcast"] * 2),
        (by_name("ring_all_gather", 3), ["all-gather"] * 2),
        (
            hierarchical([2, 2]),
            [f"reduce-scatter {where} hosts" for where in ("inside", "between")]
            + [f"all-gather {where} hosts" for where in ("between", "inside")],
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Schedule) else "",
)
def test_phases_are_read_off_the_messages(schedule: Schedule, phases: list[str]):
    assert list(ScheduleFrames(schedule).phases) == phases


def test_a_label_that_would_cover_others_is_a_dot():
    root = frame(hierarchical([3, 2, 4]), 1)
    boxes = []
    for pill in with_class(root, "pill"):
        x, y = (float(value) for value in re.findall(r"-?[\d.]+", pill.get("transform", "")))
        boxes += [(x, y, float(rect.get("width", ""))) for rect in pill.iter() if rect.get("rx") == "8"]
    assert boxes
    for (x, y, wide), (u, v, w) in itertools.combinations(boxes, 2):
        assert abs(x - u) >= (wide + w) / 2 or abs(y - v) >= 19


def test_the_bounds_are_beside_the_cost():
    assert "6 rounds (lower bound: 3) · each rank sends up to 3 × the tensor (lower bound: 1.667)" in schedule_html(
        tree(6)
    )
    assert "up to 1 × the tensor (lower bound: 1.6, beaten by a switch that reduces)" in schedule_html(in_network(5))


def test_a_wrong_schedule_says_so_on_its_page():
    half = from_rounds("half", 2, 1, [Round.of([(0, 1, 0, 1)])])
    page = schedule_html(half)
    assert "WRONG: chunk 0 of rank 0 ends as x0 (no round writes it)" in page
    assert "After 1 round only 1 of 2 chunks are complete." in page


def test_names_cannot_break_the_page():
    page = schedule_html(from_rounds("</script><b>", 2, 1, [Round.of([(0, 1, 0, 1)])]))
    assert "</script><b>" not in page


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(UsageError, match="room for 64 ranks, not 65"):
        schedule_html(ring(65))
    with pytest.raises(UsageError, match="3200 chunks on each of 64 ranks are too many for a picture"):
        schedule_html(pipelined(ring(64), 50))
    with pytest.raises(UsageError, match="rounds 0 to 6, not 7"):
        schedule_svg(ring(4), 7)


def browsed(page: str, folder: Path, script: str, seconds: int, at: str = "#round=3") -> str:
    """Return the page's DOM after a real browser ran it, with an extra script, for so many virtual seconds."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here")
    (folder / "page.html").write_text(page + f"<script>{script}</script>")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    where = [f"--user-data-dir={folder / 'profile'}", f"--virtual-time-budget={1000 * seconds}", "--dump-dom"]
    url = (folder / "page.html").as_uri() + at
    done = subprocess.run([browser, *flags, *where, url], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def press(key: str) -> str:
    return f"document.body.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}}));"


@pytest.mark.parametrize(
    ("script", "name", "complete"),
    [
        ("", "Round 3 of 6 · reduce-scatter", 0),
        (press("ArrowLeft"), "Round 2 of 6 · reduce-scatter", 0),
        (press("ArrowRight"), "Round 4 of 6 · all-gather", 4),
        (press("ArrowRight") * 3, "Round 6 of 6 · all-gather", 12),
        (press(" "), "Done", 16),
        (press("End"), "Done", 16),
        ("document.getElementById('next').click();" + press("Home"), "Round 1 of 6 · reduce-scatter", 0),
    ],
    ids=["deep link", "back", "forward", "faster than the animation", "play", "end", "home"],
)
def test_the_page_steps_and_plays_in_a_browser(tmp_path: Path, script: str, name: str, complete: int):
    dom = browsed(schedule_html(ring(4)), tmp_path, script, seconds=20)
    assert f'<b id="name">{name}</b>' in dom
    current = re.findall(r'<li[^>]*class="current">([a-z-]+)</li>', dom)
    assert current == [part for part in ("reduce-scatter", "all-gather") if part in name]
    figure = parsed(figure_of(dom))
    assert sum(len(corners(path)) for path in with_class(figure, "done")) == complete


def figure_of(dom: str) -> str:
    found = re.search(r"<svg.*?</svg>", dom.split("<figure")[1], re.DOTALL)
    assert found
    return found[0]


def picture(svg: str) -> list[object]:
    """What a picture says: per node its paths with their content, and the arrows with their labels and places."""
    root = parsed(svg)
    nodes = [
        [
            (path.get("class"), path.get("data-rank"), path.get("d"))
            for path in node.iter()
            if path.get("class") in ("track", "part", "level", "done", "double")
        ]
        for node in with_class(root, "node")
    ]
    for hidden in with_class(root, "late"):
        hidden.clear()
    told = [
        (a.get("class"), a.get("data-src"), a.get("data-dst"), "".join(a.itertext())) for a in with_class(root, "arrow")
    ]
    return [nodes, told]


KEEP_EVERY_ROUND = """
const kept = [], seek = document.getElementById('seek');
for (let k = 0; k <= +seek.max; k++) {
  seek.value = k;
  seek.oninput({target: seek});
  kept.push(new XMLSerializer().serializeToString(document.querySelector('figure svg')));
}
const box = document.createElement('textarea');
box.id = 'kept';
box.textContent = encodeURIComponent(JSON.stringify(kept));
document.body.append(box);
"""

# One page per behaviour of the page's own arithmetic, each compared with what is drawn here, in all rounds at once.
SEVERAL = {
    "pipelined two-tree": pipelined(two_tree(7), 3),
    "hosts of unequal sizes": hierarchical([3, 2, 4]),
    "a switch": in_network(6),
    "pieces that ranks own": by_name("ring_all_gather", 5),
    "blocks": direct_all_to_all(4),
    "more than 32 ranks": by_name("recursive_doubling", 40),
    "many arrows": direct(5),
    "a barrier": by_name("dissemination_barrier", 6),
    "a contribution twice": from_rounds("x", 3, 1, [Round.of([(0, 1, 0, 1)]), Round.of([(0, 1, 0, 1), (1, 2, 0, 0)])]),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_the_page_works_out_what_is_drawn_here(tmp_path: Path, name: str):
    schedule = SEVERAL[name]
    dom = browsed(schedule_html(schedule), tmp_path, KEEP_EVERY_ROUND, seconds=5, at="")
    found = re.search(r'<textarea id="kept">(.*?)</textarea>', dom, re.DOTALL)
    assert found
    drawn = json.loads(unquote(found[1]))
    assert len(drawn) == schedule.rounds + 1
    for k, svg in enumerate(drawn):
        ours, theirs = picture(schedule_svg(schedule, k)), picture(svg)
        assert theirs == ours, f"round {k}"


def test_a_switch_is_a_hexagon_around_its_name() -> None:
    """Six corners that lie the same way left and right, and above and below."""
    root = parsed(schedule_svg(in_network(4), 1))
    (path,) = with_class(root, "switch")
    (name,) = with_class(root, "switched")
    x, y = float(name.get("x", "")), float(name.get("y", ""))
    spots = [(float(a) - x, float(b) - y) for a, b in re.findall(r"[ML](-?[\d.]+)[ ,](-?[\d.]+)", path.get("d", ""))]
    assert len(spots) == 6
    for across, down in ((-1, 1), (1, -1)):
        assert sorted((across * a, down * b) for a, b in spots) == [
            pytest.approx(spot, abs=0.11) for spot in sorted(spots)
        ]
    widths = sorted(abs(a) for a, _ in spots)
    assert widths[:4] == pytest.approx([0.66 * widths[-1]] * 4, rel=0.02)
