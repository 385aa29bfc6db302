"""Every picture of README and docs, from one recorded run and from the schedules.

    $ python -m docs.generate.pictures          # the run that is kept in docs/generate/run.tar.xz
    $ python -m docs.generate.pictures RUN      # another one, which is kept from then on

The run is that of the tutorial's script, `train.py`, watched as README says, on two nodes of four ranks each; to have
both on one machine, start this twice at once, with other numbers for node and host:

    $ RINGSIDE_HOST=node0 RINGSIDE_ENGINE=native ringside run --nnodes 2 --node-rank 0 -n 4 --master-addr 127.0.0.1 \\
        --master-port 29611 --run-dir runs/train train.py --steps 160

Writes docs/images, and there `pictures.json`: a digest of what decides how each picture looks, and one of its file. A
test makes the former anew, without a browser, and fails when a picture no longer shows what the program does.
Needs Chromium, textual and anywidget.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import html
import json
import re
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from ringside.monitor.summary import finish_run
from ringside.schedule import by_name
from ringside.view.html.run_report import render_report
from ringside.view.schedule.drawing import schedule_sheet, schedule_svg
from ringside.view.tui.source import Local, take_snapshot

PICTURES = Path(__file__).parent.parent / "images"
DIGESTS = PICTURES / "pictures.json"
KEPT_RUN = Path(__file__).parent / "run.tar.xz"
RECORDED = ("run.json", "events.jsonl", "steps.jsonl")
"""What a job writes while it runs; the rest of a run directory is made from these."""
SIZES = {"report": (1000, 770), "notebook": (1000, 390)}
"""Width and height of PNG pictures in CSS pixels: verdict and proof of the report, which README shows smaller."""
LIVE_STEP = 120
"""Views of a job that goes on show it as it was after this step."""
SCREEN = (100, 15)
"""Columns and lines of the terminal."""
SCHEMES = {"": ("light", "textual-light"), "-dark": ("dark", "textual-dark")}


def sources(run: Path) -> dict[str, str]:
    """Return what decides how each picture looks: the SVG itself, or the page that is photographed.

    Args:
        run: A run directory; its report is written anew.
    """
    finish_run(run, render_report)
    page = (run / "report.html").read_text()
    top_of_page = page[: page.index("</section>", page.index('aria-label="Own time"'))] + "</section></main></html>"
    with tempfile.TemporaryDirectory() as folder:
        live = until_step(run, Path(folder) / run.name, LIVE_STEP)
        made = {f"top{end}.svg": top_screen(live, theme) for end, (_, theme) in SCHEMES.items()}
        made |= {"notebook.png": notebook_page(live)}
    return made | {
        "report.png": top_of_page,
        "report-dark.png": top_of_page,
        "ring-4.svg": schedule_svg(by_name("ring", 4), 1),
        "two_tree-7.svg": schedule_sheet(by_name("two_tree", 7), "two_tree, 7 ranks"),
    }


def until_step(run: Path, copy: Path, step: int) -> Path:
    """Copy a run as it was on disk after a step; return the copy."""
    copy.mkdir()
    for name in RECORDED:
        lines = (run / name).read_text().splitlines(keepends=True)
        if name == "steps.jsonl":
            lines = [line for line in lines if json.loads(line)["step"] <= step]
        if name == "events.jsonl":
            lines = [line for line in lines if json.loads(line)["kind"] != "ended"]
        (copy / name).write_text("".join(lines))
    return copy


def top_screen(run: Path, theme: str) -> str:
    """Return `ringside top` as an SVG that fetches no font."""
    from ringside.view.tui.app import TopApp

    async def play() -> str:
        app = TopApp(Local(run), refresh_s=None, clock=lambda: 0.0)
        async with app.run_test(size=SCREEN) as pilot:
            await app.workers.wait_for_complete()
            app.theme = theme
            await pilot.pause()
            return app.export_screenshot(title=f"ringside top runs/{run.name}")

    svg = re.sub(r"@font-face \{.*?\}\s*", "", asyncio.run(play()), flags=re.DOTALL)
    return re.sub(r"[ \t]+$", "", svg.replace("Fira Code, monospace", "monospace"), flags=re.MULTILINE)


def notebook_page(run: Path) -> str:
    """Return a page that shows the live view of notebooks as its front end draws it."""
    from ringside.notebook import LiveView, state_of

    state = json.dumps(state_of(take_snapshot(Local(run))))
    code = base64.b64encode(LiveView._esm.encode()).decode()
    return f"""<!doctype html><meta charset="utf-8"><style>{LiveView._css} body {{ margin: 20px }}</style><body><script>
import("data:text/javascript;base64,{code}").then((widget) => widget.default.render(
  {{ model: {{ get: () => ({state}), on() {{}}, off() {{}}, send() {{}} }}, el: document.body }}));
</script></body>
"""


def digest(content: str | bytes) -> str:
    """Return what is noted of a picture or of its source."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:16]


def words_of(source: str) -> str:
    """Return what is compared of a source: all of it, but of a screen its words, for colours are textual's own."""
    if "rich-terminal" not in source:
        return source
    return "\n".join(html.unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", source))


def keep(run: Path) -> None:
    """Make a run the one that pictures are made from."""
    with tarfile.open(KEPT_RUN, "w:xz") as archive:
        for name in RECORDED:
            archive.add(run / name, f"train/{name}")


def kept_run(folder: Path) -> Path:
    """Unpack the run that is kept; return its directory."""
    with tarfile.open(KEPT_RUN) as archive:
        for name in RECORDED:
            file = archive.extractfile(f"train/{name}")
            assert file is not None
            (folder / "train").mkdir(exist_ok=True)
            (folder / "train" / name).write_bytes(file.read())
    return folder / "train"


def photograph(pages: dict[str, str], chromium: str) -> None:
    """Write a PNG of the top of each page."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, page_text in pages.items():
            width, height = SIZES[name.split(".")[0].removesuffix("-dark")]
            page = browser.new_page(
                viewport={"width": width, "height": height},
                color_scheme="dark" if "-dark" in name else "light",
            )
            page.set_content(page_text)
            page.screenshot(path=PICTURES / name)
        browser.close()


def main() -> int:
    """Make all pictures; return 2 where there is no run or no Chromium."""
    parser = argparse.ArgumentParser(
        prog="docs.generate.pictures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, nargs="?", help="a run directory, to be kept (default: the one that is kept)")
    run: Path | None = parser.parse_args().run
    chromium = shutil.which("chromium")
    if chromium is None or (run is not None and not (run / "steps.jsonl").exists()):
        print(f"pictures: {'Chromium is not installed' if chromium is None else f'{run} is no run'}", file=sys.stderr)
        return 2
    if run is not None:
        keep(run)
    with tempfile.TemporaryDirectory() as folder:
        made = sources(kept_run(Path(folder)))
    for name, source in made.items():
        if name.endswith(".svg"):
            (PICTURES / name).write_text(source)
    photograph({name: source for name, source in made.items() if name.endswith(".png")}, chromium)
    digests = {
        name: {"source": digest(words_of(source)), "file": digest((PICTURES / name).read_bytes())}
        for name, source in sorted(made.items())
    }
    DIGESTS.write_text(json.dumps(digests, indent=2) + "\n")
    print(*(PICTURES / name for name in digests), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
