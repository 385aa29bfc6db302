"""Pictures of README and docs show what the program does now: what decides how they look is made anew and compared."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
DIGESTS = json.loads((IMAGES / "pictures.json").read_text())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ANEW = "run `python -m docs.generate.pictures`"


def test_no_picture_is_stale(tmp_path: Path) -> None:
    for module in ("textual", "anywidget"):
        pytest.importorskip(module, reason=f"{module} is not installed here")
    from docs.generate.pictures import digest, kept_run, sources, words_of

    now = {name: digest(words_of(source)) for name, source in sources(kept_run(tmp_path)).items()}
    then = {name: noted["source"] for name, noted in DIGESTS.items()}
    assert [name for name in now if then.get(name) != now[name]] == [], ANEW
    assert set(then) == set(now), ANEW


def test_pictures_are_the_files_that_were_made() -> None:
    from docs.generate.pictures import digest

    made = {path.name: digest(path.read_bytes()) for path in IMAGES.iterdir() if path.name != "pictures.json"}
    assert made == {name: noted["file"] for name, noted in DIGESTS.items()}, ANEW


def test_pages_show_pictures_that_are_made_and_every_one_is_shown() -> None:
    shown = {name for page in PAGES for name in re.findall(r"images/([\w.-]+)", page.read_text())}
    assert shown == set(DIGESTS)
