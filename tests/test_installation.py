"""Another package called ringside beside ours is named in one sentence; `--version` prints what an issue needs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.check_release import ROOT, main, open_points

import ringside
from ringside.commands import main as command

HERE = Path(ringside.__file__).parent
SENTENCE = "another package called ringside (ringside-0.1.1) is installed in"
AS_TORCH_DOES = "from ringside.autoload.ringside_backend import register; register()"
"""By the entry point torch.backends: it runs also where the package's `__init__` is the other's."""


def site_with(folder: Path, *, ours_is_above: bool) -> Path:
    """Make a directory of packages as pip leaves it: our files, but for the `__init__` of whoever came last."""
    package = folder / "ringside"
    package.mkdir(parents=True)
    for entry in HERE.iterdir():
        if entry.name not in ("__init__.py", "__pycache__"):
            (package / entry.name).symlink_to(entry)
    (package / "__init__.py").write_text((HERE / "__init__.py").read_text() if ours_is_above else "DEBATE = True\n")
    return folder


def said_by(site: Path, code: str) -> str:
    # An editable install finds the package by an entry of sys.meta_path, before any directory.
    program = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith('_editable')];"
        f"sys.path.insert(0, {str(site)!r}); {code}"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("ending", ["dist-info", "egg-info"])
@pytest.mark.parametrize("ours_is_above", [True, False])
def test_the_other_package_is_named_once(tmp_path: Path, ours_is_above: bool, ending: str) -> None:
    site = site_with(tmp_path / "site", ours_is_above=ours_is_above)
    assert said_by(site, AS_TORCH_DOES) == ""
    (site / f"ringside-0.1.1.{ending}").mkdir()
    said = said_by(site, AS_TORCH_DOES)
    assert said.startswith(f"{SENTENCE} {site} ")
    assert said.count("\n") == 1
    if ours_is_above:
        assert said_by(site, "import ringside.commands") == said


def test_our_own_metadata_is_not_taken_for_the_others(tmp_path: Path) -> None:
    site = site_with(tmp_path / "site", ours_is_above=True)
    (site / "torch_ringside-0.1.0.dist-info").mkdir()
    assert said_by(site, "import ringside; assert 'importlib.metadata' not in sys.modules") == ""


def test_version_prints_what_an_issue_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command(["--version"])
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ringside", "torch", "python", "platform", "core"]
    assert lines[0] == f"ringside {ringside.__version__}"
    assert "built by" in lines[-1] or "none (" in lines[-1]


def test_a_release_is_refused_while_the_placeholder_stands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(ROOT)]) == 1
    assert "pyproject.toml: Homepage is a placeholder" in capsys.readouterr().out


def test_a_tree_that_is_filled_in_can_be_released(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md", "docs/install.md", "src/ringside/_version.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / name).read_text().replace("repository.invalid", "example.org")
        text = re.sub(r"^(## \[0\.1\.0\]) - not released yet$", r"\1 - 2027-01-01", text, flags=re.MULTILINE)
        text = re.sub(r"(?<=^## \[Unreleased\]\n).*?(?=^## )", "\n", text, flags=re.MULTILINE | re.DOTALL)
        (tmp_path / name).write_text(text.replace("<!-- once published:", "").replace("once published -->", ""))
    assert open_points(tmp_path) == []
