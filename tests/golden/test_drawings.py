"""The drawings of every algorithm: as text, as one picture, and as the page that plays it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.golden.calls import Call
from tests.support.golden import Golden, broken_up, without_own_files

from ringside.schedule import ALGORITHMS, COLLECTIVES

RANKS = {"hierarchical": (6, 4), "halving_doubling": (8, 5), "recursive_doubling": (8, 6), "two_tree": (7, 4)}
MORE = {
    "segments": "ring -n 4 --segments 2",
    "order": "ring -n 5 --order 0,2,4,1,3",
    "hosts": "hierarchical --ranks-per-host 3,2",
    "root": "binomial_broadcast -n 6 --root 2",
    "one": "ring -n 1",
}
DRAWN = {
    f"{name}-{n}": f"{name} -n {n}"
    for name in (*ALGORITHMS, *COLLECTIVES)
    for n in RANKS.get(name, (5,) if name in ALGORITHMS else (4,))
} | MORE

PAGES = {name: DRAWN[name] for name in ("ring-5", "two_tree-7", "hosts", "in_network-5", "direct-5")} | {
    "many": "ring -n 24",
    "many-hosts": "hierarchical --ranks-per-host 8,8,8",
    "most": "tree -n 64",
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_drawing_is_as_it_was(name: str, command: Call, golden: Golden) -> None:
    status, text, _ = command(f"draw {DRAWN[name]} --text")
    assert status == 0
    golden.check(f"drawings/{name}.txt", f"$ ringside draw {DRAWN[name]} --text\n{text}")
    assert command(f"draw {DRAWN[name]} --svg -o drawn.svg") == (0, "drawn.svg\n", "")
    golden.check(f"drawings/{name}.svg", broken_up(Path("drawn.svg").read_text()))


@pytest.mark.parametrize("name", PAGES)
def test_a_page_that_plays_is_as_it_was(name: str, command: Call, golden: Golden) -> None:
    assert command(f"draw {PAGES[name]} -o drawn.html") == (0, "drawn.html\n", "")
    golden.check(f"drawings/{name}.html", without_own_files(Path("drawn.html").read_text()))
