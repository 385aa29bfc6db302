"""How big the decision is who is slow: what is counted, and that it does not grow unseen."""

from __future__ import annotations

from bench.detection.size import FILES, MONITOR, count


def test_lines_of_code_and_numbers_are_counted_wherever_they_stand() -> None:
    source = '''"""Words: 7."""

A = (0, 1, 2, 3, -0.5)  # 9
"""Eight: 8."""


def f(x=True):
    return [
        x * 4
    ]
'''
    assert count(source) == (5, [0.5, 3, 4])


def test_every_file_that_decides_is_counted() -> None:
    decide = {f"slow_rank/{path.name}" for path in (MONITOR / "slow_rank").glob("*.py")} - {"slow_rank/__init__.py"}
    assert decide | {"undecided.py", "assessment.py"} == set(FILES)


def test_it_does_not_grow() -> None:
    """Who needs another line or number finds one that can go; what was counted last is in the design record."""
    lines, numbers = zip(*(count((MONITOR / name).read_text()) for name in FILES), strict=True)
    assert sum(lines) <= 1092
    assert sum(map(len, numbers)) <= 110
