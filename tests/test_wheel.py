"""`make wheel`: what names of wheels promise; the whole of it (a minute of C++) with RINGSIDE_TEST_WHEEL=1."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from tests.check_wheel import STABLE_FROM, Tags, tags_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]


def test_names_say_where_a_wheel_can_be_installed() -> None:
    assert tags_of("torch_ringside-0.1.0-cp311-cp311-manylinux_2_34_x86_64.whl") == Tags(11, False, (2, 34), "x86_64")
    tags = tags_of("torch_ringside-0.1.0-cp312-abi3-manylinux_2_28_aarch64.whl")
    assert str(tags) == "CPython 3.12 and later (abi3), glibc 2.28 or newer, aarch64"


@pytest.mark.parametrize(
    "name",
    [
        "torch_ringside-0.1.0-cp311-cp311-linux_x86_64.whl",
        "torch_ringside-0.1.0-py3-none-any.whl",
        "torch_ringside-0.1.0-cp312-cp312-manylinux_2_34_x86_64.whl",
        "torch_ringside-0.1.0-cp310-abi3-manylinux_2_34_x86_64.whl",
        "torch_ringside-0.1.0-cp311-cp310-manylinux_2_34_x86_64.whl",
    ],
)
def test_wheels_that_should_not_be_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        tags_of(name)


def test_the_build_is_told_the_same_abi() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    assert settings["wheel"]["py-api"] == f"cp3{STABLE_FROM}"
    assert "nanobind_add_module(_native STABLE_ABI" in (ROOT / "CMakeLists.txt").read_text()


def test_what_is_compiled_in_is_there_with_the_licence_that_it_came_with() -> None:
    nanobind = pytest.importorskip("nanobind", reason="nanobind is not installed here")
    (packaged,) = (path for path in metadata.files("nanobind") or [] if path.name == "LICENSE")
    assert (ROOT / "licenses" / "nanobind.txt").read_text() == packaged.read_text()
    header = Path(nanobind.include_dir()).parent / "ext" / "robin_map" / "include" / "tsl" / "robin_hash.h"
    told = re.sub(r"^ \*/? ?", "", header.read_text().split("*/")[0], flags=re.MULTILINE)
    assert (ROOT / "licenses" / "robin-map.txt").read_text().split() == told.removeprefix("/**").split()


@pytest.mark.skipif("RINGSIDE_TEST_WHEEL" not in os.environ, reason="builds the core: RINGSIDE_TEST_WHEEL=1")
@pytest.mark.timeout(900)
def test_make_wheel_checks_what_it_made() -> None:
    done = subprocess.run(["make", "wheel"], cwd=ROOT, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("works in an environment of its own")
