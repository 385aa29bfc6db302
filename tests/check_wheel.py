"""What `make wheel` made: its tags are what they should be, and it works where nothing else of ours is.

    python tests/check_wheel.py dist/*.whl

Every wheel is installed with its dependencies into a new environment of the Python that runs this, and tried there:
the command line, the native core, an all-reduce of one rank. The facts go to stdout, a line for each wheel.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TRY = Path(__file__).parent / "scripts" / "installed.py"
STABLE_FROM = 12
"""From CPython 3.12 on one wheel serves all later ones: there nanobind can do with the limited API."""
NAME = re.compile(r"torch_ringside-[^-]+-cp3(\d+)-(cp3\d+|abi3)-manylinux_(\d+)_(\d+)_(x86_64|aarch64)\.whl")


@dataclass(frozen=True)
class Tags:
    """Where a wheel can be installed.

    Args:
        python: Minor version of CPython 3 that it was built for.
        stable: Whether later ones can use it, too.
        glibc: Oldest C library that it works with.
        machine: Its processor.
    """

    python: int
    stable: bool
    glibc: tuple[int, int]
    machine: str

    def __str__(self) -> str:
        pythons = f"CPython 3.{self.python}" + (" and later (abi3)" if self.stable else " only")
        return f"{pythons}, glibc {self.glibc[0]}.{self.glibc[1]} or newer, {self.machine}"


def tags_of(name: str) -> Tags:
    """Return what a wheel's file name promises.

    Raises:
        ValueError: It is no manylinux wheel, or its ABI is not the one that its Python should get.
    """
    found = NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name} is no manylinux wheel of ours: has auditwheel repaired it?")
    python, abi, major, minor, machine = found.groups()
    tags = Tags(int(python), abi == "abi3", (int(major), int(minor)), machine)
    if abi != ("abi3" if tags.python >= STABLE_FROM else f"cp3{python}") or (tags.stable and tags.python > STABLE_FROM):
        raise ValueError(f"{name} has an ABI that it should not have: cp3X-cp3X up to 3.11, then cp312-abi3")
    return tags


def installed(wheel: Path, folder: Path) -> Path:
    """Install a wheel, with what it needs and nothing else, into a new environment; return its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel.resolve()], check=True)
    return python


def tried(python: Path) -> str:
    """Try the package of an environment; return what its command line calls itself."""
    where = python.parent
    told = subprocess.run([python, "-I", TRY], check=True, capture_output=True, text=True, cwd=where).stdout
    if not Path(told.strip()).is_relative_to(where.parent):
        raise ValueError(f"{told.strip()} was tried instead of what was installed into {where.parent}")
    subprocess.run([where / "ringside", "verify", "ring", "--ranks", "4"], check=True, capture_output=True, cwd=where)
    version = subprocess.run([where / "ringside", "--version"], check=True, capture_output=True, text=True, cwd=where)
    return version.stdout.strip()


def main(wheels: Sequence[str]) -> None:
    """Check each wheel; an error ends with its traceback."""
    if not wheels:
        raise SystemExit("which wheels? python tests/check_wheel.py dist/*.whl")
    for wheel in map(Path, wheels):
        tags = tags_of(wheel.name)
        with tempfile.TemporaryDirectory(prefix="ringside-wheel-") as folder:
            version = tried(installed(wheel, Path(folder)))
        print(f"{wheel}: {version}; {tags}; works in an environment of its own")


if __name__ == "__main__":
    main(sys.argv[1:])
