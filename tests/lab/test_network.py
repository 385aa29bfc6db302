"""The network between the hosts of a lab: who reaches whom, how fast, over which link. Ratios only, in one run."""

from __future__ import annotations

import errno
import itertools
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from bench.lab.accuracy import connect_hosts, round_trips, stream_between, summed_rate

from ringside.errors import UsageError
from ringside.lab import Lab

from .factory import LabFactory

MB = 1_000_000
# Other work on the machine only makes streams slower and round trips longer: the best of some is what the lab did.
PLACE = "import os; e = os.environ; print(e['RANK'], e['WORLD_SIZE'], e['GROUP_RANK'], e['LOCAL_RANK'])"


def best_rate(lab: Lab, flows: list[tuple[int, int]], size_bytes: int) -> float:
    return max(summed_rate(stream_between(lab, flows, size_bytes)) for _ in range(3))


@pytest.mark.parametrize("wiring", ["star", "mesh"])
def test_every_host_reaches_every_other(lab_factory: LabFactory, wiring: str):
    lab = lab_factory(hosts=3, wiring=wiring)
    for a, b in itertools.permutations(range(3), 2):
        with connect_hosts(lab, a, b) as (here, there):
            assert there.getpeername()[0] == lab.address(a)
            assert here.getpeername()[0] == lab.address(b)


@pytest.mark.parametrize("wiring", ["star", "mesh"])
def test_a_quarter_of_the_rate_takes_four_times_as_long(lab_factory: LabFactory, wiring: str):
    lab = lab_factory(hosts=2, wiring=wiring, rate="160mbit")
    fast = best_rate(lab, [(0, 1)], 3 * MB)
    lab.set_rate("40mbit", host=1)
    slow = best_rate(lab, [(0, 1)], MB)
    lab.set_rate("160mbit")
    again = best_rate(lab, [(0, 1)], 3 * MB)
    assert 3.2 < fast / slow < 4.8
    assert 0.75 < again / fast < 1.33


def test_three_senders_share_the_rate_of_their_receiver(lab_factory: LabFactory):
    lab = lab_factory(hosts=4, rate="160mbit")
    one = best_rate(lab, [(1, 0)], 3 * MB)
    three = best_rate(lab, [(1, 0), (2, 0), (3, 0)], MB)
    assert 0.75 < three / one < 1.33


def test_both_directions_at_once_are_as_fast_as_one(lab_factory: LabFactory):
    lab = lab_factory(hosts=2, rate="160mbit")
    one = best_rate(lab, [(0, 1)], 3 * MB)
    both = (stream_between(lab, [(0, 1), (1, 0)], 3 * MB) for _ in range(3))
    assert max(min(flow.bytes_per_second for flow in flows) for flows in both) > 0.7 * one


def test_counters_count(lab_factory: LabFactory):
    lab = lab_factory(hosts=3)
    before = [lab.interface_bytes(host) for host in range(3)]
    stream_between(lab, [(0, 1)], 4 * MB)
    after = [lab.interface_bytes(host) for host in range(3)]
    moved = [(now[0] - was[0], now[1] - was[1]) for was, now in zip(before, after, strict=True)]
    assert 4 * MB < moved[0][1] < 4.4 * MB
    assert 4 * MB < moved[1][0] < 4.4 * MB
    assert max(moved[2]) < 0.1 * MB
    with pytest.raises(UsageError, match="host 3"):
        lab.interface_bytes(3)


def test_a_mesh_uses_the_link_of_the_pair(lab_factory: LabFactory):
    lab = lab_factory(hosts=3, wiring="mesh")
    before = lab.link_bytes(0, 1), lab.link_bytes(0, 2), lab.link_bytes(1, 0)
    stream_between(lab, [(0, 1)], 4 * MB)
    assert lab.link_bytes(0, 1)[1] - before[0][1] > 4 * MB
    assert lab.link_bytes(0, 2)[1] - before[1][1] < 0.1 * MB
    assert lab.link_bytes(1, 0)[0] - before[2][0] > 4 * MB
    both = zip(lab.link_bytes(0, 1), lab.link_bytes(0, 2), strict=True)
    assert lab.interface_bytes(0) == tuple(map(sum, both))


def test_one_link_of_a_mesh_gets_slower_and_the_others_do_not(lab_factory: LabFactory):
    lab = lab_factory(hosts=3, wiring="mesh", rate="160mbit")
    lab.set_rate("40mbit", link=(0, 2))
    assert 3.2 < best_rate(lab, [(0, 1)], 3 * MB) / best_rate(lab, [(2, 0)], MB) < 4.8


@pytest.mark.parametrize("rate", ["250mbit", "100mbit"])
def test_a_link_whose_queue_is_full_carries_on_at_a_lower_rate(lab_factory: LabFactory, rate: str):
    lab = lab_factory(hosts=2, wiring="mesh", rate="1gbit")
    begun = lab.interface_bytes(0)[1]
    with ThreadPoolExecutor(1) as pool:
        flows = pool.submit(stream_between, lab, [(0, 1), (1, 0)], 25 * MB)
        while lab.interface_bytes(0)[1] < begun + 5 * MB and not flows.done():
            pass  # the kernel counts; there is nothing to wait on
        assert not flows.done()
        lab.set_rate(rate, link=(0, 1))
        assert [flow.size_bytes > 24 * MB for flow in flows.result()] == [True, True]


@pytest.mark.parametrize(
    ("wiring", "where"), [("star", {"host": 1}), ("mesh", {"link": (0, 1)}), ("mesh", {"host": 1})]
)
def test_cut_and_restore(lab_factory: LabFactory, wiring: str, where: dict[str, object]):
    lab = lab_factory(hosts=3, wiring=wiring)
    with connect_hosts(lab, 0, 1) as (here, there), connect_hosts(lab, 0, 2) as (also, elsewhere):
        lab.cut(**where)
        lab.set_rate("100mbit")  # does not mend what is cut
        here.sendall(b"late")
        there.settimeout(0.3)
        with pytest.raises(TimeoutError):
            there.recv(4)
        also.sendall(b"other")
        assert elsewhere.recv(5) == b"other"
        lab.restore(**where)
        there.settimeout(30.0)
        assert there.recv(4) == b"late"


def test_a_connection_that_is_idle_is_given_up_where_its_link_is_cut(lab_factory: LabFactory):
    lab = lab_factory(hosts=2, wiring="mesh")
    with connect_hosts(lab, 0, 1) as (here, _):
        for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 1)):
            here.setsockopt(socket.IPPROTO_TCP, option, value)
        here.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        lab.cut(link=(0, 1))
        with pytest.raises(OSError) as raised:
            here.recv(1)
        assert raised.value.errno == errno.ETIMEDOUT  # the kernel's word, not that of the socket's own time limit


@pytest.mark.parametrize("wiring", ["star", "mesh"])
def test_a_round_trip_takes_twice_the_delay(lab_factory: LabFactory, wiring: str):
    none, short, long = (
        min(round_trips(lab_factory(hosts=2, wiring=wiring, delay_s=delay), 0, 1, 15)) for delay in (0.0, 0.01, 0.02)
    )
    assert short > 5 * none
    assert 1.5 < long / short < 2.3
    assert long > 0.0395  # never less than what was asked for, but for what waking up usually takes


def test_delayed_frames_keep_their_order(lab_factory: LabFactory):
    lab = lab_factory(hosts=2, delay_s=0.01)
    udp = (socket.AF_INET, socket.SOCK_DGRAM)
    with lab.inside(0, lambda: socket.socket(*udp)) as here, lab.inside(1, lambda: socket.socket(*udp)) as there:
        there.bind((lab.address(1), 0))
        there.settimeout(20.0)
        with connect_hosts(lab, 0, 1):  # who is where is known by now, so that no datagram waits for it
            for number in range(200):
                here.sendto(number.to_bytes(2, "big"), there.getsockname())
        assert [int.from_bytes(there.recv(2), "big") for _ in range(200)] == list(range(200))


def test_a_delayed_link_keeps_its_rate(lab_factory: LabFactory):
    lab = lab_factory(hosts=2, delay_s=0.002, rate="160mbit")
    delayed = best_rate(lab, [(0, 1)], 3 * MB)
    direct = best_rate(lab_factory(hosts=2, rate="160mbit"), [(0, 1)], 3 * MB)
    assert delayed / direct > 0.7


def test_unequal_hosts(lab_factory: LabFactory):
    lab = lab_factory(hosts=3, ranks_per_host=[2, 1, 3])
    result = lab.run([sys.executable, "-c", PLACE], timeout_s=60).check()
    assert [rank.stdout.split() for rank in result.ranks] == [
        [str(rank), "6", host, local]
        for rank, (host, local) in enumerate([("0", "0"), ("0", "1"), ("1", "0"), ("2", "0"), ("2", "1"), ("2", "2")])
    ]
    assert [rank.host for rank in result.ranks] == [0, 0, 1, 2, 2, 2]


def test_every_host_reaches_a_process_at_the_switch(lab_factory: LabFactory):
    lab = lab_factory(hosts=2)
    serve = (
        "import socket\n"
        f"listener = socket.create_server(('{lab.switch_address}', 0))\n"
        "print(listener.getsockname()[1], flush=True)\n"
        "for _ in range(2):\n"
        "    end, peer = listener.accept()\n"
        "    end.sendall(peer[0].encode())\n"
        "    end.close()\n"
    )
    server = lab.run_switch([sys.executable, "-c", serve], stdout=subprocess.PIPE)
    assert server.stdout is not None
    port = int(server.stdout.readline())
    for host in range(2):
        with lab.inside(host, lambda: socket.create_connection((lab.switch_address, port), timeout=20)) as end:
            assert end.recv(100).decode() == lab.address(host)
    assert server.wait(20) == 0


def test_a_spawned_process_lives_on_its_host(lab_factory: LabFactory):
    lab = lab_factory(hosts=2)
    process = lab.spawn(1, ["ip", "-4", "-br", "addr", "show", "dev", "lab0"], stdout=subprocess.PIPE)
    assert lab.address(1) in process.communicate(timeout=20)[0]


@pytest.mark.parametrize(
    ("wiring", "call", "message"),
    [
        ("star", lambda lab: lab.cut(link=(0, 1)), "one link, to the switch"),
        ("star", lambda lab: lab.cut(host=2), "no host 2: the hosts are 0 to 1"),
        ("star", lambda lab: lab.set_rate("fast"), "rate 'fast'"),
        ("star", lambda lab: lab.cut(host=0, link=(0, 1)), "not both"),
        ("star", lambda lab: lab.link_bytes(0, 1), "one link, to the switch"),
        ("star", lambda lab: lab.run(["no-such-command"]), "no command 'no-such-command'"),
        ("star", lambda lab: lab.run([]), "no command to run"),
        ("mesh", lambda lab: lab.cut(link=(0, 2)), "no link between hosts 0 and 2"),
        ("mesh", lambda lab: lab.run_switch(["true"]), "a mesh has no switch"),
        ("mesh", lambda lab: lab.switch_address, "a mesh has no switch"),
    ],
)
def test_what_a_lab_does_not_have_is_refused(lab_factory: LabFactory, wiring: str, call, message: str):
    lab: Lab = lab_factory(hosts=2, wiring=wiring)
    with pytest.raises(UsageError, match=message):
        call(lab)
