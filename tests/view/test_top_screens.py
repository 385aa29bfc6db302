"""How `ringside top` looks, cell by cell and style by style: pictures in tests/view/screens that were looked at once.

`pytest --write-golden` draws them again.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from tests.recorded_runs import own_times, slow_run, write_run
from tests.support.golden import Golden

pytest.importorskip("textual", reason="textual is not installed here")

from textual.strip import Strip

from ringside.view.tui.app import TopApp
from ringside.view.tui.source import Local

AHEAD = 2.0**32
"""When the runs here were written last, unix seconds: they are going on, however long a picture takes."""
SCREENS = Path(__file__).parent / "screens"
VERDICT = {
    "kind": "slow_rank", "ranks": [5], "since_step": 80, "detected_step": 88, "excess_ratio": 0.3,
    "cause": "most of the extra time is in its backward pass (+29.6 ms per step); it was running all the time: more "
    "work to do, or a slower clock", "cost_rank_seconds": 3.4,
    "advice": "compare its clocks, temperature and neighbours with a healthy rank's",
    "evidence": {"own_seconds": 0.13, "others_own_seconds": 0.1, "steps": 112},
}  # fmt: skip


def slow(path: Path) -> Path:
    slow_run(path / "train", ranks=8, steps=200, rank=5, onset=80)
    (path / "train" / "events.jsonl").write_text(
        json.dumps({"kind": "verdict", "unix": 1.0, "verdict": VERDICT}) + "\n"
    )
    return path / "train"


def fine(path: Path) -> Path:
    return write_run(path / "fine", own_times(60, 40))


def draw(path: Path, keys: Iterable[str], size: tuple[int, int] = (80, 24)) -> str:
    """Return the screen after some keys: each line, then where which style is."""
    for file in path.iterdir():
        os.utime(file, (AHEAD, AHEAD))

    async def play() -> list[Strip]:
        app = TopApp(Local(path), refresh_s=None, clock=lambda: 0.0)
        async with app.run_test(size=size) as pilot:
            await app.workers.wait_for_complete()
            for key in keys:
                await pilot.press(key)
            await app.workers.wait_for_complete()
            await pilot.pause()
            return list(app.screen._compositor.render_strips())

    return "".join(f"{strip.text.rstrip()}\n{styles(strip)}" for strip in asyncio.run(play()))


def styles(strip: Strip) -> str:
    """Return a line `    from-until style` for each stretch of cells that is not plain."""
    lines, at = [], 0
    for segment in strip.simplify():
        style = segment.style
        plain = style is None or (str(style.without_color) == "none" and _named(style) == "default")
        if style is not None and not plain and segment.text.strip():
            lines.append(f"    {at}-{at + segment.cell_length} {style.without_color} {_named(style)}\n")
        at += segment.cell_length
    return "".join(lines)


def _named(style: object) -> str:
    colour = getattr(style, "color", None)
    return "default" if colour is None else colour.name


@pytest.mark.parametrize(
    ("name", "make", "keys"),
    [
        ("a_slow_rank", slow, ()),
        ("a_slow_rank_in_detail", slow, ("enter",)),
        ("all_is_well_on_light", fine, ("t", "t", "down")),
    ],
)
def test_it_looks_as_it_did(
    name: str, make: Callable[[Path], Path], keys: tuple[str, ...], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    golden = Golden(SCREENS, write=request.config.getoption("--write-golden"))
    golden.check(f"{name}.txt", draw(make(tmp_path), keys))


@pytest.mark.parametrize("size", [(24, 3), (30, 6), (40, 9), (60, 13), (100, 18), (132, 43)])
def test_it_looks_as_it_did_on_terminals_of_other_sizes(
    size: tuple[int, int], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    golden = Golden(SCREENS, write=request.config.getoption("--write-golden"))
    path = slow(tmp_path)
    looks = {keys: draw(path, keys, size) for keys in ((), ("enter",), ("v",), ("question_mark",), ("s", "r", "slash"))}
    text = "".join(f"== after {' '.join(keys) or 'no key'}\n{drawn}" for keys, drawn in looks.items())
    golden.check(f"on_{size[0]}x{size[1]}.txt", text)
