"""A network of hosts on one machine: network namespaces joined by links of a known rate and delay."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from subprocess import DEVNULL
from typing import IO, TypeVar

from ringside.errors import UnsupportedError, UsageError
from ringside.lab import network
from ringside.lab.namespaces import LabName, inside, remove, remove_leftovers, start_guard
from ringside.lab.network import interface_bytes
from ringside.lab.processes import (
    RankPlacement,
    RankProcesses,
    RunResult,
    Sink,
    default_environment,
    place_ranks,
    rank_environment,
    ranks_on,
)
from ringside.lab.wiring import (
    BRIDGE,
    SWITCH,
    SWITCH_ADDRESS,
    WIRINGS,
    LabLink,
    address_of,
    node_of,
    parse_delay,
    parse_rate,
)

_FIRST_PORT = 29500
Env = Mapping[str, str] | None
Stream = int | IO[str] | None
"""As for `subprocess.Popen`."""
_T = TypeVar("_T")


class Lab:
    """Hosts as network namespaces, joined by links; used in a `with` statement, which builds and removes it.

    It has many methods as it is the whole interface of a lab: what runs on hosts, what their links do, what they count.

    In a *star* every host has one link to a switch. In a *mesh* every pair of hosts has a link of its own. Every link
    carries `rate` in each direction. Whatever ends the process that made it, the lab does not stay: at exit it is
    removed, a guard process removes it when its owner is killed, and the next lab removes what a dead one left.

    Args:
        hosts: How many, 1 to 250.
        ranks_per_host: How many ranks `run` starts on each host: a number, or one for each host.
        rate: Of every link, each way: such as "1gbit", or bit/s; None for no limit.
        delay_s: What a frame takes from host to host, one way, seconds (half of it to a process at the switch); a
            round trip takes twice as long. 0: what the machine takes.
        wiring: "star" or "mesh".

    Attributes:
        rate: What links are made with, bit/s; None for no limit.

    Raises:
        UsageError: That cannot be; on entering the `with` statement: `unavailable()` says why it cannot be here.
        RingsideError: It could not be built, on entering.
    """

    def __init__(
        self,
        *,
        hosts: int = 4,
        ranks_per_host: int | Sequence[int] = 1,
        rate: str | float | None = "1gbit",
        delay_s: float = 0.0,
        wiring: str = "star",
    ) -> None:
        self.hosts = hosts
        self.ranks_per_host = ranks_on(hosts, ranks_per_host)
        self.delay_s = parse_delay(delay_s)
        if wiring not in WIRINGS:
            raise UsageError(f"unknown wiring {wiring!r}; there are {', '.join(WIRINGS)}")
        self.wiring = wiring
        self._plan = WIRINGS[wiring](hosts, self.delay_s)
        self.rate = None if rate is None else parse_rate(rate)
        self._rates: dict[LabLink, float | None] = dict.fromkeys(self._plan.links, self.rate)
        self._cut: set[LabLink] = set()
        self._ports = itertools.count(_FIRST_PORT)
        self._name: LabName | None = None
        self._delays: subprocess.Popen[str] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._spawned: list[subprocess.Popen[str]] = []

    @staticmethod
    def unavailable(delay: bool = False) -> str:
        """Return why no lab (with a delay) can be had on this machine, in one line; "" if it can be."""
        if (reason := network.unavailable()) or not delay or os.access("/dev/net/tun", os.R_OK | os.W_OK):
            return reason
        return "a delay needs /dev/net/tun, and it cannot be opened"

    def __enter__(self) -> Lab:
        reason = self.unavailable(self.delay_s > 0)
        if reason:
            raise UnsupportedError(reason)
        if self._name is not None:
            raise UsageError("this lab is open already: make another one")
        remove_leftovers()
        self._name = LabName.new()
        try:
            self._guard = start_guard(self._name)
            self._delays = network.build(self._name, self._plan, self.rate)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @property
    def name(self) -> str:
        """What the lab is called; `ip netns list` shows its namespaces as `<name>-h0`, ..., `<name>-switch`."""
        return str(self._open())

    def address(self, host: int) -> str:
        """Return a host's IPv4 address."""
        self._plan.check_host(host)
        return address_of(host)

    @property
    def switch_address(self) -> str:
        """The switch's IPv4 address, in a star."""
        self._need_switch()
        return SWITCH_ADDRESS

    def namespace(self, host: int) -> str:
        """Return the name of a host's namespace, as `ip netns exec` takes it."""
        self._plan.check_host(host)
        return self._open().namespace(node_of(host))

    def inside(self, host: int, function: Callable[[], _T]) -> _T:
        """Return what `function` returns when called on a host: sockets that it opens belong there for good."""
        return inside(self.namespace(host), function)

    def run(
        self,
        argv: Sequence[str],
        env: Env = None,
        timeout_s: float = 120.0,
        *,
        after_failure_s: float = float("inf"),
        sink: Sink | None = None,
    ) -> RunResult:
        """Run a command once per rank, each on its host, and wait for all of them.

        Every rank finds what torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR,
        MASTER_PORT), GLOO_SOCKET_IFNAME and its like for NCCL and TensorPipe, and otherwise this process's environment.

        Args:
            argv: The command and its arguments.
            env: Variables to add.
            timeout_s: How long they have; then those that are left are ended, and everything below them.
            after_failure_s: How long they have after one of them has failed.
            sink: Takes every line that a rank writes, at once.

        Returns:
            What became of them, by rank. It does not raise for a rank that failed; `.check()` does.

        Raises:
            UsageError: There is no such command.
        """
        before = self._all_bytes()
        with self.start_ranks(argv, env, sink) as ranks:
            finished = ranks.wait(timeout_s, after_failure_s)
            ranks.end()
            results = ranks.results()
        moved = tuple(
            (after[0] - was[0], after[1] - was[1]) for was, after in zip(before, self._all_bytes(), strict=True)
        )
        return RunResult(results, max(result.seconds for result in results), not finished, moved)

    def start_ranks(self, argv: Sequence[str], env: Env = None, sink: Sink | None = None) -> RankProcesses:
        """Start a command once per rank, as `run` does; whoever gets them waits for them, and ends them.

        Args:
            argv: The command and its arguments.
            env: Variables to add.
            sink: Takes every line that a rank writes, at once.

        Raises:
            UsageError: There is no such command.
        """
        _check_command(argv)
        ranks, port = RankProcesses(sink), next(self._ports)
        with contextlib.ExitStack() as stack:  # where one cannot be started, those before it end
            stack.push(ranks)
            for place in place_ranks(self.ranks_per_host):
                ranks.start(place, self._command(node_of(place.host), argv), self._environ(env, place, port))
            stack.pop_all()
        return ranks

    def spawn(
        self, host: int, argv: Sequence[str], env: Env = None, *, stdout: Stream = None, stderr: Stream = None
    ) -> subprocess.Popen[str]:
        """Start one process on a host; the lab ends it at exit, if it has not ended by then.

        Args:
            host: Where.
            argv: The command and its arguments.
            env: Variables to add.
            stdout: As for `subprocess.Popen`.
            stderr: As for `subprocess.Popen`.

        Raises:
            UsageError: There is no such host, or no such command.
        """
        self._plan.check_host(host)
        return self._spawn(node_of(host), argv, env, stdout, stderr)

    def run_switch(
        self, argv: Sequence[str], env: Env = None, *, stdout: Stream = None, stderr: Stream = None
    ) -> subprocess.Popen[str]:
        """Start one process at the switch of a star, as `spawn` does; every host reaches it at `switch_address`."""
        self._need_switch()
        return self._spawn(SWITCH, argv, {"GLOO_SOCKET_IFNAME": BRIDGE, **(env or {})}, stdout, stderr)

    def interface_bytes(self, host: int) -> tuple[int, int]:
        """Return (received, sent) bytes of a host over all its links, with Ethernet headers, as the kernel counts."""
        node = node_of(host)
        devices = [end.device for link in self._plan.links_of(host) for end in link.ends if end.node == node]
        return interface_bytes(self.namespace(host), devices)

    def link_bytes(self, a: int, b: int) -> tuple[int, int]:
        """Return (received, sent) bytes of host `a` over its link to host `b`, in a mesh."""
        link, node = self._plan.link_between(a, b), node_of(a)
        return interface_bytes(self.namespace(a), [end.device for end in link.ends if end.node == node])

    def set_rate(
        self, rate: str | float | None, *, host: int | None = None, link: tuple[int, int] | None = None
    ) -> None:
        """Change the rate of links, both ways, while the lab runs; a link that is cut gets it when it is restored.

        Args:
            rate: Such as "250mbit", or bit/s; None for no limit.
            host: All links of this host.
            link: The link between these two hosts, in a mesh. Neither: all links.

        Raises:
            UsageError: There is no such rate, host or link.
        """
        bits_per_s = None if rate is None else parse_rate(rate)
        chosen = self._chosen(host, link)
        self._rates.update(dict.fromkeys(chosen, bits_per_s))
        network.shape(self._open(), {cable: bits_per_s for cable in chosen if cable not in self._cut})

    def cut(self, *, host: int | None = None, link: tuple[int, int] | None = None) -> None:
        """Have links drop every frame, both ways, as if the cable were pulled out; connections do not notice at once.

        Args:
            host: All links of this host.
            link: The link between these two hosts, in a mesh. Neither: all links.
        """
        chosen = self._chosen(host, link)
        self._cut.update(chosen)
        network.cut(self._open(), chosen)

    def restore(self, *, host: int | None = None, link: tuple[int, int] | None = None) -> None:
        """Undo `cut`: the links carry again, at the rate they have.

        Args:
            host: All links of this host.
            link: The link between these two hosts, in a mesh. Neither: all links.
        """
        chosen = self._chosen(host, link)
        self._cut.difference_update(chosen)
        network.shape(self._open(), {cable: self._rates[cable] for cable in chosen})

    def _open(self) -> LabName:
        if self._name is None:
            raise UsageError("the lab is not open: use it in a with statement")
        return self._name

    def _close(self) -> None:
        name = self._open()
        if name.pid != os.getpid():
            return  # a fork of the owner: the lab is not its own
        # Closed from here on, whatever fails below.
        self._name = None
        try:
            remove(name)
            _end(self._guard)  # not if that failed: then the guard does it when this process ends
        finally:
            for child in (*self._spawned, self._delays):
                _end(child)

    def _need_switch(self) -> None:
        if not self._plan.has_switch:
            raise UsageError(f"a {self.wiring} has no switch; use wiring='star'")

    def _chosen(self, host: int | None, link: tuple[int, int] | None) -> list[LabLink]:
        if host is not None and link is not None:
            raise UsageError("name a host or a link, not both")
        if link is not None:
            return [self._plan.link_between(*link)]
        if host is not None:
            self._plan.check_host(host)
            return self._plan.links_of(host)
        return list(self._plan.links)

    def _all_bytes(self) -> list[tuple[int, int]]:
        return [self.interface_bytes(host) for host in range(self.hosts)]

    def _environ(self, env: Env, place: RankPlacement | None = None, port: int = 0) -> dict[str, str]:
        given = {**os.environ, **(env or {})}
        own = {} if place is None else rank_environment(place, self.ranks_per_host, port)
        return {**given, **default_environment(given, sum(self.ranks_per_host)), **own, **(env or {})}

    def _command(self, node: str, argv: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self._open().namespace(node), *argv]

    def _spawn(self, node: str, argv: Sequence[str], env: Env, stdout: Stream, stderr: Stream) -> subprocess.Popen[str]:
        _check_command(argv)
        command, environ = self._command(node, argv), self._environ(env)
        child = subprocess.Popen(
            command, env=environ, stdin=DEVNULL, stdout=stdout, stderr=stderr, text=True, start_new_session=True
        )
        self._spawned.append(child)
        return child


def _check_command(argv: Sequence[str]) -> None:
    if not argv:
        raise UsageError("there is no command to run, such as: python train.py")
    if shutil.which(argv[0]) is None:
        raise UsageError(f"there is no command {argv[0]!r} here")


def _end(child: subprocess.Popen[str] | subprocess.Popen[bytes] | None) -> None:
    """Kill a child of ours that is left, reap it, and close its pipes."""
    if child is None:
        return
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(5.0)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()
