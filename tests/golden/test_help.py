"""Every `--help`, 80 columns wide."""

from __future__ import annotations

import re
import sys

import pytest
from tests.golden.calls import Call
from tests.support.golden import Golden

from ringside.commands import VERBS

SUBCOMMANDS = ("predict fit", "predict score", "predict simulate")


@pytest.mark.parametrize("verb", ["", *VERBS, *SUBCOMMANDS])
def test_help_is_as_it_was(verb: str, command: Call, golden: Golden) -> None:
    status, text, _ = command(f"{verb} --help")
    assert status == 0
    name = f"help/{verb.replace(' ', '-') or 'ringside'}.txt"
    if sys.version_info < (3, 13):
        golden.check(name, text)
    else:  # argparse names the value of `-n N, --ranks N` once from here on, and breaks lines elsewhere
        kept = (golden.directory / name).read_text()
        assert _words(text) == _words(kept)


def _words(text: str) -> list[str]:
    return re.sub(r"(?m)^(  -\w) \S+, --", r"\1, --", text).split()
