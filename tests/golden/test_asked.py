"""What options ask for, before anything is started: a line for each command line."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.golden.calls import Call
from tests.support.golden import Golden, rounded

from ringside.commands import bench, build_parser, lab, probe, serve, top
from ringside.engine.topology import cache_bytes
from ringside.view.server import app as server

BENCH = (
    "-n 2", "-n 3 --quick", "-n 2 --quick -b 8 -e 8", "-n 2 --quick -b 1K -e 1M", "-n 2 --sizes 4,1K,7",
    "-n 2 -b 64 -e 4K -f 8", "-n 2 -d half -o max --iterations 7 --rounds 2", "-n 2 --algorithm ring,auto,ring",
    "-n 2 -d int8 -o bxor --quick --rounds 9", "-n 1 -e 1K -d float64",
)  # fmt: skip
LAB = (
    "-- true", "--hosts 3 --rate none -- true", "--hosts 2 --ranks-per-host 3 --delay 5ms -- true",
    "--hosts 2 --ranks-per-host 2,1 --rate 250mbit --wiring mesh -- true",
)  # fmt: skip
PROBE = ("", "--all-ranks", "--order 0,2,1", "--quick --timeout 3")
STARTED = ("-n 2", "-n 3 --quick --json --all-ranks --timeout 2.5", "--nproc-per-node 2 --order 0,1 -o t.json")
SERVE = ("demo", "demo --port 0 --host localhost", "demo --host 0.0.0.0 --token t --allow-host a --allow-host b", "")
TOP = ("demo", "http://127.0.0.1:8777", "https://somewhere/run/x/", "")


def parsed(verb: str, words: str) -> argparse.Namespace:
    return build_parser(verbs=(verb,)).parse_args([verb, *words.split()])


def told(verb: str, commands: tuple[str, ...], asked: Callable[[argparse.Namespace], Any]) -> str:
    return "".join(f"{verb} {words}\n    {asked(parsed(verb, words))}\n" for words in commands)


def test_a_benchmarks_plan_is_as_it_was(golden: Golden) -> None:
    def plan(args: argparse.Namespace) -> str:
        found, skipped = bench.make_plan(args)
        assert (found.cache_bytes, skipped) == (cache_bytes(), [])
        fields = msgspec.structs.asdict(found)
        return ", ".join(f"{name}={value}" for name, value in fields.items() if name not in ("key", "cache_bytes"))

    golden.check("asked/bench.txt", told("bench", BENCH, plan))


def test_a_lab_is_made_as_it_was(golden: Golden) -> None:
    def made(args: argparse.Namespace) -> str:
        found = lab.make_lab(args)
        return f"{found.hosts} hosts, {found.ranks_per_host}, {found.wiring}, {found.delay_s} s, {found.rate} bit/s"

    golden.check("asked/lab.txt", told("lab", LAB, made))


def test_a_probe_asks_for_what_it_did(place: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(variable, "0")
    asked: list[dict[str, Any]] = []
    fine = argparse.Namespace(rank=1, trouble="", probe=None, broken=(), fine=True)
    monkeypatch.setattr(probe, "probe_job", lambda **words: asked.append(words) or fine)
    for words in PROBE:
        assert probe.run(parsed("probe", words)) == 0
    lines = [f"probe {words}\n    {what}\n" for words, what in zip(PROBE, asked, strict=True)]

    started: list[tuple[list[str], dict[str, str]]] = []

    class Rank:
        def __init__(self, command: list[str], env: dict[str, str], **_: object) -> None:
            started.append((command[1:], env))
            self.number = len(started)

        def wait(self) -> int:
            return self.number % 2

        def kill(self) -> None:
            pass

    monkeypatch.setattr(subprocess, "Popen", Rank)
    for words in STARTED:
        assert probe.run(parsed("probe", words)) == 1  # of the rank that failed
        ranks = [(env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"]) for _, env in started]
        assert len({tuple(command) for command, _ in started}) == len({env["MASTER_PORT"] for _, env in started}) == 1
        lines.append(f"probe {words}\n    {' '.join(started[0][0])}\n    {ranks}\n")
        started.clear()
    golden.check("asked/probe.txt", "".join(lines))


def test_a_page_is_served_as_it_was(place: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGSIDE_SERVE_TOKEN", raising=False)
    (place / "runs").mkdir()
    (place / "hosts").rename(place / "runs" / "hosts")
    asked: list[str] = []

    class Served:
        url = "http://127.0.0.1/"

        def __init__(self, runs: Any, host: str, port: int, **more: Any) -> None:
            asked.append(f"{runs.first().path.absolute().relative_to(place)} at {host}:{port}, {more}")
            runs.close()

        def run(self) -> None:
            pass

    monkeypatch.setattr(server, "PageServer", Served)
    lines = told("serve", SERVE, lambda args: (serve.run(args), asked[-1])[1])
    monkeypatch.setenv("RINGSIDE_SERVE_TOKEN", "of the environment")
    golden.check("asked/serve.txt", lines + told("serve", SERVE[:3], lambda args: (serve.run(args), asked[-1])[1]))


def test_what_top_shows_is_as_it_was(place: Path, golden: Golden) -> None:
    def chosen(args: argparse.Namespace) -> str:
        source, remark = top.choose_run(args.run)
        return f"{type(source).__name__} {source.where} {remark}"

    (place / "runs").mkdir()
    (place / "hosts").rename(place / "runs" / "hosts")
    golden.check("asked/top.txt", told("top", TOP, chosen))


PREDICT = (
    "--preset dgx-h100 --hosts 4 --ranks-per-host 2", "--preset p5 --bytes 100MB --dtype fp32",
    "--preset p5 --model 350M --dtype fp16 --memory 40GB", "--preset p5 --model 1B --bytes 1GiB --algorithm Tree",
    "--preset ethernet-10g --bytes 1G --compute-seconds 0.5 --batch-per-rank 3 --accumulate 5 --base-batch 64",
    "--run demo --preset loopback --algorithm ring --model 1M --dtype fp32",
)  # fmt: skip


def test_questions_of_a_plan_are_as_they_were(command: Call, golden: Golden) -> None:
    lines = []
    for words in PREDICT:
        _, out, error = command(f"predict {words} --json")
        found = json.loads(out or "{}")
        parts = (f"    {name}: {rounded(found.get(name))}\n" for name in ("question", "batch", "fit", "priced"))
        lines.append(f"predict {words}\n{''.join(parts)}{error}")
    golden.check("asked/predict.txt", "".join(lines))
