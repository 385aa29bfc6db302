"""The Python API as docs/predict.md shows it."""

import doctest
from pathlib import Path

from ringside.predict import preset, simulate
from ringside.schedule import ring

PAGE = Path(__file__).resolve().parents[2] / "docs" / "predict.md"


def test_the_pages_examples_run_and_print_what_it_says():
    found = doctest.testfile(str(PAGE), module_relative=False)
    assert found.attempted > 10
    assert found.failed == 0


def test_a_timeline_shows_itself_in_a_notebook():
    timeline = simulate(ring(4), preset("ethernet-10g", 4), 1e6, late={2: 1e-3})
    fragment = timeline._repr_html_()
    assert "guilty: late rank 2 costs 1.0 ms" in fragment
    assert fragment.count("<rect") == 4
    assert "<script" not in fragment
    assert "exact for these figures; a cluster like it:" in fragment
