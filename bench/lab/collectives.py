"""The collectives besides all-reduce between 4 hosts of 2 ranks: what shared memory inside the hosts saves."""

from __future__ import annotations

from statistics import median

from bench.common import Floor, report_progress
from bench.lab.jobs import KB, MB, Case, take_turns
from bench.lab.rank import COLLECTIVES, WAYS
from bench.lab.report import Section, size_words

from ringside.lab import Lab, payload_bytes_per_second

RATE, HOSTS, PER_HOST = "1gbit", 4, 2
SIZES = (64 * KB, MB, 16 * MB)


def moves(repeat: int) -> Section:
    """Compare ours through shared memory, ours over all ranks, and Gloo's, in turn."""
    ranks, full = HOSTS * PER_HOST, payload_bytes_per_second(RATE)
    section = Section(
        "moves",
        f"Star, {HOSTS} hosts x {PER_HOST} ranks, {RATE}: other collectives (size: of all ranks' parts together)",
        [
            ("collective", "collective", "s"),
            ("size", "size", "s"),
            ("Gloo, ms", "gloo_ms", ".2f"),
            ("over ranks, ms", "ranks_ms", ".2f"),
            ("ours, ms", "ours_ms", ".2f"),
            ("x over ranks", "x_ranks", ".2f"),
            ("rounds", "x_ranks_rounds", "s"),
            ("x Gloo", "x_gloo", ".2f"),
            ("rounds", "x_gloo_rounds", "s"),
            ("ms by the bytes", "law_ms", ".2f"),
        ],
    )
    cases = [
        Case(ranks, size, [f"{what}:{way}" for what in COLLECTIVES for way in WAYS if what != "barrier"])
        for size in SIZES
    ]
    cases.append(Case(ranks, 4 * ranks, [f"barrier:{way}" for way in WAYS]))
    with Lab(hosts=HOSTS, ranks_per_host=PER_HOST, rate=RATE) as lab:
        report_progress(f"  moves: {HOSTS} hosts x {PER_HOST}")
        turns = take_turns(lab, cases, repeat)
    for case in cases:
        for what in dict.fromkeys(name.partition(":")[0] for name in case.contenders):
            n, size = case.n, case.size_bytes
            names = {way: f"{what}:{way}" for way in WAYS}
            ratios = {way: turns.ratios(n, size, names[way], names["ours"]) for way in ("ranks", "gloo")}
            share = (HOSTS - 1) / HOSTS if what in ("reduce_scatter", "all_gather") else 1
            section.rows.append(
                {
                    "collective": what,
                    "size": size_words(size) if what != "barrier" else None,
                    **{f"{way}_ms": turns.seconds(n, size, names[way]) * 1e3 for way in WAYS},
                    **{f"x_{way}": median(pairs) for way, pairs in ratios.items()},
                    **{f"x_{way}_rounds": f"{min(pairs):.2f}-{max(pairs):.2f}" for way, pairs in ratios.items()},
                    "law_ms": share * size / full * 1e3 if what != "barrier" else None,
                }
            )
    section.floors = [
        Floor(f"moves, {row['collective']}, {row['size'] or 'nothing'}: {words}", row[key], least)
        for row in section.rows
        for key, words, least in (("x_ranks", "times the speed over ranks", 1.0), ("x_gloo", "times Gloo's speed", 1.0))
    ]
    section.notes = [
        "over ranks: ours with every rank taken for a host of its own, as it was before; the same processes, in turn.",
        "x: the median over rounds of the ratios of two neighbours; rounds: their interval.",
        "ms by the bytes: (H-1)/H of the size for reduce-scatter and all-gather, the size for broadcast and reduce, by "
        "the link's payload rate.",
    ]
    return section
