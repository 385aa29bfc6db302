"""The README's pictures of a report, light and dark, from a recorded run.

    $ ringside demo --run-dir runs/picture
    $ python -m docs.generate.pictures runs/picture

Writes docs/images/report.png and report-dark.png, 1200 x 600 CSS pixels: the top of the page. Needs Chromium.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

WIDTH, HEIGHT = 1200, 600
"""CSS pixels: on a page of README's width that is about half a screen."""
PICTURES = Path(__file__).parent.parent / "images"


def main() -> int:
    """Take both pictures; return 2 where there is no report or no Chromium."""
    parser = argparse.ArgumentParser(
        prog="docs.generate.pictures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run directory with a report.html")
    report: Path = parser.parse_args().run / "report.html"
    chromium = shutil.which("chromium")
    if not report.exists() or chromium is None:
        missing = f"{report} does not exist" if not report.exists() else "Chromium is not installed"
        print(f"pictures: {missing}", file=sys.stderr)
        return 2
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme, name in (("light", "report.png"), ("dark", "report-dark.png")):
            page = browser.new_page(
                viewport={"width": WIDTH, "height": HEIGHT},
                color_scheme="light" if scheme == "light" else "dark",
            )
            page.goto(report.resolve().as_uri())
            page.screenshot(path=PICTURES / name)
            print(PICTURES / name)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
