"""`make mutate`: put small faults into copies of Ringside, one at a time, and see which of them the tests notice.

Faults are drawn from a seed (`faults.py`); those of `review.toml`, which people thought of, come with the kept seed.
Each runs in a copy under build/mutate, against the tests that reach its line (`reach.py`), those of `make test` first,
until one fails. What is known lies in build/mutate/seed-N.jsonl: a run that was ended goes on where it stood.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomllib

from .faults import NATIVE, ROOT, Fault, draw
from .reach import Reach, environ, make

KEPT_SEED = 1
HERE = Path(__file__).parent
BUILD = ROOT / "build" / "mutate"


class Copy:
    """A copy of the repository with an environment of its own; faults are put into it and taken out again."""

    def __init__(self, number: int) -> None:
        self.tree = BUILD / f"copy-{number}"
        self.python = self.tree / ".venv" / "bin" / "python"
        self._core_is_stale = False  # built with a fault that its sources no longer have

    def bring_up_to_date(self) -> None:
        """Copy what git knows or would add, and build it."""
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        names = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
        for name in names:
            source, target = ROOT / name, self.tree / name
            if not target.is_file() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)  # newer than what was built of it
        folders = ("src", "verification", "tests")
        for package in folders:
            for old in (self.tree / package).rglob("*"):
                if old.is_file() and old.suffix != ".pyc" and str(old.relative_to(self.tree)) not in names:
                    old.unlink()
        base = getattr(sys, "_base_executable", sys.executable)
        subprocess.run(["make", "-s", "setup", f"PYTHON={base}"], cwd=self.tree, check=True, stdout=subprocess.DEVNULL)
        subprocess.run([str(self.python), "-m", "compileall", "-q", *folders], cwd=self.tree, check=False)

    def try_fault(self, fault: Fault, tests: list[str], limit_s: float) -> dict[str, Any]:
        """Return what the tests say of a fault within `limit_s`: "noticed" with the test's name, or "survived"."""
        path, native = self.tree / fault.path, fault.package == NATIVE
        text, times = path.read_text(), path.stat()
        path.write_text(fault.applied(text))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 10**10))  # its bytecode is not the file's
        try:
            if native:
                path.touch()
            if native or self._core_is_stale:
                self._core_is_stale = native
                if words := self._rebuild():
                    return {"outcome": "noticed", "by": "the compiler", "words": words}
            return self._run(tests, limit_s)
        finally:
            path.write_text(text)
            if not native:  # a native source stays newer than what was built of it
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def _rebuild(self) -> str:
        """Build what changed of the core, and return the compiler's words if it refuses."""
        command = [str(self.python), "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "-e", "."]
        done = subprocess.run(command, cwd=self.tree, capture_output=True, text=True, check=False)
        return done.stderr[-300:] if done.returncode else ""

    def _run(self, tests: list[str], limit_s: float) -> dict[str, Any]:
        listed = self.tree / "build" / "tests.txt"
        listed.parent.mkdir(exist_ok=True)
        listed.write_text("\n".join(tests) + "\n")
        command = [str(self.python), "-m", "pytest", "-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider"]
        command += ["--timeout", "60", "-m", "", f"@{listed}"]
        process = subprocess.Popen(
            command, cwd=self.tree, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True, preexec_fn=_no_core_dump,
        )  # fmt: skip
        try:
            words, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {"outcome": "noticed", "by": "nothing ends"}
        finally:
            with contextlib.suppress(ProcessLookupError):  # what a hanging test has started, too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode == 0:
            return {"outcome": "survived"}
        failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", words, flags=re.M)
        return {"outcome": "noticed", "by": failed[0] if failed else f"pytest's status {process.returncode}"}


def _no_core_dump() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def of_review() -> list[Fault]:
    """Return the faults that people thought of: a file, the piece and what stands there instead."""
    found = []
    for row in tomllib.loads((HERE / "review.toml").read_text())["fault"]:
        text = (ROOT / row["path"]).read_text()
        if text.count(row["before"]) != 1:
            raise SystemExit(f"review.toml, {row['id']}: {row['before']!r} is not once in {row['path']}")
        start = text.index(row["before"])
        line = text.count("\n", 0, start) + 1
        found.append(Fault(row["path"], start, row["before"], row["after"], line, row.get("statement", line)))
    return found


def equivalents() -> dict[str, str]:
    """Return the reasons why some faults change nothing that can be seen, by file and changed line (`reason_of`)."""
    rows = tomllib.loads((HERE / "equivalent.toml").read_text())["fault"]
    return {f"{row['path']}: {row['line']}": row["reason"] for row in rows}


def reason_of(fault: str, reasons: Mapping[str, str]) -> str | None:
    """Return why a fault, as the list of survivors prints it, changes nothing; None: it does."""
    return reasons.get(fault) or reasons.get(re.sub(r":\d+: ", ": ", fault, count=1))


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutate", description=__doc__)
    parser.add_argument("--seed", type=int, default=KEPT_SEED)
    parser.add_argument("--count", type=int, default=150, help="faults to draw (150)")
    parser.add_argument("--map", action="store_true", help="make the map anew, of today's tests")
    parser.add_argument("--again", action="store_true", help="try again what survived")
    parser.add_argument(
        "--most",
        type=float,
        default=90.0,
        metavar="SECONDS",
        help="try a fault on tests that take so long together, processor seconds; the page says of how many (90)",
    )
    parser.add_argument("--only", default="", help="only faults in files whose path holds this")
    parser.add_argument("--tests", default="", help="for --map: arguments of pytest, such as '-m \"not thorough\"'")
    asked = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    copies = [Copy(number) for number in range(2)]
    for copy in copies:
        copy.bring_up_to_date()
    if asked.map or not (BUILD / "reach" / "tests.json").exists():
        shutil.rmtree(BUILD / "reach", ignore_errors=True)
        make(BUILD / "reach", copies[0].tree, copies[0].python, shlex.split(asked.tests))
    reach = Reach(BUILD / "reach", copies[0].tree)

    faults = draw(asked.seed, asked.count) + (of_review() if asked.seed == KEPT_SEED else [])
    faults = [fault for fault in faults if asked.only in fault.path]
    kept = BUILD / f"seed-{asked.seed}.jsonl"
    known = {row["key"]: row for row in map(json.loads, kept.read_text().splitlines())} if kept.exists() else {}
    if asked.again:
        known = {key: row for key, row in known.items() if row["outcome"] != "survived"}
    left = [fault for fault in faults if fault.key not in known]
    lock, began, total = threading.Lock(), time.monotonic(), len(left)

    def work(copy: Copy) -> None:
        while True:
            with lock:
                if not left:
                    return
                fault = left.pop(0)
            tests, spent, chosen = reach.of(fault), 0.0, []
            for name in tests:
                if spent < asked.most:
                    chosen.append(name)
                    spent += reach.tests[name]["seconds"]
            started = time.monotonic()
            found = (
                copy.try_fault(fault, chosen, 6 * asked.most)
                if chosen
                else {"outcome": "survived", "by": "no test reaches it"}
            )
            found["core"] = reach.tests.get(found.get("by"), {}).get("core", found["outcome"] == "noticed")
            row = {"key": fault.key, "fault": str(fault), "package": fault.package, **found}
            row |= {"tests": len(tests), "tried": len(chosen), "seconds": round(time.monotonic() - started, 1)}
            with lock:
                known[fault.key] = row
                with kept.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                done = total - len(left)
                words = f"{row['outcome']} {row.get('by', '')}"
                print(f"{done}/{total} {time.monotonic() - began:.0f} s  {fault}\n    {words}", flush=True)

    threads = [threading.Thread(target=work, args=(copy,)) for copy in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    page = report(asked.seed, [known[fault.key] for fault in faults])
    (BUILD / f"seed-{asked.seed}.md").write_text(page)
    print(page)
    return 0


def report(seed: int, rows: list[dict[str, Any]]) -> str:
    """Return the page: what was noticed by package, and what was not."""
    reasons = equivalents()
    survived = [row for row in rows if row["outcome"] == "survived"]
    without = [row for row in survived if not reason_of(row["fault"], reasons)]
    core = sum(row["outcome"] == "noticed" and row["core"] for row in rows)
    lines = [
        f"Seed {seed}: {len(rows)} faults. {len(rows) - len(survived)} are noticed, {core} by the tests of `make test` "
        f"alone; {len(survived) - len(without)} change nothing that can be seen; {len(without)} survive.",
        "",
        "| package | faults | noticed | survive |",
        "|---|---|---|---|",
    ]
    counts, lost = Counter(row["package"] for row in rows), Counter(row["package"] for row in without)
    noticed = Counter(row["package"] for row in rows if row["outcome"] == "noticed")
    lines += [f"| {name} | {counts[name]} | {noticed[name]} | {lost[name]} |" for name in sorted(counts)]
    if without:
        lines += ["", "Survivors (tests tried of those that reach the line):", ""]
        lines += [f"- `{row['fault']}` ({row['tried']} of {row['tests']})" for row in without]
    alike = [(row["fault"], why) for row in survived if (why := reason_of(row["fault"], reasons))]
    if alike:
        lines += ["", "Change nothing that can be seen:", ""]
        lines += [f"- `{fault}`: {why}" for fault, why in alike]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
