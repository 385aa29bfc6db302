"""Feeds readers with damaged files, bounded in time and memory: `python -m tests.hostile.fuzz_run dumps --seed 7`.

In every case some files of a real folder are damaged and all of it is read. What must hold: the reader ends in time and
within its memory, it says what it found or raises one of our own errors, nothing is executed, files that are whole are
still read, and what is shown has no control characters. What does not hold is told once per kind, with the smallest
damage that still shows it. Prints JSON, a line per
reader: how many cases there were, and what was found.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import faulthandler
import json
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from ringside.errors import RingsideError

MOST_CPU_S = 30.0
"""CPU time of one case; a whole file takes some hundredths of a second, one that speaks of 100,000 ranks eight."""
STUCK_S = 120.0
"""Wall-clock time after which a case that does not even hear signals is given up, with its stack."""
MOST_MORE_BYTES = 3 << 30
TRIES = 80
"""How often the damage of one finding is made smaller."""

Files = dict[str, bytes]


@dataclass(frozen=True)
class Reader:
    """What is fuzzed.

    Args:
        name: What to call it.
        write: Writes folders of real files below a folder.
        read: Reads such a folder with all that our commands do with it, and yields whatever a user is shown.
        damage: Damages the content of one file.
        unread: Of the files of a folder that are whole, those that were not read, after `read`.
    """

    name: str
    write: Callable[[Path], None]
    read: Callable[[Path], Iterable[str]]
    damage: Callable[[bytes, Random], bytes]


class OthersUnreadError(AssertionError):
    """A file that is whole was not read, because another one is damaged."""


class TooLong(BaseException):
    """A case has used up its CPU time."""


class NotFitToShow(AssertionError):
    """What is shown would act upon a terminal or a browser."""


class Executed(AssertionError):
    """Something that was found in a file was run."""


@dataclass
class Found:
    """One kind of finding: how often, and the first case of it."""

    case: int
    error: str
    stack: str
    files: dict[str, str] = field(default_factory=dict)
    count: int = 1


def fuzz(reader: Reader, seed: int, seconds: float, most_cases: int, keep: Path | None) -> dict[str, Any]:
    """Return what came of it."""
    with tempfile.TemporaryDirectory(prefix="ringside-fuzz-") as scratch:
        folder = Path(scratch)
        os.environ["RINGSIDE_FUZZ_SIGN"] = str(folder / "executed")
        reader.write(folder / "real")
        scenes = [_files(scene) for scene in sorted((folder / "real").iterdir())]
        seen_whole: set[int] = set()
        found: dict[str, Found] = {}
        case, until = 0, time.monotonic() + seconds
        while case < most_cases and time.monotonic() < until:
            random = Random(f"{seed} {reader.name} {case}")
            number = random.randrange(len(scenes))
            scene = scenes[number]
            if number not in seen_whole:
                seen_whole.add(number)
                if (trouble := _trouble(reader, scene, {}, folder, refusals=False)) is not None:
                    raise SystemExit(f"{reader.name} does not read what is whole: {trouble[1]}")
            broken = {
                name: reader.damage(scene[name], random)
                for name in random.sample(sorted(scene), min(len(scene), random.choice((1, 1, 1, 2))))
            }
            print(f"{reader.name}: seed {seed}, case {case}", file=sys.stderr, flush=True)
            trouble = _trouble(reader, scene, broken, folder)
            if trouble is not None and trouble[0] in found:
                found[trouble[0]].count += 1
            elif trouble is not None:
                smaller = _smaller(reader, scene, broken, trouble[0], folder)
                found[trouble[0]] = Found(case, *trouble, _kept(smaller, keep, f"{reader.name}-{seed}-{case}"))
            case += 1
    return {
        "reader": reader.name,
        "seed": seed,
        "cases": case,
        "found": {kind: vars(one) for kind, one in found.items()},
    }


def _trouble(
    reader: Reader, scene: Files, broken: Files, scratch: Path, *, refusals: bool = True
) -> tuple[str, str] | None:
    """Read a folder; return a finding's kind and stack, None where all is as it should be (`refusals` included)."""
    folder = scratch / "case"
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in {**scene, **broken}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    HIDDEN.clear()
    WHOLE.clear()
    WHOLE.update(str(folder / name) for name in scene if name not in broken)
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
    try:
        try:
            for text in reader.read(folder):
                _check_text(text)
        except RingsideError:  # what the command line prints of it is text of `_command`
            if not refusals:
                raise
        if (scratch / "executed").exists():
            raise Executed("something in a file was run")
    except (Exception, TooLong, SystemExit) as error:
        return _kind(HIDDEN[0] if HIDDEN else error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):
            (scratch / "executed").rmdir()
    return _kind(HIDDEN[0]) if HIDDEN else None


def _kind(error: BaseException) -> tuple[str, str]:
    """An error's type and the innermost place of ours, and all its stack."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/ringside/" in frame.filename]
    where = f"{Path(ours[-1].filename).stem}.{ours[-1].name}" if ours else "outside"
    if isinstance(error, TooLong) and ours:  # where the time goes is anywhere below
        where = f"{Path(ours[min(4, len(ours) - 1)].filename).stem}"
    text = "".join(traceback.format_exception(error, limit=-12))
    return f"{type(error).__name__} in {where}", text[-3000:]


def _check_text(text: str) -> None:
    if text[:1] == "{":
        json.loads(text, parse_constant=_no_number)
    page = text.startswith("<!doctype html>")
    for line in text.split("\n"):
        plain = line.replace("\t", " ")
        bad = [one for one in plain if ord(one) < 32 or 0x7F <= ord(one) < 0xA0] if page else []
        if bad or not (page or plain.isprintable()):
            signs = bad or [one for one in plain if not one.isprintable()]
            raise NotFitToShow(f"{signs[:3]!r} in {plain[:200]!r}")
    if page and "<script>alert(1)" in text:
        raise NotFitToShow("markup of a file is markup of the page")


def _no_number(text: str) -> None:
    raise NotFitToShow(f"{text} in JSON")


# ------------------------------------------------------------------------------------------------- smaller, and kept


def _smaller(reader: Reader, scene: Files, broken: Files, kind: str, scratch: Path) -> Files:
    """The least of the damage that is still of this kind: fewer files, then fewer bytes."""
    if kind.startswith("TooLong"):
        return broken

    def shows(files: Files) -> bool:
        trouble = _trouble(reader, scene, files, scratch)
        return trouble is not None and trouble[0] == kind

    for name in list(broken):
        rest = {other: content for other, content in broken.items() if other != name}
        if rest and shows(rest):
            broken = rest
    tries = TRIES
    for name in broken:
        step = max(len(broken[name]) // 2, 1)
        while step >= 1 and tries > 0:
            at = 0
            while at < len(broken[name]) and tries > 0:
                shorter = {**broken, name: broken[name][:at] + broken[name][at + step :]}
                tries -= 1
                if shows(shorter):
                    broken = shorter
                else:
                    at += step
            step //= 2
    return broken


def _kept(files: Files, keep: Path | None, name: str) -> dict[str, str]:
    """What the files are; whole ones in a folder where there is one for them."""
    if keep is not None:
        for file, content in files.items():
            path = keep / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return {file: _text(content) for file, content in files.items()}


def _text(content: bytes) -> str:
    if len(content) > 1500:
        return f"{content[:700]!r} ... {len(content)} bytes"
    return repr(content) if content.isascii() else f"base64 {base64.b64encode(content).decode()}"


def _files(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ------------------------------------------------------------------------------------------------- bounds and traps

HIDDEN: list[BaseException] = []
"""Errors that a part of ours caught and only logged: a reader of the doctor that gave up all files of its kind."""
WHOLE: set[str] = set()
"""Paths of the files of the case that are as they were."""


class _Trap(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None and not isinstance(record.exc_info[1], RingsideError):
            HIDDEN.append(record.exc_info[1])


def confine() -> None:
    """Bound this process: memory, and CPU time per case; make hidden errors known."""
    vm_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (vm_bytes + MOST_MORE_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def too_long(signum: int, frame: FrameType | None) -> None:
        raise TooLong(f"more than {MOST_CPU_S:g} s of CPU time")

    signal.signal(signal.SIGPROF, too_long)
    for name in ("ringside.doctor.examine", "ringside.view.server.feed"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        logger.addHandler(_Trap())
    logging.getLogger().addHandler(logging.NullHandler())
    warnings.simplefilter("ignore")


def main() -> Iterator[str]:
    """Fuzz readers one after the other; yield what to print of each, JSON in one line."""
    from tests.hostile.fuzz_readers import READERS

    parser = argparse.ArgumentParser()
    parser.add_argument("readers", choices=sorted(READERS), nargs="+", metavar="READER")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600.0, help="for each reader")
    parser.add_argument("--cases", type=int, default=1 << 30, help="for each reader, at most")
    parser.add_argument("--keep", type=Path, help="a folder for the damaged files of what is found")
    args = parser.parse_args()
    confine()
    for name in args.readers:
        yield json.dumps(fuzz(READERS[name], args.seed, args.seconds, args.cases, args.keep))


if __name__ == "__main__":
    for text in main():
        print(text, flush=True)
