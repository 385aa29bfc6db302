from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ringside.errors import UsageError
from ringside.schedule import Round, contributions, direct, from_rounds, ring
from ringside.view.drawing import schedule_html, schedule_svg
from ringside.view.drawing_layout import Layout, rank_colour
from ringside.view.drawing_words import schedule_text

SVG = "{http://www.w3.org/2000/svg}"


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def with_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in root.iter() if name in element.get("class", "").split()]


def contents(root: ElementTree.Element) -> list[list[list[int]]]:
    """Read off the picture which ranks' strips are lit, as [rank][chunk]."""
    return [
        [
            [i for i, part in enumerate(with_class(cell, "part")) if "on" in part.get("class", "").split()]
            for cell in cells
        ]
        for cells in (with_class(rank, "cell") for rank in with_class(root, "rank"))
    ]


def page_data(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return dict(json.loads(found[1].replace("<\\/", "</")))


@pytest.mark.parametrize("k", range(7))
def test_the_cells_show_what_every_chunk_contains(k: int):
    held = list(contributions(ring(4)))[k]
    expected = [[[int(r) for r in range(4) if held[rank, chunk, r]] for chunk in range(4)] for rank in range(4)]
    root = parsed(schedule_svg(ring(4), k))
    assert contents(root) == expected
    assert len(with_class(root, "done")) == sum(members == [0, 1, 2, 3] for row in expected for members in row)


def test_the_arrows_say_who_sends_what_and_how():
    root = parsed(schedule_svg(ring(4), 0))
    arrows = with_class(root, "arrow")
    labels = [(a.get("data-src"), a.get("data-dst"), "".join(a.itertext())) for a in arrows]
    assert labels == [("0", "1", "+ c3"), ("1", "2", "+ c0"), ("2", "3", "+ c1"), ("3", "0", "+ c2")]
    assert len(with_class(root, "add")) == 4
    assert not with_class(root, "copy")
    later = parsed(schedule_svg(ring(4), 3))
    assert ["".join(a.itertext()) for a in with_class(later, "copy")] == ["= c0", "= c1", "= c2", "= c3"]
    assert not with_class(parsed(schedule_svg(ring(4), 6)), "arrow")


def test_a_message_shows_what_it_carries():
    second = with_class(parsed(schedule_svg(ring(4), 1)), "arrow")[1]
    bars = with_class(second, "bar")
    # Rank 1 passes c3 on, which holds rank 0's contribution and its own.
    assert [i for i, bar in enumerate(bars) if "off" not in bar.get("class", "").split()] == [0, 1]


def test_messages_between_the_same_two_ranks_share_an_arrow():
    schedule = from_rounds("two", 2, 2, [Round.of([(0, 1, 0, 1), (0, 1, 1, 1), (1, 0, 1, 0)])])
    arrows = with_class(parsed(schedule_svg(schedule, 0)), "arrow")
    assert ["".join(a.itertext()) for a in arrows] == ["+ c0 c1", "= c1"]


def test_a_repeated_contribution_is_marked():
    schedule = from_rounds("twice", 2, 1, [Round.of([(0, 1, 0, 1)]), Round.of([(0, 1, 0, 1)])])
    assert len(with_class(parsed(schedule_svg(schedule, 2)), "double")) == 1


def test_many_ranks_are_drawn_as_levels():
    root = parsed(schedule_svg(ring(20), 10))
    assert len(with_class(root, "level")) == 400
    assert not with_class(root, "part")


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 13, 17, 40, 64])
def test_nothing_overlaps_and_all_is_in_the_box(ranks: int):
    layout = Layout(ranks, ranks)
    x, y, width, height = layout.box
    corners = [layout.cell_at(rank, chunk) for rank in range(ranks) for chunk in range(ranks)]
    for u, v in corners:
        assert x <= u <= x + width - layout.cell
        assert y <= v <= y + height - layout.cell
    taken = {(round(u, 3), round(v, 3)) for u, v in corners}
    assert len(taken) == ranks * ranks
    for rank in range(ranks):
        dx, dy = layout.disc_at(rank)
        assert not any(
            u - layout.disc < dx < u + layout.cell + layout.disc
            and v - layout.disc < dy < v + layout.cell + layout.disc
            for u, v in corners
        )


def test_colours_differ():
    assert len({rank_colour(rank, 64) for rank in range(64)}) == 64


def test_the_page_needs_nothing_else_and_reads_without_a_script():
    page = schedule_html(ring(4))
    assert not re.search(r'\s(src|href)="|@import|url\(', page)
    assert "{{" not in page
    assert "4 chunks · 6 rounds · each rank sends up to 1.5 × the tensor · 1 port · proved right" in page
    body = page.split("<script")[0]
    assert body.count("<li value=") == 6
    assert "Rank 0 sends c3 to rank 1, which adds it; rank 1 sends c0 to rank 2" in body
    assert body.count('class="arrow add"') == 4
    assert 'aria-live="polite">Rank 0 sends c3 to rank 1' in body


def test_the_page_has_every_round():
    data = page_data(schedule_html(direct(3)))
    frames = data["frames"]
    assert isinstance(frames, list)
    assert [frame["name"] for frame in frames] == ["Round 0", "Round 1", "Done"]
    assert [len(frame["cells"]) for frame in frames] == [9, 3, 6]
    assert frames[1]["cells"][0] == [0, 0, "111", "done"]
    assert frames[2]["caption"] == "After 2 rounds every rank holds the complete sum of every chunk."
    assert frames[0]["caption"].endswith("Then 3 of 9 chunks are complete.")


def test_a_wrong_schedule_says_so_on_its_page():
    half = from_rounds("half", 2, 1, [Round.of([(0, 1, 0, 1)])])
    page = schedule_html(half)
    assert "WRONG: chunk 0 of rank 0 ends as x0 (no round writes it)" in page
    assert "After 1 round only 1 of 2 chunks are complete." in page


def test_names_cannot_break_the_page():
    page = schedule_html(from_rounds("</script><b>", 2, 1, [Round.of([(0, 1, 0, 1)])]))
    assert "</script><b>" not in page


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(UsageError, match="room for 64 ranks and chunks, not 65 ranks"):
        schedule_html(ring(65))
    with pytest.raises(UsageError, match="rounds 0 to 6, not 7"):
        schedule_svg(ring(4), 7)


def test_text_names_messages_and_contents():
    text = schedule_text(ring(3))
    assert text.splitlines()[0] == "ring · 3 ranks · 3 chunks · 4 rounds"
    first = text.split("round 1")[0]
    assert "  0→1 +c2  1→2 +c0  2→0 +c1\n" in first
    assert "    1   ·1·  ·1·  ·1·\n" in first
    assert text.endswith(
        "done\n        c0   c1   c2\n    0   012  012  012\n    1   012  012  012\n    2   012  012  012\n"
    )


@pytest.mark.parametrize("ranks", [1, 2, 8, 10, 11, 16, 64])
def test_text_fits_a_terminal(ranks: int):
    for schedule in (ring(ranks), direct(ranks)):
        assert max(map(len, schedule_text(schedule).splitlines())) <= 80


def test_text_shows_shares_where_there_is_no_room_for_names():
    assert schedule_text(direct(12)).splitlines()[-1] == "   11   " + "█" * 12


def browsed(page: str, folder: Path, script: str, seconds: int) -> str:
    """Return the page's DOM after a real browser ran it, with an extra script, for so many virtual seconds."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here")
    (folder / "page.html").write_text(page + f"<script>{script}</script>")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    where = [f"--user-data-dir={folder / 'profile'}", f"--virtual-time-budget={1000 * seconds}", "--dump-dom"]
    url = (folder / "page.html").as_uri() + "#round=2"
    done = subprocess.run([browser, *flags, *where, url], capture_output=True, text=True, timeout=90, check=True)
    return done.stdout


def press(key: str) -> str:
    return f"document.body.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}}));"


@pytest.mark.parametrize(
    ("script", "name", "complete"),
    [
        ("", "Round 2", 0),
        (press("ArrowLeft"), "Round 1", 0),
        (press("ArrowRight"), "Round 3", 4),
        (press("ArrowRight") * 3, "Round 5", 12),
        (press(" "), "Done", 16),
        (press("End"), "Done", 16),
        ("document.getElementById('next').click();" + press("Home"), "Round 0", 0),
    ],
    ids=["deep link", "back", "forward", "faster than the animation", "play", "end", "home"],
)
def test_the_page_steps_and_plays_in_a_browser(tmp_path: Path, script: str, name: str, complete: int):
    dom = browsed(schedule_html(ring(4)), tmp_path, script, seconds=20)
    assert f'<b id="name">{name}</b>' in dom
    figure = dom.split("</figure>")[0]
    assert len(re.findall(r'class="cell done[^"]*"', figure)) == complete
