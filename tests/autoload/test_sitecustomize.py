"""What Python imports at start-up under `ringside run`: it attaches ranks, and hides nobody's `sitecustomize`."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

from ringside.autoload import ringside_autoload

OURS = Path(ringside_autoload.__file__).with_name("sitecustomize.py")


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Python is about to start with our directory first on its path; what is installed then is in the list."""
    installed: list[str] = []
    monkeypatch.setattr(ringside_autoload, "install", lambda: installed.append("installed"))
    monkeypatch.setattr(sys, "path", [str(OURS.parent), str(tmp_path)])
    monkeypatch.setitem(sys.modules, "sitecustomize", sys)  # ours, while it is imported
    monkeypatch.delenv("RINGSIDE_AUTOLOAD", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    return installed


@pytest.mark.parametrize(
    ("environ", "installs"),
    [
        ({"RINGSIDE_AUTOLOAD": "1", "RANK": "0"}, True),
        ({"RINGSIDE_AUTOLOAD": "1"}, False),
        ({"RINGSIDE_AUTOLOAD": "0", "RANK": "0"}, False),
        ({"RANK": "0"}, False),
    ],
)
def test_ranks_are_attached_and_nobody_else(
    start: list[str], monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], installs: bool
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    runpy.run_path(str(OURS))
    assert bool(start) is installs
    assert sys.modules["sitecustomize"] is sys  # there is no other one


@pytest.mark.parametrize("given", ["", "absolute"])
def test_the_one_that_is_hidden_takes_our_place(
    start: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nwhere = sys.modules['sitecustomize'].__file__\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(OURS.parent), os.path.relpath(OURS.parent), given and str(tmp_path)])
    runpy.run_path(str(OURS))
    assert sys.modules["sitecustomize"].where == str(tmp_path / "sitecustomize.py")
    assert start == []


def test_what_breaks_is_one_line_and_the_hidden_one_is_run(
    start: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the hidden one')\n")

    def breaks() -> None:
        raise OSError("no such thing")

    monkeypatch.setattr(ringside_autoload, "install", breaks)
    monkeypatch.setenv("RINGSIDE_AUTOLOAD", "1")
    monkeypatch.setenv("RANK", "0")
    runpy.run_path(str(OURS))
    told = capsys.readouterr()
    assert told.err == "ringside: this process is not watched (OSError: no such thing)\n"
    assert told.out == "the hidden one\n"
