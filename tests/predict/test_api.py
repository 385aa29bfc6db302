"""The Python API as docs/predict.md shows it."""

import doctest
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "predict.md"


def test_the_pages_examples_run_and_print_what_it_says():
    found = doctest.testfile(str(PAGE), module_relative=False)
    assert found.attempted > 10
    assert found.failed == 0
