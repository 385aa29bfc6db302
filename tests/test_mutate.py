"""What `make mutate` knows of places in the sources is true of today's sources."""

from collections import Counter
from pathlib import Path

import pytest
from tests.mutate.__main__ import equivalents, of_review, reason_of
from tests.mutate.faults import ROOT, draw, of_python


def test_every_fault_of_the_review_can_be_put_in():
    faults = of_review()  # refuses a piece that is not once in its file
    assert len(faults) >= 45
    for fault in faults:
        text = (ROOT / fault.path).read_text()
        assert fault.applied(text) != text


def test_every_fault_that_changes_nothing_is_of_a_line_that_there_is():
    for fault in equivalents():
        place, _, change = fault.partition(": ")
        name, _, number = place.partition(":")
        lines = [" ".join(line.split()) for line in (ROOT / name).read_text().splitlines()]
        before = change.partition("  ->  ")[0]
        found = [at for at, line in enumerate(lines, 1) if line == before]
        assert int(number) in found if number else len(found) == 1, fault


def test_a_reason_holds_wherever_its_line_has_moved_unless_it_names_the_line():
    reasons = {"a.py: x = 1  ->  x = 2": "moved", "b.cpp:3: f();  ->  ;": "stays"}
    assert reason_of("a.py:7: x = 1  ->  x = 2", reasons) == "moved"
    assert reason_of("b.cpp:3: f();  ->  ;", reasons) == "stays"
    assert reason_of("b.cpp:4: f();  ->  ;", reasons) is None


def test_no_fault_is_drawn_from_what_only_type_checkers_read():
    path = ROOT / "src" / "ringside" / "engine" / "communicator.py"
    lines = path.read_text().splitlines()
    faults = list(of_python(path))
    assert [fault for fault in faults if "Literal[" in lines[fault.line - 1]] == []
    assert any("async_op: bool = False" in lines[fault.line - 1] for fault in faults)


@pytest.mark.thorough
def test_a_seed_draws_from_every_package():
    drawn = draw(5, 150)
    assert len(drawn) == 150
    of = Counter(fault.package for fault in drawn)
    packages = {path.name for path in (ROOT / "src" / "ringside").iterdir() if (path / "__init__.py").exists()}
    assert packages <= of.keys()
    assert min(of.values()) >= 4
    assert of["_core (C++)"] >= 15
    assert all(Path(fault.path).suffix in (".py", ".cpp", ".hpp") for fault in drawn)
