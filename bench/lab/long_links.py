"""Large all-reduces over long links: the default choice against bytes and rounds x delay of the best algorithm."""

from __future__ import annotations

from bench.common import Floor, report_progress
from bench.lab.expected import busiest, schedule_of
from bench.lab.jobs import DEFAULT, MB, Case, take_turns
from bench.lab.report import Section, size_words

from ringside.lab import Lab, payload_bytes_per_second
from ringside.schedule import ALGORITHMS

# 1 Gbit/s at 5 and 20 ms one way, `SLOWER` times as slow and as long: a link holds the same bytes, and the cores and
# the process that delays frames have `SLOWER` times as long for them.
SLOWER = 4
RATE_BIT_S, DELAYS_S = 1e9, (5e-3, 20e-3)
HOSTS, SIZES = (2, 4), (16 * MB, 64 * MB)
LEAST = 0.9
_SETTLE = 8  # calls until windows are open; large tensors begin with the cheapest of ours
_WAYS = [name for name in ALGORITHMS if name != "in_network"]


def law_s(name: str, n: int, size_bytes: int, bytes_per_s: float, delay_s: float) -> float:
    """Return what the busiest link's bytes take, and rounds x delay: an all-reduce of one rank per host, seconds."""
    schedule = schedule_of(name, n)
    return busiest(schedule, size_bytes).size_bytes / bytes_per_s + schedule.rounds * delay_s


def long_links(repeat: int) -> Section:
    """Compare the default choice with the law of the best algorithm, and with stock Gloo in turn: one rank per host."""
    rate = RATE_BIT_S / SLOWER
    section = Section(
        "long-links",
        f"One rank per host, star of {rate / 1e6:g} Mbit/s links, delays {SLOWER} times those of 1 Gbit/s that stand "
        "beside them: bytes / payload rate + rounds x delay of the best algorithm, by the time measured",
        [
            ("hosts", "hosts", "d"),
            ("delay, ms", "delay_ms", "g"),
            ("at 1 Gbit/s", "delay_of_gigabit_ms", "g"),
            ("size", "size", "s"),
            ("best", "best", "s"),
            ("law, ms", "law_ms", ".0f"),
            ("default, ms", "ms", ".0f"),
            ("law/default", "ratio", ".3f"),
            ("chosen", "chosen", "s"),
            ("places", "places", "d"),
            ("connections", "connections", "d"),
            ("Gloo, ms", "gloo_ms", ".0f"),
            ("law/Gloo", "gloo_ratio", ".3f"),
        ],
    )
    if reason := Lab.unavailable(delay=True):
        section.notes = [f"not measured: {reason}"]
        return section
    full = payload_bytes_per_second(rate)
    for n in HOSTS:
        for gigabit_s in DELAYS_S:
            delay_s = SLOWER * gigabit_s
            report_progress(f"  long-links: {n} hosts, {1e3 * delay_s:g} ms")
            cases = [Case(n, size_bytes, [DEFAULT, "gloo"], 2, warm=True) for size_bytes in SIZES]
            with Lab(hosts=n, rate=rate, delay_s=delay_s) as lab:
                turns = take_turns(lab, cases, repeat, settle=_SETTLE)
            for size_bytes in SIZES:
                law, best = min((law_s(name, n, size_bytes, full, delay_s), name) for name in _WAYS)
                seconds, gloo_s = (turns.seconds(n, size_bytes, name) for name in (DEFAULT, "gloo"))
                places, connections = turns.of(n, size_bytes, DEFAULT)[-1].reports[0]["in_flight"]
                section.rows.append(
                    {
                        "hosts": n,
                        "delay_ms": 1e3 * delay_s,
                        "delay_of_gigabit_ms": 1e3 * gigabit_s,
                        "size": size_words(size_bytes),
                        "best": best,
                        "law_ms": 1e3 * law,
                        "ms": 1e3 * seconds,
                        "ratio": law / seconds,
                        "chosen": turns.chosen(n, size_bytes),
                        "places": places,
                        "connections": connections,
                        "gloo_ms": 1e3 * gloo_s,
                        "gloo_ratio": law / gloo_s,
                    }
                )
                what = f"long-links, {n} hosts, {1e3 * delay_s:g} ms, {size_words(size_bytes)}: law by the default"
                section.floors.append(Floor(what, law / seconds, LEAST))
    section.notes = [
        f"{SLOWER} times as slow and as long: with the delay process of the lab and all hosts on the same cores, "
        "1 Gbit/s x 4 hosts is more than they carry. What a link holds in a round trip, and so what limits a "
        "connection, is the same.",
        "best: the algorithm whose law is least. Rounds overlap where a tensor travels in segments, so more than 1 can "
        "be.",
        "places: messages that may be on their way on a link; connections: over how many they take turns.",
        "every turn follows one call of the same kind that does not count: connections that were idle for longer than "
        "a round trip and 0.2 s begin slowly (net.ipv4.tcp_slow_start_after_idle).",
    ]
    return section
