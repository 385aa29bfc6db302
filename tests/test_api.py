"""docs/api.md says what is public: the names of `__all__`, and no others."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
SECTIONS = {part.partition("`")[0]: part for part in PAGE.split("\n## `")[1:]}
WHOLE = re.findall(r"^\| `(ringside\.\w+)` \|", PAGE.partition("## Whole packages")[2], re.MULTILINE)


@pytest.mark.parametrize("module", ["ringside", "ringside.survive", "ringside.fsdp", "ringside.notebook"])
def test_the_page_names_what_a_module_exports(module: str) -> None:
    told = re.findall(r"^\| `(\w+)` \|", SECTIONS[module].partition("\n## ")[0], re.MULTILINE)
    assert sorted(told) == sorted(importlib.import_module(module).__all__)


def test_the_page_has_a_section_for_each_of_them_and_no_other() -> None:
    assert list(SECTIONS) == ["ringside", "ringside.survive", "ringside.fsdp", "ringside.notebook"]


@pytest.mark.parametrize("package", WHOLE)
def test_packages_that_are_public_as_a_whole_say_what_they_export(package: str) -> None:
    found = importlib.import_module(package)
    assert all(getattr(found, name).__doc__ or name.isupper() for name in found.__all__)
