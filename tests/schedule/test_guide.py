from __future__ import annotations

from pathlib import Path

import pytest
from docs.generate.algorithms import ENTRIES, busiest, guide

from ringside.schedule import ALGORITHMS, COLLECTIVES, by_name, verify

DOCUMENT = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_the_document_is_not_stale():
    assert DOCUMENT.read_text(encoding="utf-8") == guide(), (
        "run `python -m docs.generate.algorithms > docs/algorithms.md`"
    )


def test_every_algorithm_has_an_entry():
    assert set(ENTRIES) == {*ALGORITHMS, *COLLECTIVES}


def check_laws(name: str, ranks: range) -> None:
    entry = ENTRIES[name]
    for n in ranks:
        audit = verify(by_name(name, n))
        counted = (audit.rounds, busiest(audit), audit.max_ports)
        for law, figure in zip((entry.rounds, entry.sent, entry.ports), counted, strict=True):
            assert law.holds(figure, n), (n, law.text, figure, law.value(n))


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_its_laws_hold(name: str):
    check_laws(name, range(2, 13))


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_its_laws_hold_for_many_ranks(name: str):
    check_laws(name, range(13, 65))
