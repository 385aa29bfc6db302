"""`make release-check`: what stands open before a release, a line each; exit status 1 while anything does.

    python tests/check_release.py [ROOT]

What the owner fills in, and where, is listed in docs/release.md.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
SWITCH = "<!-- once published:"
"""What hides the line with the index in docs/install.md."""


def open_points(root: Path) -> list[str]:
    """Return what a release of this tree would get wrong."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    version = project["version"]
    found = [
        f"pyproject.toml: {name} is a placeholder: {url}" for name, url in project["urls"].items() if ".invalid" in url
    ]
    if f'__version__ = "{version}"' not in (root / "src" / "ringside" / "_version.py").read_text():
        found.append(f"src/ringside/_version.py: is not {version}")
    if not re.search(rf"^version: {re.escape(version)}$", (root / "CITATION.cff").read_text(), re.MULTILINE):
        found.append(f"CITATION.cff: is not of version {version}")
    dated = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    if not re.search(dated, (root / "CHANGELOG.md").read_text(), re.MULTILINE):
        found.append(f"CHANGELOG.md: {version} has no date")
    pending = (root / "CHANGELOG.md").read_text().partition("## [Unreleased]\n")[2].partition("\n## ")[0]
    if pending.strip():
        found.append(f"CHANGELOG.md: [Unreleased] has entries, which belong to {version}")
    if SWITCH in (root / "docs" / "install.md").read_text():
        found.append("docs/install.md: the line with the index is switched off")
    return found


def main(arguments: list[str]) -> int:
    """Print the open points of a tree; return 1 if there are any."""
    found = open_points(Path(arguments[0]) if arguments else ROOT)
    for line in found:
        print(line)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
