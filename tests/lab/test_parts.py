"""A lab without privilege: the commands that would be given, ranks as plain processes, frames between sockets."""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench.lab import accuracy as measure
from tests.support.ranks import on_ranks

from ringside.errors import RingsideError, UnsupportedError, UsageError
from ringside.lab import Lab, delay, network
from ringside.lab import lab as labs
from ringside.lab import namespaces as names
from ringside.lab.namespaces import LabName
from ringside.lab.processes import RankPlacement, RankProcesses, RankResult, RunResult, default_environment
from ringside.lab.wiring import mesh, parse_delay, parse_rate, payload_bytes_per_second, star

PATIENCE_S = 60.0
NAME = LabName(7, 100, 0)


# ------------------------------------------------------------------------------------------------ commands


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every command of `ip` and `tc` that is given, with its namespace."""
    lines: list[str] = []

    def batch(tool: str, commands: Any, namespace: str | None = None) -> None:
        node = "" if namespace is None else f"{namespace.rpartition('-')[2]}: "
        lines.extend(f"{node}{tool} {command}" for command in commands)

    monkeypatch.setattr(network, "batch", batch)
    monkeypatch.setattr(network, "inside", lambda namespace, function: lines.append(f"settings of {namespace}"))
    return lines


def test_a_star_is_wired_by_these_commands(given: list[str]) -> None:
    assert network.build(NAME, star(2, 0.0), 80e6) is None
    tbf = "root tbf rate 80000000bit burst 6056 limit 160000"
    assert given == [
        *(f"ip netns add ringside-7-100-0-{node}" for node in ("h0", "h1", "switch")),
        *(f"settings of ringside-7-100-0-{node}" for node in ("h0", "h1", "switch")),
        "ip link add name lab0 netns ringside-7-100-0-h0 type veth peer name port0 netns ringside-7-100-0-switch",
        "ip link add name lab0 netns ringside-7-100-0-h1 type veth peer name port1 netns ringside-7-100-0-switch",
        "h0: ip link set lo up", "h0: ip addr add 10.77.0.1/24 dev lab0",
        "h1: ip link set lo up", "h1: ip addr add 10.77.0.2/24 dev lab0",
        "switch: ip link set lo up", "switch: ip link add name br0 type bridge mcast_snooping 0",
        "switch: ip link set br0 up", "switch: ip addr add 10.77.0.254/24 dev br0",
        "switch: ip link set port0 master br0", "switch: ip link set port1 master br0",
        "h0: ip link set lab0 gso_max_size 3028",
        "switch: ip link set port0 gso_max_size 3028", "switch: ip link set port1 gso_max_size 3028",
        "switch: ip link set br0 gso_max_size 3028",
        "h1: ip link set lab0 gso_max_size 3028",
        "h0: tc qdisc replace dev lab0 root pfifo limit 1000", f"h0: tc qdisc replace dev lab0 {tbf}",
        "switch: tc qdisc replace dev port0 root pfifo limit 1000", f"switch: tc qdisc replace dev port0 {tbf}",
        "switch: tc qdisc replace dev port1 root pfifo limit 1000", f"switch: tc qdisc replace dev port1 {tbf}",
        "h1: tc qdisc replace dev lab0 root pfifo limit 1000", f"h1: tc qdisc replace dev lab0 {tbf}",
        "h0: ip link set lab0 up", "switch: ip link set port0 up", "switch: ip link set port1 up",
        "h1: ip link set lab0 up",
    ]  # fmt: skip


def test_a_mesh_of_links_without_a_limit_is_wired_by_these_commands(given: list[str]) -> None:
    network.build(NAME, mesh(2, 0.0), None)
    assert given[4:] == [
        "ip link add name to1 netns ringside-7-100-0-h0 type veth peer name to0 netns ringside-7-100-0-h1",
        "h0: ip link set lo up", "h0: ip link add name lab0 type bridge mcast_snooping 0", "h0: ip link set lab0 up",
        "h0: ip addr add 10.77.0.1/32 dev lab0",
        "h1: ip link set lo up", "h1: ip link add name lab0 type bridge mcast_snooping 0", "h1: ip link set lab0 up",
        "h1: ip addr add 10.77.0.2/32 dev lab0",
        "h0: ip link set to1 gso_max_size 65536", "h1: ip link set to0 gso_max_size 65536",
        "h0: tc qdisc replace dev to1 root pfifo limit 1000", "h1: tc qdisc replace dev to0 root pfifo limit 1000",
        "h0: ip link set to1 up", "h1: ip link set to0 up",
        "h0: ip route replace 10.77.0.2/32 dev to1 src 10.77.0.1",
        "h1: ip route replace 10.77.0.1/32 dev to0 src 10.77.0.2",
    ]  # fmt: skip


def test_the_bridge_takes_pieces_of_the_slowest_link(given: list[str]) -> None:
    one, two = star(2, 0.0).links
    network.shape(NAME, {one: None, two: 800e6})
    assert "switch: ip link set br0 gso_max_size 12999" in given
    assert "switch: ip link set port0 gso_max_size 65536" in given
    given.clear()
    network.cut(NAME, [two])
    assert given == [
        "h1: tc qdisc replace dev lab0 root blackhole",
        "switch: tc qdisc replace dev port1 root blackhole",
    ]


def test_a_long_link_takes_larger_pieces(given: list[str]) -> None:
    network.shape(NAME, dict.fromkeys(mesh(2, 0.02).links, 100e6))
    assert "h0: ip link set to1 gso_max_size 12500" in given
    assert "h0: tc qdisc replace dev to1 root tbf rate 100000000bit burst 25000 limit 400000" in given
    given.clear()
    network.shape(NAME, dict.fromkeys(star(1, 0.02).links, 100e6))
    assert "h0: ip link set lab0 gso_max_size 6250" in given


def test_links_with_a_delay_are_joined_by_a_process_which_does_not_outlive_a_refusal(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    ended: list[str] = []
    process = SimpleNamespace(kill=lambda: ended.append("kill"), wait=lambda: ended.append("wait"))
    monkeypatch.setattr(network, "start_delay", lambda *asked: started.append(asked) or process)
    assert network.build(NAME, mesh(2, 0.02), 1e9) is process
    assert started == [(0.02, [(("ringside-7-100-0-h0", "to1"), ("ringside-7-100-0-h1", "to0"))])]
    assert not any("veth" in line for line in given)
    assert ended == []

    def refuses(*asked: Any) -> None:
        raise RingsideError("refused")

    monkeypatch.setattr(network, "shape", refuses)
    with pytest.raises(RingsideError, match="refused"):
        network.build(NAME, mesh(2, 0.02), 1e9)
    assert ended == ["kill", "wait"]


@pytest.mark.parametrize(
    ("rate", "delay_s", "piece", "bucket", "queue"),
    [
        (1e6, 0.0, 3028, 6056, 96896),
        (80e6, 0.0, 3028, 6056, 160000),
        (1e9, 0.0, 16249, 62500, 2000000),
        (1e11, 0.0, 65536, 6250000, 2 * 10**8),
        (1e9, 2.5e-3, 16249, 62500, 2000000),
        (1e9, 8e-3, 50000, 100000, 2000000),
        (1e7, 5.0, 65536, 131072, 10**7),
    ],
)
def test_sizes_that_belong_to_a_rate_and_a_delay(
    rate: float, delay_s: float, piece: int, bucket: int, queue: int
) -> None:
    assert (network.piece_bytes(rate, delay_s), network.bucket_bytes(rate, delay_s)) == (piece, bucket)
    assert network.limit("lab0", rate, delay_s)[-1].endswith(f" burst {bucket} limit {queue}")
    assert network.pieces("lab0", rate, delay_s) == [f"link set lab0 gso_max_size {piece}"]


def test_the_ends_of_what_is_a_rate_or_a_delay() -> None:
    assert [parse_rate(rate) for rate in ("100kbit", "100gbit", "1e6bit", ".5mbit")] == [1e5, 1e11, 1e6, 5e5]
    assert [parse_delay(text) for text in (0, "10s", "0s", 10)] == [0.0, 10.0, 0.0, 10.0]
    assert payload_bytes_per_second(8e6) == 1e6 * 1448 / 1514


@pytest.mark.parametrize("batched", [["link show", "link add"], ["link show"]])
def test_commands_go_to_one_process(tmp_path: Path, batched: list[str]) -> None:
    tool = tmp_path / "ip"
    tool.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$*\" >> {tmp_path}/words\ncat >> {tmp_path}/words\n")
    tool.chmod(0o755)
    network.batch(str(tool), batched, "h0")
    assert (tmp_path / "words").read_text() == "-n h0 -batch -\n" + "\n".join(batched)
    (tmp_path / "words").unlink()
    network.batch(str(tool), [])
    assert not (tmp_path / "words").exists()
    network.batch(str(tool), batched)
    assert (tmp_path / "words").read_text().startswith("-batch -\n")


def test_a_refused_command_is_named_without_what_iproute_adds(tmp_path: Path) -> None:
    tool = tmp_path / "tc"
    for words, said in (
        ("echo no such device >&2; echo 'Command failed -:1' >&2", "no such device"),
        ("", "no reason"),
    ):
        tool.write_text(f"#!/bin/sh\ncat > /dev/null\n{words}\nexit 1\n")
        tool.chmod(0o755)
        with pytest.raises(RingsideError, match=f"refused a command: {said}( given)?$"):
            network.batch(str(tool), ["qdisc"])


def test_why_there_is_no_lab_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(returncode=2, stderr="one\nunshare failed: Operation not permitted\n")
    monkeypatch.setattr(network.shutil, "which", lambda name: name)
    monkeypatch.setattr(network.os, "geteuid", lambda: 0)
    monkeypatch.setattr(network.subprocess, "run", lambda *words, **how: done)
    ask = network.unavailable.__wrapped__
    assert ask().endswith("modules that are missing: unshare failed: Operation not permitted")
    done.stderr = ""
    assert ask().endswith("no reason given")
    done.returncode = 0
    assert ask() == ""

    def breaks(*words: Any, **how: Any) -> None:
        raise subprocess.TimeoutExpired("unshare", 60)

    monkeypatch.setattr(network.subprocess, "run", breaks)
    assert ask().startswith("the lab needs unshare to work")
    monkeypatch.setattr(network, "unavailable", lambda: "no lab at all")
    assert Lab.unavailable(delay=True) == "no lab at all"
    monkeypatch.setattr(network, "unavailable", lambda: "")
    for able in (True, False):
        monkeypatch.setattr(network.os, "access", lambda path, mode, able=able: able and mode == os.R_OK | os.W_OK)
        assert (Lab.unavailable(delay=True) == "") is able


def test_counters_of_the_kernel_are_read_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Inter-|   Receive\n face |bytes packets\n  lo: 1 0 0 0 0 0 0 0 2 0\nlab0:30 1 1 1 1 1 1 1 40 9 9\n"
    monkeypatch.setattr(network, "inside", lambda *_: text)
    counted = [network.interface_bytes("h0", devices) for devices in (["lo"], ["lab0"], ["lo", "lab0"])]
    assert counted == [(1, 2), (30, 40), (31, 42)]


def test_names_say_when_their_owner_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = LabName.new()
    assert own.owner_lives()
    assert not LabName(own.pid, own.start - 1, own.count).owner_lives(), "a later process of the same number"
    assert str(LabName(3, 4, 5)) == "ringside-3-4-5"
    assert LabName.of_namespace("ringside-3-4-5-switch") == LabName(3, 4, 5)
    monkeypatch.setattr(names, "DIRECTORY", tmp_path)
    for name in ("ringside-3-4-5-h1", "somebody", "ringside-3-4-5-h0"):
        (tmp_path / name).touch()
    assert names.namespaces_there() == ["ringside-3-4-5-h0", "ringside-3-4-5-h1"]
    monkeypatch.setattr(names, "DIRECTORY", tmp_path / "nowhere")
    assert names.namespaces_there() == []


def test_one_rank_alone_may_use_all_cores() -> None:
    assert "OMP_NUM_THREADS" not in default_environment({}, 1)
    assert default_environment({}, 2)["OMP_NUM_THREADS"] == "1"
    assert default_environment({"RES_OPTIONS": "x"}, 2).keys() == {
        "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS",
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ an open lab


class Opened:
    """A lab whose network is only told of: what would be built, shaped, cut and removed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bin_: Path) -> None:
        self.done: list[Any] = []
        self.guarded: list[LabName] = []
        tool = bin_ / "ip"
        tool.write_text('#!/bin/sh\nshift 3\nexec "$@"\n')  # of `ip netns exec NAME`: here
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(bin_), prepend=os.pathsep)
        self.guard = subprocess.Popen(["sleep", "1000"])
        self.delays = subprocess.Popen(["sleep", "1000"], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.counts = iter(range(1, 10**6))
        monkeypatch.setattr(Lab, "unavailable", staticmethod(lambda delay=False: "no TAP" if delay else ""))
        monkeypatch.setattr(labs, "remove_leftovers", lambda: self.done.append("leftovers"))
        monkeypatch.setattr(labs, "remove", lambda name: self.done.append(f"remove {name}"))
        monkeypatch.setattr(labs, "start_guard", self._guards)
        monkeypatch.setattr(labs, "interface_bytes", self._bytes)
        for step in ("build", "shape", "cut"):
            monkeypatch.setattr(network, step, lambda name, *asked, step=step: self._did(step, *asked))

    def _guards(self, name: LabName) -> Any:
        self.guarded.append(name)
        return self.guard

    def _did(self, step: str, *asked: Any) -> Any:
        self.done.append((step, *asked))
        return self.delays

    def _bytes(self, namespace: str, devices: Sequence[str]) -> tuple[int, int]:
        count = next(self.counts)
        self.done.append((namespace.rpartition("-")[2], list(devices)))
        return count, 10 * count


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Opened]:
    made = Opened(monkeypatch, tmp_path)
    yield made
    for child in (made.guard, made.delays):
        child.kill()
        child.communicate()


def test_a_lab_is_built_once_and_removed_with_all_that_it_started(opened: Opened) -> None:
    lab = Lab(hosts=2, rate="10mbit")
    with lab:
        assert opened.done == ["leftovers", ("build", star(2, 0.0), 10e6)]
        assert [lab.name] == [str(name) for name in opened.guarded]
        assert (lab.address(1), lab.switch_address) == ("10.77.0.2", "10.77.0.254")
        assert lab.namespace(1) == f"{lab.name}-h1"
        spawned = [lab.spawn(0, ["sleep", "1000"]), lab.run_switch(["sleep", "1000"], stdout=subprocess.PIPE)]
        name = lab.name
        with pytest.raises(UsageError, match="open already"), lab:
            pass
        assert all(child.poll() is None for child in spawned)
    assert opened.done[-1] == f"remove {name}"
    ended: list[Any] = [*spawned, opened.guard, opened.delays]
    assert [child.returncode for child in ended] == [-9] * 4
    assert spawned[1].stdout is not None
    assert spawned[1].stdout.closed
    with pytest.raises(UsageError, match="not open"):
        _ = lab.name
    with pytest.raises(UnsupportedError, match="no TAP"), Lab(hosts=2, delay_s=0.01):
        pass


def test_a_lab_that_cannot_be_built_is_removed(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*asked: Any) -> None:
        raise RingsideError("refused")

    monkeypatch.setattr(network, "build", refuses)
    with pytest.raises(RingsideError, match="refused"), Lab(hosts=2):
        pass
    assert opened.done[-1].startswith("remove ringside-")
    assert opened.guard.returncode == -9


def test_a_fork_of_the_owner_removes_nothing(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.getpid
    with Lab(hosts=1) as lab:
        monkeypatch.setattr(labs.os, "getpid", lambda: 1)
        lab.__exit__()
        assert not any(str(step).startswith("remove") for step in opened.done)
        monkeypatch.setattr(labs.os, "getpid", own)


def test_rates_and_cuts_are_of_all_links_of_a_host_or_of_a_pair(opened: Opened) -> None:
    with Lab(hosts=3, wiring="mesh", rate="10mbit") as lab:
        ab, ac, bc = mesh(3, 0.0).links
        opened.done.clear()
        lab.set_rate("20mbit", host=0)
        lab.cut(link=(1, 2))
        lab.set_rate(None, host=1)
        lab.restore(link=(2, 1))
        lab.set_rate("30mbit")
        lab.cut()
        lab.restore(host=0)
        assert opened.done == [
            ("shape", {ab: 20e6, ac: 20e6}),
            ("cut", [bc]),
            ("shape", {ab: None}),  # the other one is cut
            ("shape", {bc: None}),
            ("shape", {ab: 30e6, ac: 30e6, bc: 30e6}),
            ("cut", [ab, ac, bc]),
            ("shape", {ab: 30e6, ac: 30e6}),
        ]
        opened.done.clear()
        assert lab.link_bytes(0, 2) == (1, 10)
        assert lab.interface_bytes(1) == (2, 20)
        assert opened.done == [("h0", ["to2"]), ("h1", ["to0", "to2"])]
        for wrong in ({"host": 3}, {"host": -1}, {"link": (0, 3)}, {"link": (1, 1)}, {"host": 0, "link": (0, 1)}):
            with pytest.raises(UsageError, match=r"no host|no link|not both"):
                lab.cut(**wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="a mesh has no switch"):
            lab.run_switch(["true"])
        with pytest.raises(UsageError, match="a mesh has no switch"):
            _ = lab.switch_address
        for call in (lab.address, lab.namespace, lab.interface_bytes, lambda host: lab.spawn(host, ["true"])):
            with pytest.raises(UsageError, match="no host 3"):
                call(3)
    with Lab(hosts=2) as star_, pytest.raises(UsageError, match="in a star every host has one link"):
        star_.link_bytes(0, 1)


def test_ranks_find_who_they_are_and_runs_do_not_share_a_port(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    words = ["sh", "-c", "echo $RANK $RINGSIDE_HOST $MASTER_PORT $OMP_NUM_THREADS $GLOO_SOCKET_IFNAME $MINE"]
    with Lab(hosts=2, ranks_per_host=[2, 1]) as lab:
        opened.done.clear()
        for port in (29500, 29501):
            result = lab.run(words, {"MINE": "x", "MASTER_PORT": "4"} if port == 29501 else {"MINE": "y"})
            mine = "x" if port == 29501 else "y"
            shown = 4 if port == 29501 else port
            assert [rank.stdout for rank in result.ranks] == [
                f"{rank} host{host} {shown} 7 lab0 {mine}\n" for rank, host in ((0, 0), (1, 0), (2, 1))
            ]
            assert (result.ok, result.timed_out) == (True, False)
            assert result.seconds == max(rank.seconds for rank in result.ranks) > 0
            assert result.bytes_per_host == ((2, 20), (2, 20))
        told = lab.run_switch(["sh", "-c", "echo $GLOO_SOCKET_IFNAME $RANK"], stdout=subprocess.PIPE)
        assert told.communicate()[0] == "br0\n"
        told = lab.spawn(1, ["sh", "-c", "echo $GLOO_SOCKET_IFNAME $MINE"], {"MINE": "z"}, stdout=subprocess.PIPE)
        assert told.communicate()[0] == "lab0 z\n"
        late = lab.run(["sleep", "1000"], timeout_s=0.05)
        assert late.timed_out
        for wrong in ([], ["no-such-command-at-all"]):
            with pytest.raises(UsageError, match="there is no command"):
                lab.run(wrong)


# ------------------------------------------------------------------------------------------------ ranks as processes


def run(scripts: Sequence[str], timeout_s: float = PATIENCE_S, **how: Any) -> tuple[bool, tuple[RankResult, ...]]:
    with RankProcesses(how.pop("sink", None)) as ranks:
        for number, script in reversed(list(enumerate(scripts))):
            ranks.start(RankPlacement(number, number // 2, number % 2), ["sh", "-c", script], os.environ)
        finished = ranks.wait(timeout_s, **how)
        ranks.end()
        return finished, ranks.results()


def test_what_ranks_write_is_kept_apart_and_told_line_by_line() -> None:
    told: list[tuple[int, str, str]] = []
    finished, results = run(
        ["echo a; echo b; echo c >&2; printf d; exit 3", "printf 'e\\n'"],
        sink=lambda place, stream, line: told.append((place.rank, stream, line)),
    )
    assert finished
    assert [(result.rank, result.host, result.status, result.ended) for result in results] == [
        (0, 0, 3, False), (1, 0, 0, False),
    ]  # fmt: skip
    assert [(result.stdout, result.stderr) for result in results] == [("a\nb\nd", "c\n"), ("e\n", "")]
    assert [line for rank, stream, line in told if (rank, stream) == (0, "stdout")] == ["a", "b", "d"]
    assert sorted(line for rank, _, line in told if rank == 1) == ["e"]
    assert (0, "stderr", "c") in told
    assert results[0].describe() == "rank 0 on host 0 ended with status 3"
    assert all(0 < result.seconds < PATIENCE_S for result in results)


def test_a_line_is_told_while_its_rank_runs_and_others_write(tmp_path: Path) -> None:
    """Each rank goes on, and ends well, only once its first line has been told."""
    told: list[str] = []

    def sink(place: RankPlacement, stream: str, line: str) -> None:
        told.append(line)
        (tmp_path / line).touch()

    wait = "tries=0; while [ ! -e {file} ] && [ $tries -lt 300 ]; do sleep 0.01; tries=$((tries+1)); done"
    scripts = [
        f"echo rank{rank}; {wait.format(file=tmp_path / f'rank{1 - rank}')}; [ $tries -lt 300 ]" for rank in (0, 1)
    ]
    finished, results = run(scripts, sink=sink)
    assert finished
    assert [result.status for result in results] == [0, 0]
    assert sorted(told) == ["rank0", "rank1"]


def test_much_output_is_kept_whole_and_the_end_of_it_is_told_of_a_failure() -> None:
    """More than a pipe holds, on both streams."""
    finished, (result,) = run(["i=0; while [ $i -lt 20000 ]; do echo $i; echo e$i >&2; i=$((i+1)); done; exit 3"])
    assert finished
    assert result.stdout == "".join(f"{number}\n" for number in range(20000))
    found = RunResult((result,), 1.0, False, ())
    assert (found.ok, found.exit_status) == (False, 3)
    with pytest.raises(RingsideError) as caught:
        found.check()
    head, _, words = str(caught.value).partition("\n")
    assert head == "rank 0 on host 0 ended with status 3; its last words:"
    assert (len(words), words.endswith("e19999\n")) == (4000, True)
    silent = RunResult((RankResult(result.place, -9, "x" * 5000, "", 1.0, False),), 1.0, False, ())
    with pytest.raises(RingsideError, match=r"was ended by SIGKILL; its last words:\nx{4000}$"):
        silent.check()
    assert silent.exit_status == 137


def test_what_a_lab_is_where_nothing_is_asked_for() -> None:
    lab = Lab()
    assert (lab.hosts, lab.ranks_per_host, lab.rate, lab.delay_s, lab.wiring) == (4, (1, 1, 1, 1), 1e9, 0.0, "star")
    assert Lab(hosts=250).hosts == 250
    assert Lab(hosts=1, rate=None).rate is None


def test_a_rank_whose_child_keeps_its_pipe_open_has_ended() -> None:
    finished, (result,) = run(["sleep 3 & echo done"])
    assert finished
    assert result.stdout == "done\n"
    assert result.seconds < 3


def test_who_is_left_after_a_failure_has_a_limited_time_and_is_ended_with_all_below(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ringside.lab.processes.GRACE_S", 0.3)
    finished, results = run(
        ["exit 5", "sleep 1000", "trap '' TERM; while true; do sleep 0.05; done", "exit 0"], after_failure_s=0.3
    )
    assert not finished
    assert [(result.status, result.ended) for result in results] == [(5, False), (-15, True), (-9, True), (0, False)]
    assert results[1].describe().startswith("rank 1 on host 0 was ended by the lab after ")


def test_a_signal_has_its_name_in_words() -> None:
    place = RankPlacement(2, 1, 0)
    assert RankResult(place, -signal.SIGSEGV, "", "", 1.0, False).describe() == "rank 2 on host 1 was ended by SIGSEGV"
    assert RankResult(place, -77, "", "", 1.0, False).describe() == "rank 2 on host 1 was ended by signal 77"


# ------------------------------------------------------------------------------------------------ frames and streams


def frames_between_sockets() -> list[Any]:
    """Pass frames between two pairs of sockets that stand for TAP devices; return what came, and after how long."""
    ends = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    (here, a), (b, there) = ends
    for end in (a, b):
        end.setblocking(False)
    line = delay.DelayLine(0.05)
    ways = {a.fileno(): b.fileno(), b.fileno(): a.fileno()}
    threading.Thread(target=delay.pass_on, args=(line, ways), daemon=True).start()
    took, came = [], []
    for number in range(5):
        began = time.monotonic()
        for part in range(3):
            here.send(struct.pack("<II", number, part))
        came += [struct.unpack("<II", there.recv(100)) for _ in range(3)]
        took.append(time.monotonic() - began)
        there.send(b"back")
        assert here.recv(100) == b"back"
    return [came, min(took), line.next_due_s]


def test_every_frame_is_passed_on_in_order_after_the_delay_both_ways() -> None:
    ((came, took, left),) = on_ranks(1, frames_between_sockets)
    assert came == [(number, part) for number in range(5) for part in range(3)]
    assert took >= 0.0495
    assert left is None


def test_the_timer_rings_once_when_the_next_frame_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found: list[int] = []

    class TimerSetError(Exception):
        """Ends what goes on for ever."""

    def check(value: int) -> int:
        found.append(value)
        if len(found) == 2:  # the timer was made, and is set
            raise TimerSetError
        return value

    monkeypatch.setattr(delay, "check", check)
    sender.send(b"frame")
    receiver.setblocking(False)
    with sender, receiver, pytest.raises(TimerSetError):
        delay.pass_on(delay.DelayLine(1000.5), {receiver.fileno(): sender.fileno()})
    timer, result = found
    state = Path(f"/proc/self/fdinfo/{timer}").read_text()
    os.close(timer)
    assert result == 0
    seconds = {name: int(s) + int(ns) * 1e-9 for name, s, ns in re.findall(r"(it_\w+): \((\d+), (\d+)\)", state)}
    assert seconds["it_interval"] == 0
    assert 990 < seconds["it_value"] <= 1000.5


def test_how_late_it_wakes_up_is_learnt_slowly_and_within_bounds() -> None:
    assert delay.usually_late(0.0, 80e-6) == pytest.approx(10e-6)
    assert delay.usually_late(10e-6, -1.0) == pytest.approx(8.75e-6)
    late_s = 0.0
    for _ in range(200):
        late_s = delay.usually_late(late_s, 1.0)
    assert late_s == pytest.approx(0.5e-3)


def test_a_delay_process_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RingsideError, match=r"did not start: .*No such file or directory: '/run/netns/nowhere-at-all'"):
        delay.start_delay(0.01, [(("nowhere-at-all", "a"), ("nowhere-at-all", "b"))])
    monkeypatch.setattr(delay, "READY_S", 0.05)
    monkeypatch.setattr(sys, "executable", "/bin/sleep")
    with pytest.raises(RingsideError, match="did not start"):
        delay.start_delay(0.01, [])


class Here:
    """Stands for a lab whose hosts are this one."""

    def address(self, host: int) -> str:
        return f"127.0.0.{host + 1}"

    def inside(self, host: int, function: Callable[[], Any]) -> Any:
        return function()


def test_streams_and_round_trips_are_measured_by_what_the_receiver_saw() -> None:
    lab: Any = Here()
    flows = measure.stream_between(lab, [(0, 1), (1, 2)], 3_000_001)
    for flow in flows:
        assert 3_000_001 - measure.PIECE_BYTES <= flow.size_bytes < 3_000_001
        assert flow.first_s <= flow.last_s
    assert measure.summed_rate(flows) > 0
    took = measure.round_trips(lab, 0, 1, 5, 100_000)
    assert len(took) == 5
    assert min(took) > 0
    with measure.connect_hosts(lab, 0, 1) as (here, there):
        assert there.getsockname()[0] == "127.0.0.2"
        assert [end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for end in (here, there)] == [1, 1]
        assert here.gettimeout() == there.gettimeout() == 30.0
        here.sendall(b"abc")
        here.close()
        with pytest.raises(ConnectionError, match="closed the connection"):
            measure.receive_bytes(there, 4)


def test_flows_together_count_from_the_first_byte_to_the_last() -> None:
    one, two = measure.Flow(100, 1.0, 3.0), measure.Flow(300, 2.0, 5.0)
    assert (one.bytes_per_second, two.bytes_per_second) == (50.0, 100.0)
    assert measure.summed_rate([one, two]) == 100.0
    assert measure.Flow(1, 1.0, 1.0).bytes_per_second == pytest.approx(1e9)
    assert measure.summed_rate([measure.Flow(1, 1.0, 1.0)]) == pytest.approx(1e9)
