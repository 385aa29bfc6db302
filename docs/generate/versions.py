"""docs/versions.md: what works with which torch, made by running the tests of each capability with each.

    python -m docs.generate.versions PYTHON... > docs/versions.md

Each PYTHON is an interpreter whose environment has one torch, this package and what tests need, as `make test-newest`
and `make test-oldest` set it up (build/newest, build/oldest). It takes some minutes per interpreter; what is under way
is said on stderr. The exit status is 1 where a test failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]

CAPABILITIES = {
    "attach": ["tests/pytorch/test_attach.py"],
    "watch": ["tests/pytorch/test_group_watch.py"],
    "process group": sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/pytorch/test_process_group*.py")),
    "in place of gloo": ["tests/pytorch/test_as_gloo.py"],
    "survive": ["tests/survive/test_state.py", "tests/survive/test_memory.py", "tests/survive/test_together.py"],
    "doctor, flight recorder": ["tests/doctor/test_dumps_of_this_torch.py"],
}

_HEAD = """# Versions of torch

Made by running the tests of each capability with each torch (`python -m docs.generate.versions`): CPython 3.11, x86-64,
no GPU.
*Not* lists why tests were skipped: what this torch does not have, or what there is nothing to compare with.

| torch | capability | tests passed | |
|---|---|---|---|
"""


def main() -> int:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="+", metavar="PYTHON")
    parser.add_argument("--only", choices=CAPABILITIES, action="append", help="this capability alone (may be repeated)")
    asked = parser.parse_args()
    failed, page = 0, _HEAD
    for python in asked.pythons:
        told = subprocess.run(
            [python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True
        )
        torch = told.stdout.strip().partition("+")[0]
        for capability in asked.only or CAPABILITIES:
            print(f"torch {torch}: {capability} ...", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                report = Path(folder) / "report.xml"
                command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
                command += ["-W", "ignore:TypedStorage is deprecated"]  # torch's own checkpoints use it up to 2.7
                command += CAPABILITIES[capability]
                subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
                # A test that is run again stands there twice: its last run counts.
                reported = ElementTree.parse(report).getroot().iter("testcase")
                cases = [*{(case.get("classname"), case.get("name")): case for case in reported}.values()]
            broken = [str(case.get("name")) for case in cases if {"failure", "error"} & {part.tag for part in case}]
            # Of a module that is skipped whole the reason stands in a tuple, at its end.
            skips = Counter(
                part.get("message", "").replace("collection skipped", (part.text or "").split("Skipped: ")[-1][:-2])
                for case in cases
                for part in case.iter("skipped")
            )
            passed = len(cases) - len(broken) - skips.total()
            reasons = "; ".join(f"{reason} ({count})" if passed else reason for reason, count in skips.items())
            if broken:
                verdict = f"**fails**: {', '.join(broken)}"
            elif passed:
                verdict = f"works; not: {reasons}" if reasons else "works"
            else:
                verdict = f"no: {reasons}"
            page += f"| {torch} | {capability} | {passed} | {verdict} |\n"
            failed += len(broken)
    print(page, end="")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
