"""The codes that C++ and Python share are the same with and without the core."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from ringside import _core
from ringside._core import enums

TELL = (
    "import json; from ringside._core import enums;"
    "print(json.dumps({name: {m.name: int(m) for m in getattr(enums, name)} for name in enums.__all__}))"
)


def codes_of(**environ: str) -> dict[str, dict[str, int]]:
    command = [sys.executable, "-c", TELL]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=True)
    codes: dict[str, dict[str, int]] = json.loads(done.stdout)
    return codes


SAY = "from ringside import _core; print(_core.available(), _core.describe(), _core.build(), sep=chr(10))"
GET = "from ringside import _core; _core.native()"


def said(code: str, **environ: str) -> list[str]:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).splitlines()


def test_an_installation_says_whether_it_has_the_core_and_how_to_get_it() -> None:
    assert said(SAY, RINGSIDE_NO_NATIVE="1") == [
        "False",
        "ringside without its native core (RINGSIDE_NO_NATIVE is set); attach() only watches",
        "none (RINGSIDE_NO_NATIVE is set)",
    ]
    why = said(GET, RINGSIDE_NO_NATIVE="1")[-1]
    assert (
        "UnsupportedError: the shared-memory engine needs Ringside's native core, but RINGSIDE_NO_NATIVE is set" in why
    )
    assert "pip install --force-reinstall --no-deps ." in why


@pytest.mark.native
def test_with_the_core_its_instruction_set_and_compiler_are_named() -> None:
    available, words, build = said(SAY)
    isa = build.partition(",")[0]
    assert (available, words) == ("True", f"ringside with its native core ({isa})")
    assert build.startswith(f"{isa}, built by ")
    assert said(GET) == []


@pytest.mark.native
def test_ranks_with_and_without_the_core_mean_the_same() -> None:
    assert codes_of() == codes_of(RINGSIDE_NO_NATIVE="1")


@pytest.mark.native
def test_with_the_core_its_own_enums_are_what_everybody_uses() -> None:
    found = importlib.util.find_spec(enums.__name__)
    assert found is not None
    assert found.loader is not None
    anew = importlib.util.module_from_spec(found)
    found.loader.exec_module(anew)
    for module in (enums, anew):
        assert [name for name in enums.__all__ if getattr(module, name) is not getattr(_core.native(), name)] == []


def test_members_count_from_zero_and_the_wire_keeps_its_numbers() -> None:
    for name in enums.__all__:
        assert [int(member) for member in getattr(enums, name)] == list(range(len(getattr(enums, name)))), name
    # Ranks of two releases may meet: numbers that were given stay.
    assert (enums.DType.float32, enums.DType.bfloat16, enums.DType.bool) == (0, 3, 9)
    assert (enums.ReduceOp.sum, enums.ReduceOp.avg, enums.ReduceOp.bxor) == (0, 1, 7)
    assert (enums.Kind.all_reduce, enums.Kind.reduce_scatter_, enums.Kind.split) == (1, 3, 12)
