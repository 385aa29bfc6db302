"""docs/api.md says what is public: the names of `__all__`, and no others."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from ringside import Communicator, GroupCommunicator, HostCommunicator

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


def test_every_method_of_a_communicator_is_said_to_be_public_or_internal() -> None:
    lists = PAGE.partition("A communicator's methods are")[2].partition("\n\n")[0]
    more, internal = (re.findall(r"`([a-z]\w*)`", part) for part in lists.split("internal all the same"))
    methods = {name for kind in (HostCommunicator, GroupCommunicator) for name in dir(kind) if name[0] != "_"}
    assert sorted(more + internal) == sorted(methods - set(dir(Communicator)))
